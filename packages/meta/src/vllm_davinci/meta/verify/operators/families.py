"""All calls, model by model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from vllm_davinci.meta.verify.operators import (
    attention,
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
from vllm_davinci.meta.verify.operators.call import OperatorCall
from vllm_davinci.meta.verify.operators.shapes import ModelSizes, sizes_of

Family = Callable[[ModelSizes], Iterator[OperatorCall]]
FAMILIES: tuple[Family, ...] = (
    elements.calls,
    norms.calls,
    rotary.calls,
    products.calls,
    quantization.calls,
    attention.calls,
    latent_attention.calls,
    sparse_attention.calls,
    experts.calls,
    compiled.calls,
)
# What core launches and no call here compares, and why.
NOT_COMPARED = {
    "npu_moe_distribute_dispatch_v2": "needs a group of ranks: part `collectives` has its results",
    "npu_moe_distribute_combine_v2": "needs a group of ranks: part `collectives` has its results",
    "npu_prefetch": "computes nothing",
    "npu_fused_infer_attention_score_v2": "is for attention sinks (gpt-oss): of no model here",
    "npu_clipped_swiglu": "is for gpt-oss: of no model here",
    "npu_attention_update": "merges chunks of cached context, as results of attention calls",
}


def calls_of(models: Iterable[str]) -> Iterator[tuple[str, OperatorCall]]:
    """Names of findings and calls; one that two models have in common is told of both."""
    for model in models:
        sizes = sizes_of(model)
        for family in FAMILIES:
            for call in family(sizes):
                yield f"operators/{call.operator}/{model}/{call.variant}", call
