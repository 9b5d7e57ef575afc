"""Models with sparse MLA: what is not served beside it."""

from typing import TYPE_CHECKING

from vllm_davinci.core.config.kv_transfer import CONNECTORS
from vllm_davinci.core.config.parsing import get_config
from vllm_davinci.core.config.side_streams import ATTENTION, PREFETCH
from vllm_davinci.core.errors import RELEASE, ConfigurationError

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig


def is_sparse(model: "ModelConfig | None") -> bool:
    """Whether an indexer chooses the tokens that the model's MLA attends to."""
    return model is not None and hasattr(model.hf_text_config, "index_topk")


def refuse_beside_sparse_attention(vllm_config: "VllmConfig") -> None:
    """Raises ConfigurationError for options that sparse MLA is not served with."""
    model = vllm_config.model_config
    if not is_sparse(model):
        return
    text = model.hf_text_config
    shares = getattr(text, "index_topk_pattern", None) or getattr(text, "index_topk_freq", 1) > 1
    transfer = vllm_config.kv_transfer_config
    config = get_config(vllm_config)
    stages = vllm_config.parallel_config.pipeline_parallel_size
    refused = {
        "LoRA adapters (--enable-lora)": vllm_config.lora_config is not None,
        "dual-batch overlap (dbo.enabled)": config.dbo.enabled,
        f"side streams of MLA ({ATTENTION})": config.torchair_graph_config.enable_multistream_mla,
        f"weights that are fetched ahead ({PREFETCH})": config.weight_prefetch_config.enabled,
        "a KV cache that other engines take (--kv-transfer-config)": (
            transfer is not None and transfer.kv_connector not in CONNECTORS
        ),
        f"{stages} pipeline stages, of which the first layers may share the choice of the stage "
        "before (--pipeline-parallel-size)": bool(shares) and stages > 1,
        **(_refused_with_rows(vllm_config) if has_compressed_rows(model) else {}),
    }
    if asked := [feature for feature, is_asked in refused.items() if is_asked]:
        raise ConfigurationError(
            f"not available in {RELEASE} for {', '.join(model.architectures)}, whose attention is "
            f"sparse: {', '.join(asked)}. Start without it."
        )


def has_compressed_rows(model: "ModelConfig") -> bool:
    """Whether rows of the model's cache stand for groups of tokens."""
    return getattr(model.hf_text_config, "model_type", None) == "deepseek_v4"


def _refused_with_rows(vllm_config: "VllmConfig") -> dict[str, bool]:
    """By option, whether it is asked for: those that have not been tried with such rows."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    return {
        "speculative decoding (--speculative-config)": vllm_config.speculative_config is not None,
        "a KV cache that goes on elsewhere (--kv-transfer-config, --kv-offloading-size)": (
            vllm_config.kv_transfer_config is not None
            or vllm_config.cache_config.kv_offloading_size is not None
        ),
        "data parallelism (--data-parallel-size)": parallel.data_parallel_size > 1,
        "expert balancing (--enable-eplb)": parallel.enable_eplb,
        f"quantized checkpoints ({model.quantization})": model.quantization is not None,
        "prompts of embeddings (--enable-prompt-embeds)": model.enable_prompt_embeds,
        "a context divided among ranks (--decode-context-parallel-size)": (
            parallel.decode_context_parallel_size > 1
        ),
    }
