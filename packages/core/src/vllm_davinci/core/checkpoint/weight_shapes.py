"""Shapes of a model's weights, as far as they follow from config.json."""

import re
from collections.abc import Mapping
from typing import Any

Shape = tuple[int | None, ...]  # None: anything

_LAYER = re.compile(r"^(?:model\.|language_model\.)*layers\.\d+\.(?P<part>.+)$")
_EXPERT = re.compile(r"^mlp\.experts\.\d+\.(?P<part>\w+)$")
# Models with one head size and one intermediate size throughout.
_UNIFORM = frozenset({"llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "qwen2_moe"})
_MLA = frozenset({"deepseek_v2", "deepseek_v3"})


def weight_shape(config: Mapping[str, Any], prefix: str) -> Shape | None:
    """Shape of `<prefix>.weight`, or None if config.json does not determine it.

    config: of the language model
    """
    hidden, vocabulary = _size(config, "hidden_size"), _size(config, "vocab_size")
    if prefix.rpartition(".")[2] in ("lm_head", "embed_tokens"):
        return (vocabulary, hidden)
    match = _LAYER.match(prefix)
    if match is None:
        return None
    part = match["part"]
    if expert := _EXPERT.match(part):
        return _gated(expert["part"], hidden, _size(config, "moe_intermediate_size"))
    if part.startswith("mlp.shared_experts."):
        inner, count = _size(config, "moe_intermediate_size"), _size(config, "n_shared_experts")
        width = None if inner is None or count is None else inner * count
        return _gated(part.rpartition(".")[2], hidden, width)
    if part.startswith("mlp."):
        is_known = _model_type(config) in _UNIFORM | _MLA
        width = _size(config, "intermediate_size") if is_known else None
        return _gated(part.removeprefix("mlp."), hidden, width)
    if part in ("input_layernorm", "post_attention_layernorm"):
        return (hidden,)
    if part.startswith("self_attn."):
        return _attention(config, part.removeprefix("self_attn."), hidden)
    return None


def _model_type(config: Mapping[str, Any]) -> str:
    """The model type as text, whatever its type in config.json."""
    return str(config.get("model_type"))


def _gated(part: str, hidden: int | None, width: int | None) -> Shape | None:
    return {
        "gate_proj": (width, hidden),
        "up_proj": (width, hidden),
        "down_proj": (hidden, width),
    }.get(part)


def _attention(config: Mapping[str, Any], part: str, hidden: int | None) -> Shape | None:
    model_type, heads = _model_type(config), _size(config, "num_attention_heads")
    if model_type in _MLA and (kv_lora_rank := _size(config, "kv_lora_rank")):
        content, rotary, value = (
            _size(config, name) or 0
            for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        )
        queries, count = _size(config, "q_lora_rank"), heads or 0
        shapes: dict[str, Shape] = {
            "q_proj": (count * (content + rotary), hidden),
            "q_a_proj": (queries, hidden),
            "q_b_proj": (count * (content + rotary), queries),
            "kv_a_proj_with_mqa": (kv_lora_rank + rotary, hidden),
            "kv_b_proj": (count * (content + value), kv_lora_rank),
            "o_proj": (hidden, count * value),
        }
        return shapes.get(part)
    groups = _size(config, "num_key_value_heads") or heads
    head = _size(config, "head_dim") or (hidden // heads if hidden and heads else None)
    if model_type not in _UNIFORM or not (heads and groups and head):
        heads = groups = head = None
    wide = heads * head if heads and head else None
    narrow = groups * head if groups and head else None
    return {
        "q_proj": (wide, hidden),
        "k_proj": (narrow, hidden),
        "v_proj": (narrow, hidden),
        "o_proj": (hidden, wide),
    }.get(part)


def _size(config: Mapping[str, Any], name: str) -> int | None:
    value = config.get(name)
    return value if isinstance(value, int) else None
