"""All calls, model by model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from vllm_davinci.verify.operators import (
    attention,
    attention_parts,
    compiled,
    elements,
    experts,
    latent_attention,
    norms,
    products,
    quantization,
    rotary,
    sparse_attention,
)
from vllm_davinci.verify.operators.call import OperatorCall
from vllm_davinci.verify.operators.shapes import ModelSizes, sizes_of

Family = Callable[[ModelSizes], Iterator[OperatorCall]]
FAMILIES: tuple[Family, ...] = (
    elements.calls,
    norms.calls,
    rotary.calls,
    products.calls,
    quantization.calls,
    attention.calls,
    attention_parts.calls,
    latent_attention.calls,
    sparse_attention.calls,
    experts.calls,
    compiled.calls,
)
# What core launches and no call here compares, and why.
NOT_COMPARED = {
    "npu_moe_distribute_dispatch_v2": "takes a group of 16 ranks at least on A2",
    "npu_moe_distribute_combine_v2": "takes a group of 16 ranks at least on A2",
    "npu_prefetch": "computes nothing",
}
# What other operators' calls launch before.
WITHIN_OTHERS = {
    "npu_format_cast": "npu_quant_matmul with its weight in tiles",
    "npu_convert_weight_to_int4pack": "npu_weight_quant_batchmatmul with 4-bit weights",
}


def calls_of(models: Iterable[str]) -> Iterator[tuple[str, OperatorCall]]:
    """Names of findings and calls; one that two models have in common is told of both."""
    for model in models:
        sizes = sizes_of(model)
        # Sparse attention aside, DeepSeek-V3.2's layers are those of DeepSeek-V3.
        for family in (sparse_attention.calls,) if sizes.index_heads else FAMILIES:
            for call in family(sizes):
                yield f"operators/{call.operator}/{model}/{call.variant}", call
