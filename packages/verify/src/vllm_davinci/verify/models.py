"""Released models in whose sizes operators are called, each on one rank of a typical layout."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from vllm_davinci.operators.calls import families
from vllm_davinci.operators.calls.call import OperatorCall
from vllm_davinci.operators.calls.sizes import LatentSizes, ModelSizes

_DEEPSEEK = ModelSizes(  # tensor-parallel on 8 ranks, experts on 64
    "deepseek-v3", hidden=7168, heads=16, kv_heads=16, head_size=56, rotary_size=56,
    intermediate=2304, epsilon=1e-6, latent=LatentSizes(1536, 512, nope=128, rope=64, value=128),
    all_experts=256, experts=4, top_k=8, groups=8, chosen_groups=4, is_sigmoid=True,
    scaling_factor=2.5, expert_intermediate=2048,
)  # fmt: skip
_MODELS = (
    ModelSizes(
        "qwen3-8b", hidden=4096, heads=32, kv_heads=8, head_size=128, rotary_size=128,
        intermediate=12288, epsilon=1e-6, has_common=True,
    ),
    ModelSizes(  # on 2 ranks, experts on 16
        "qwen3-30b-a3b", hidden=2048, heads=16, kv_heads=2, head_size=128, rotary_size=128,
        intermediate=3072, epsilon=1e-6, all_experts=128, experts=8, top_k=8,
        expert_intermediate=768,
    ),
    ModelSizes(  # on 8 ranks, experts on 32
        "glm-4.5-air", hidden=4096, heads=12, kv_heads=1, head_size=128, rotary_size=64,
        intermediate=1368, epsilon=1e-5, all_experts=128, experts=4, top_k=8, is_sigmoid=True,
        expert_intermediate=1408,
    ),
    _DEEPSEEK,
    replace(_DEEPSEEK, name="deepseek-v3.2", index_heads=64),
)  # fmt: skip
MODELS = {model.name: model for model in _MODELS}
# Operators that core launches and no call compares, with the reason.
NOT_COMPARED = {
    "npu_moe_distribute_dispatch_v2": "needs a group of at least 16 ranks on A2",
    "npu_moe_distribute_combine_v2": "takes a group of 16 ranks at least on A2",
    "npu_prefetch": "computes nothing",
}
# Operators without a case of their own: the call named here launches them.
WITHIN_OTHERS = {
    "npu_format_cast": "npu_quant_matmul with its weight in NZ layout",
    "npu_convert_weight_to_int4pack": "npu_weight_quant_batchmatmul with 4-bit weights",
}


def calls_of(models: Iterable[str]) -> Iterator[tuple[str, OperatorCall]]:
    """Yields the name of each finding and its call; models with the same call share it."""
    for model in models:
        for call in families.calls_of(MODELS[model]):
            yield f"operators/{call.operator}/{model}/{call.variant}", call
