"""Finds tokens that a model may choose, because only the order of its sums decides between them.

A sum in fp32 depends on the order of its terms, which depends on the processor, the number of rows
and the division among ranks. If two logits are closer than this effect, both tokens are right. So
are two experts with scores that close; the choice changes all later logits.

To measure the effect, the reference runs several times with random errors in each layer's input. A
sum of n terms in the worst order, one after another, has a random error with a standard deviation
of u sqrt(n / 6) of the result's own (Higham 2002, section 4.2, with each partial sum's error
uniform in +-u and the partial sums growing as a random walk), u = 2^-24. The inputs get errors of u
sqrt(n), 2.4 times as large, to cover a layer's other sums: attention's scores and weights. For the
tests' models, two logits may then be about 1e-4 standard deviations apart; one token of 4,000 is
chosen by a smaller margin.

In 16 bits, sums are computed in fp32 and rounded once to the dtype of layers' outputs. Engines
differ in this rounding, so inputs get errors of u of that dtype, about two roundings.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

# An expert that rounding selects in one of 4 engines is found with a probability of 0.99.
NUM_TRIES = 16

# [tokens, vocabulary]: the logits that chose each token of a text.
Logits = Callable[[], Tensor]


@contextmanager
def rounded_otherwise(
    network: nn.Module, seed: int, dtype: torch.dtype = torch.float32
) -> Iterator[None]:
    """In this context, the inputs of all of `network`'s layers have random errors of `dtype`."""
    unit_roundoff = torch.finfo(dtype).eps / 2
    generator = torch.Generator().manual_seed(seed)

    def with_errors(layer: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        size = unit_roundoff
        if dtype == torch.float32:
            size *= math.sqrt(max(each.shape[-1] for each in layer.parameters(recurse=False)))

        def changed(value: Any) -> Any:
            if not isinstance(value, Tensor) or not value.is_floating_point():
                return value
            spread = value.pow(2).mean(-1, keepdim=True).sqrt()
            return value + torch.randn(value.shape, generator=generator) * spread * size

        return tuple(map(changed, inputs))

    hooks = [
        layer.register_forward_pre_hook(with_errors)
        for layer in network.modules()
        if next(layer.parameters(recurse=False), None) is not None
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def explained_by_rounding(
    network: nn.Module, logits: Logits, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Returns [tokens]: the largest difference of two logits that rounding may reverse."""
    expected = logits()
    most = torch.zeros(len(expected))
    for seed in range(NUM_TRIES):
        with rounded_otherwise(network, seed, dtype):
            errors = (logits() - expected).nan_to_num(0).abs()  # inf - inf, for excluded tokens
        most = most.maximum(errors.amax(dim=1))
    return 2 * most  # one of the two rises, the other falls


def first_wrong_token(
    network: nn.Module, logits: Logits, tokens: Sequence[int], dtype: torch.dtype = torch.float32
) -> str | None:
    """Describes the first of `tokens` that `network` would not choose under any rounding, or None.

    One pass over prompt and tokens gives the choice at every position, so a text is also compared
    after a token that was a close choice. dtype: of the engine that generated the tokens
    """
    rows = logits()
    chosen = rows.gather(1, torch.tensor([list(tokens)]).T)[:, 0]
    gaps = rows.amax(dim=1) - chosen
    if not gaps.any():
        return None
    explained = explained_by_rounding(network, logits, dtype)
    wrong = (~(gaps <= explained)).nonzero().flatten().tolist()  # also true for NaN
    if not wrong:
        return None
    position = wrong[0]
    row, token = rows[position], tokens[position]
    expected = int(row.argmax())
    return (
        f"token {position} is {token}, transformers has {expected}; its logits are "
        f"{row[token]:.6f} and {row[expected]:.6f}, {gaps[position]:.2e} apart, of which "
        f"rounding explains {explained[position]:.2e}"
    )
