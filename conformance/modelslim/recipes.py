"""Recipes for ModelSlim, in the form of its recipe files."""

from dataclasses import dataclass
from typing import Any

Step = dict[str, Any]


def scheme(scope: str, dtype: str, symmetric: bool = True) -> Step:
    return {"scope": scope, "dtype": dtype, "symmetric": symmetric, "method": "minmax"}


WEIGHT = scheme("per_channel", "int8")
STATIC = {"act": scheme("per_tensor", "int8", symmetric=False), "weight": WEIGHT}
DYNAMIC = {"act": scheme("per_token", "int8"), "weight": WEIGHT}
MIX = {"act": scheme("pd_mix", "int8", symmetric=False), "weight": WEIGHT}
INT4 = {"act": scheme("per_token", "int8"), "weight": scheme("per_channel", "int4")}
WEIGHT_ONLY = {"weight": WEIGHT}
WEIGHT_ONLY_GROUPS = {
    "weight": {
        **scheme("per_group", "int8", symmetric=False),
        "method": "gptq",
        "ext": {"group_size": 64},
    }
}


def linear(qconfig: Step, include: str = "*", *exclude: str) -> Step:
    # Every shipped recipe of ModelSlim keeps heads and attention's kv_b_proj as floats.
    left_out = ["lm_head", *exclude, *(["*kv_b_proj"] if include == "*self_attn*" else [])]
    return {"type": "linear_quant", "qconfig": qconfig, "include": [include], "exclude": left_out}


def group(*configs: Step) -> Step:
    return {"type": "group", "configs": list(configs)}


SMOOTH = {"type": "iter_smooth", "include": ["*"]}
FLEX_SMOOTH = {"type": "flex_smooth_quant", "include": ["*"]}
ROTATE = {"type": "quarot", "block_size": 32}
CACHE = {"type": "dynamic_cache", "qconfig": WEIGHT, "include": ["*"]}
EXPERTS, NO_EXPERTS = "*mlp.experts.*", ("*gate", "*mlp.experts.*")


@dataclass(frozen=True)
class Recipe:
    """An export.

    model_type: one of ModelSlim's names
    steps:      as in its version 1 recipes; empty with `older`
    refused:    part of the refusal by our check and our engine; None: it is served
    older:      a KIND of older_export.py
    ours:       type of `vllm-davinci quantize` whose tensors are compared with these
    """

    name: str
    model: str
    model_type: str
    steps: tuple[Step, ...]
    refused: str | None = None
    older: str | None = None
    ours: str | None = None

    @property
    def source(self) -> str:
        """Returns the shipped checkpoint that the model equals, if any."""
        return self.model.removesuffix("_wide")


QWEN3, QWEN3_MOE = ("qwen3", "Qwen3-32B"), ("qwen3_moe", "Qwen3-30B")
QWEN2_5, DEEPSEEK = ("qwen2_5", "Qwen2.5-7B-Instruct"), ("deepseek_v3", "DeepSeek-V3")
# Llama has Qwen2.5's module names, and ModelSlim has no adapter for Llama that smooths.
TINY_LLAMA, TINY_DEEPSEEK = ("tiny_llama", QWEN2_5[1]), ("tiny_deepseek", "DeepSeek-V3")

RECIPES = (
    Recipe("static", *QWEN3, (SMOOTH, linear(STATIC))),
    Recipe("dynamic", *QWEN3, (SMOOTH, linear(DYNAMIC))),
    Recipe("static, some floats", *QWEN3, (linear(STATIC, "*", "*down_proj", "*layers.1.mlp*"),)),
    Recipe("mix", *QWEN3, (SMOOTH, linear(MIX))),
    Recipe("weights of 8 bits", *QWEN3, (linear(WEIGHT_ONLY),)),
    Recipe("weights of 8 bits, groups", *QWEN2_5, (linear(WEIGHT_ONLY_GROUPS),)),
    Recipe("weights of 8 bits", *QWEN3_MOE, (linear(WEIGHT_ONLY, "*", "*gate"),)),
    Recipe("weights of 4 bits", *QWEN2_5, (), older="w4a16"),
    Recipe("weights of 4 bits, groups", *QWEN2_5, (), older="w4a16-groups"),
    Recipe("int8 cache", *QWEN3, (linear(DYNAMIC), CACHE), refused="kv_quant_type 'C8'"),
    Recipe("rotated static", *QWEN3, (ROTATE, linear(STATIC))),
    Recipe("static", *QWEN2_5, (SMOOTH, linear(STATIC))),
    Recipe("dynamic", *QWEN2_5, (FLEX_SMOOTH, linear(DYNAMIC))),
    Recipe("static, by the older exporter", *QWEN2_5, (), older="w8a8"),
    Recipe("dynamic", *QWEN3_MOE, (FLEX_SMOOTH, linear(DYNAMIC, "*", "*gate"))),
    Recipe("static, experts too", *QWEN3_MOE, (linear(STATIC, "*", "*gate"),)),
    Recipe(
        "static attention, int4 experts", *QWEN3_MOE,
        (FLEX_SMOOTH, group(linear(STATIC, "*self_attn*"), linear(INT4, EXPERTS))),
    ),
    Recipe(
        "static attention, dynamic experts", *DEEPSEEK,
        (FLEX_SMOOTH, group(linear(STATIC, "*self_attn*"), linear(DYNAMIC, "*mlp*", "*gate"))),
    ),
    Recipe("static, kv_b_proj too", *DEEPSEEK, (linear(STATIC, "*self_attn.*"),)),
    Recipe(
        "rotated, int4 experts", *DEEPSEEK,
        (
            ROTATE,
            group(
                linear(STATIC, "*self_attn*"),
                linear(DYNAMIC, "*mlp*", *NO_EXPERTS),
                linear(INT4, EXPERTS),
            ),
        ),
    ),
    # down_proj's inputs have outliers, for which minmax widens the range.
    Recipe(
        "static, down_proj dynamic", *TINY_LLAMA,
        (SMOOTH, group(linear(STATIC, "*", "*down_proj"), linear(DYNAMIC, "*down_proj"))),
    ),
    Recipe("static", *TINY_LLAMA, (linear(STATIC),), ours="W8A8"),
    Recipe("dynamic", *TINY_LLAMA, (linear(DYNAMIC),), ours="W8A8_DYNAMIC"),
    Recipe("weights of 8 bits", *TINY_LLAMA, (linear(WEIGHT_ONLY),)),
    Recipe("dynamic", "tiny_llama_wide", QWEN2_5[1], (linear(DYNAMIC),), ours="W8A8_DYNAMIC"),
    Recipe(
        "static attention, dynamic experts", *TINY_DEEPSEEK,
        (group(linear(STATIC, "*self_attn*"), linear(DYNAMIC, "*mlp*", "*gate")),),
    ),
    Recipe(
        "dynamic", *TINY_DEEPSEEK, (linear(DYNAMIC, "*", "*gate", "*kv_b_proj"),),
        ours="W8A8_DYNAMIC",
    ),
)  # fmt: skip
