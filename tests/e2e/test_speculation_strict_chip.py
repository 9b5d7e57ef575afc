"""Speculation in 16 bits on a chip that accepts only documented calls.

Several rows of a request are summed in another order than one row, so text may differ where 16-bit
rounding decides between two tokens. An engine with drafts is compared with transformers as one
without: each token is the greatest up to rounding.
"""

import pytest
import torch

from vllm_davinci_testing.engines.speculating import (
    RACES,
    REQUESTS,
    SMALL,
    generate,
    speculation,
    texts,
    told,
)
from vllm_davinci_testing.engines.transformers_reference import TransformersReference

A2 = "Ascend910B3"


def wrong_in(
    reference: TransformersReference, outputs: list[list[int]], dtype: torch.dtype
) -> list[str]:
    """Names tokens that rounding does not explain."""
    pairs = zip(texts(), outputs, strict=True)
    found = (
        reference.first_difference(text["prompt_token_ids"], tokens, dtype=dtype)
        for text, tokens in pairs
    )
    return [each for each in found if each is not None]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("target", "method", "head", "dtype", "soc"),
    [pytest.param("tiny_deepseek", "mtp", None, torch.bfloat16, A2, id="mtp_bfloat16")],
)
def test_every_token_is_the_greatest_as_far_as_rounding_tells(
    target, method, head, dtype, soc, repository, start_engine
):
    checkpoints = repository / "checkpoints"
    options = {
        "dtype": str(dtype).removeprefix("torch."),
        "enforce_eager": False,
        "environment": {**RACES, "VNPU_SOC": soc},
    }
    drafter = {} if head is None else {"model": str(checkpoints / head)}
    with start_engine(checkpoints / target, **SMALL, **options) as engine:
        plain = generate(engine)
    with start_engine(
        checkpoints / target, **speculation(method, 3, **drafter), **options
    ) as engine:
        found = generate(engine)
        drafted, accepted = told(engine)
    others = sum(one != other for one, other in zip(plain, found, strict=True))
    print(f"{method}: {others} of {REQUESTS} texts go on otherwise; {accepted} of {drafted} drafts")
    assert 0 < accepted < drafted
    reference = TransformersReference(checkpoints / target)
    assert not wrong_in(reference, plain, dtype)
    assert not wrong_in(reference, found, dtype)
