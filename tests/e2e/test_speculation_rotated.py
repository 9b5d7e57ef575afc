"""Drafts of models with rotated hidden states (QuaRot): the drafter reverses the rotation."""

import pytest

from vllm_davinci_testing.engines.rotated_checkpoint import rotated
from vllm_davinci_testing.engines.speculating import (
    RACES,
    SMALL,
    first_wrong,
    generate,
    speculation,
    told,
    with_logprobs,
)

pytestmark = pytest.mark.nightly("layouts")

PLAIN = {"dtype": "bfloat16"}
DESCRIBED = {**PLAIN, "quantization": "ascend"}


@pytest.mark.thorough
def test_a_rotated_model_is_drafted_for_as_well_as_before(start_engine, tiny_deepseek, tmp_path):
    turned = rotated(tiny_deepseek, tmp_path / "turned")
    with start_engine(turned, **SMALL, **DESCRIBED) as engine:
        expected = with_logprobs(engine)
    rates = []
    for checkpoint, options in ((tiny_deepseek, PLAIN), (turned, DESCRIBED)):
        asked = {**speculation("mtp", 3), **options, "enforce_eager": False}
        with start_engine(checkpoint, environment=RACES, **asked) as engine:
            tokens = generate(engine)
            drafted, accepted = told(engine)
        print(f"{checkpoint.name}: {accepted} of {drafted} drafts accepted")
        rates.append(accepted / drafted)
    assert not first_wrong(expected, tokens)
    assert rates[1] > rates[0] - 0.1
