"""The calls of a whole model."""

from collections.abc import Callable, Iterator

from vllm_davinci.operators.calls import (
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
from vllm_davinci.operators.calls.call import OperatorCall
from vllm_davinci.operators.calls.sizes import ModelSizes

FAMILIES: tuple[Callable[[ModelSizes], Iterator[OperatorCall]], ...] = (
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


def calls_of(model: ModelSizes) -> Iterator[OperatorCall]:
    """Every call of the model's layers, without those that another model covers."""
    # Except for sparse attention, DeepSeek-V3.2's layers are those of DeepSeek-V3.
    for family in (sparse_attention.calls,) if model.index_heads else FAMILIES:
        yield from family(model)
