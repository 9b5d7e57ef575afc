"""Sparse MLA (DeepSeek-V3.2, HY-V4), compressed rows (DeepSeek-V4, GLM-5.3, Qwen3.8-Flash-Next) and
attention to chosen blocks (MiniMax-M3): incompatible features."""

from vllm_davinci.core.config.architectures import is_sparse
from vllm_davinci.core.config.side_streams import ATTENTION, PREFETCH
from vllm_davinci.core.errors import ConfigurationError
from vllm_davinci.core.features.feature import Engine, Feature, refused

# A key of ModelSlim's descriptions: the type of an indexer's keys.
INDEXER_TYPE = "indexer_quant_type"


def _shares_choices(engine: Engine) -> bool:
    """True if layers reuse an earlier layer's choice of tokens."""
    text = engine.model.hf_text_config
    return bool(
        getattr(text, "index_topk_pattern", None)
        or getattr(text, "index_topk_freq", 1) > 1
        or "shared" in (getattr(text, "indexer_types", None) or ())
    )


def _has_compressed_rows(engine: Engine) -> bool:
    """True if rows of the model's cache stand for groups of tokens."""
    text = getattr(engine.model, "hf_text_config", None)
    return getattr(text, "model_type", None) in ("deepseek_v4", "glm5_next_text", "qwen4_exp_text")


def _has_sinks(engine: Engine) -> bool:
    """True if heads of sparse MLA have sinks."""
    text = getattr(engine.model, "hf_text_config", None)
    return getattr(text, "model_type", None) == "hy_v4"


def _chooses_blocks(engine: Engine) -> bool:
    """True if an index chooses blocks of keys."""
    text = getattr(engine.model, "hf_text_config", None)
    return hasattr(text, "sparse_attention_config") or hasattr(text, "index_block_size")


def _other_quantization(engine: Engine) -> str | None:
    """The model's quantization if it has not been tried with such a model; else None."""
    method = getattr(engine.model, "quantization", None)
    is_known = method in (None, "ascend", "fp8")
    return None if is_known or not _has_compressed_rows(engine) else str(method)


def _settle(engine: Engine) -> None:
    """Sets the dtype of an indexer's keys: the model's, or int8 if the checkpoint says so."""
    attention = getattr(engine.vllm, "attention_config", None)
    if attention is None:
        return
    text, name = engine.model.hf_text_config, "indexer_kv_dtype"
    if getattr(text, "model_type", None) != "deepseek_v4":
        engine.set(attention, name, "auto", "an indexer's keys have the model's dtype")
        return
    described = getattr(getattr(engine.vllm.quant_config, "format", None), "options", None) or {}
    if attention.indexer_kv_dtype == "auto" and described.get(INDEXER_TYPE) == "INT8_DYNAMIC":
        why = f"the checkpoint's description has {INDEXER_TYPE} INT8_DYNAMIC"
        engine.set(attention, name, "int8", why)
    if attention.indexer_kv_dtype not in ("auto", "bf16", "int8"):
        why = "an indexer's keys have the model's dtype, or int8"
        engine.set(attention, name, "bf16", why)
    size = getattr(text, "index_head_dim", 1)
    if attention.indexer_kv_dtype == "int8" and size & (size - 1):
        raise ConfigurationError(
            f"--attention-config: {name} 'int8' rotates an indexer's keys by a Hadamard matrix, "
            f"whose size is a power of two, and their size (index_head_dim) is {size}. Remove it."
        )


def _groups_of_heads(engine: Engine) -> int:
    """Groups of heads that share a part of the output's projection; 0 without such groups."""
    text = getattr(engine.model, "hf_text_config", None)
    return int(getattr(text, "o_groups", 0)) if _has_compressed_rows(engine) else 0


FEATURES = (
    Feature(
        "",
        "sparse attention",
        lambda e: is_sparse(e.model),
        excludes=dict.fromkeys(("--enable-lora", "dbo.enabled", ATTENTION, PREFETCH), ""),
        settle=_settle,
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
        _has_compressed_rows,
        excludes=dict.fromkeys(
            (
                "dbo.enabled",
                "eplb_config.dynamic_eplb",
                "--enable-prompt-embeds",
                "--decode-context-parallel-size",
            ),
            "it has not been tried",
        ),
    ),
    Feature(
        "",
        "sparse attention with sinks",
        _has_sinks,
        excludes=dict.fromkeys(
            (
                "eplb_config.dynamic_eplb",
                "--enable-prompt-embeds",
                "--decode-context-parallel-size",
            ),
            "it has not been tried",
        ),
    ),
    refused(
        "--quantization with sinks",
        "quantized checkpoints of models with sparse attention and sinks",
        lambda e: _has_sinks(e) and getattr(e.model, "quantization", None) is not None,
        as_given=lambda e: f"--quantization {e.model.quantization}",
        because="it has not been tried",
        instead="Use a checkpoint of floats.",
    ),
    Feature(
        "",
        "attention to chosen blocks",
        _chooses_blocks,
        excludes=dict.fromkeys(
            ("--enable-lora", "dbo.enabled", "--decode-context-parallel-size"),
            "it has not been tried",
        ),
    ),
    refused(
        "--tensor-parallel-size with groups of heads",
        "ranks that divide a group of heads (o_groups)",
        lambda e: _groups_of_heads(e) % getattr(e.parallel, "tensor_parallel_size", 1) != 0,
        as_given=lambda e: f"--tensor-parallel-size {e.parallel.tensor_parallel_size}",
        because=lambda e: f"there are {_groups_of_heads(e)} groups",
        instead="Use a divisor of o_groups.",
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
