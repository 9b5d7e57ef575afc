"""Sparse MLA (DeepSeek-V3.2), compressed attention (DeepSeek-V4) and attention to chosen blocks
(MiniMax-M3): what they exclude."""

from vllm_davinci.core.config.architectures import is_sparse
from vllm_davinci.core.config.side_streams import ATTENTION, PREFETCH
from vllm_davinci.core.features.feature import Engine, Feature, refused


def _shares_choices(engine: Engine) -> bool:
    """True if layers reuse an earlier layer's choice of tokens."""
    text = engine.model.hf_text_config
    return bool(
        getattr(text, "index_topk_pattern", None) or getattr(text, "index_topk_freq", 1) > 1
    )


def _has_compressed_rows(engine: Engine) -> bool:
    """True if rows of the model's cache stand for groups of tokens."""
    text = getattr(engine.model, "hf_text_config", None)
    return getattr(text, "model_type", None) == "deepseek_v4"


def _chooses_blocks(engine: Engine) -> bool:
    """True if an index chooses blocks of keys."""
    text = getattr(engine.model, "hf_text_config", None)
    return hasattr(text, "sparse_attention_config") or hasattr(text, "index_block_size")


def _other_quantization(engine: Engine) -> str | None:
    """A quantization that no checkpoint of such a model has been tried with."""
    method = getattr(engine.model, "quantization", None)
    is_known = method in (None, "ascend", "fp8")
    return None if is_known or not _has_compressed_rows(engine) else str(method)


FEATURES = (
    Feature(
        "",
        "sparse attention",
        lambda e: is_sparse(e.model),
        excludes=dict.fromkeys(
            ("--enable-lora", "dbo.enabled", ATTENTION, PREFETCH, "--kv-transfer-config"), ""
        ),
    ),
    refused(
        "--pipeline-parallel-size with shared token choices",
        "pipeline stages whose first layers reuse the previous stage's choice",
        lambda e: (
            is_sparse(e.model) and _shares_choices(e) and e.parallel.pipeline_parallel_size > 1
        ),
        as_given=lambda e: f"--pipeline-parallel-size {e.parallel.pipeline_parallel_size}",
    ),
    Feature(
        "",
        "a cache whose rows stand for groups of tokens",
        lambda e: is_sparse(e.model) and _has_compressed_rows(e),
        excludes=dict.fromkeys(
            (
                "--kv-transfer-config",
                "--kv-offloading-size",
                "eplb_config.dynamic_eplb",
                "--enable-prompt-embeds",
                "--decode-context-parallel-size",
            ),
            "it has not been tried",
        ),
    ),
    Feature(
        "",
        "attention to chosen blocks",
        _chooses_blocks,
        excludes=dict.fromkeys(
            (
                "--enable-lora",
                "dbo.enabled",
                "--kv-transfer-config",
                "--kv-offloading-size",
                "--decode-context-parallel-size",
            ),
            "it has not been tried",
        ),
    ),
    refused(
        "--quantization with rows of groups of tokens",
        "other quantized checkpoints of models whose rows stand for groups of tokens",
        lambda e: _other_quantization(e) is not None,
        as_given=lambda e: f"--quantization {_other_quantization(e)}",
        because="it has not been tried",
        instead="Use a checkpoint that --quantization ascend or fp8 serves.",
    ),
)
