"""Options and models that decode context parallelism does not go with."""

from typing import TYPE_CHECKING

from vllm_davinci.core.config.hybrids import keeps_states
from vllm_davinci.core.config.parsing import get_config

if TYPE_CHECKING:
    from vllm.config import VllmConfig

MOST_RANKS = 16  # whose parts CANN's AttentionUpdate merges


def refused_with_context_parallel(vllm_config: "VllmConfig") -> dict[str, bool]:
    """Lists what a context divided among ranks cannot be served with: name -> is it asked for."""
    parallel = vllm_config.parallel_config
    refused = {
        "context parallelism of prefills (--prefill-context-parallel-size)": (
            parallel.prefill_context_parallel_size > 1
        )
    }
    if parallel.decode_context_parallel_size == 1:
        return refused
    model, size = vllm_config.model_config, parallel.decode_context_parallel_size
    combined = {
        f"more than {MOST_RANKS} ranks": size > MOST_RANKS,
        "queries of all heads on every rank (--dcp-q-replicate)": bool(parallel.dcp_q_replicate),
        "overlap of ubatches (additional_config key 'overlap' or 'dbo')": (
            get_config(vllm_config).dbo.enabled
        ),
        "speculation (--speculative-config)": vllm_config.speculative_config is not None,
        "transfer of the KV cache (--kv-transfer-config)": (
            vllm_config.kv_transfer_config is not None
        ),
        "a KV cache that goes on in the host's memory (--kv-offloading-size)": (
            vllm_config.cache_config.kv_offloading_size is not None
        ),
        "an encoder-decoder model": model is not None and model.is_encoder_decoder,
        "tokens of images that see each other both ways": (
            model is not None and model.is_mm_prefix_lm
        ),
        "recurrent states": model is not None and keeps_states(model),
        "sparse attention": model is not None and hasattr(model.hf_text_config, "index_topk"),
    }
    return refused | {
        f"a context divided among ranks (--decode-context-parallel-size {size}) with {what}": asked
        for what, asked in combined.items()
    }
