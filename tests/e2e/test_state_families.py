"""More families with recurrent state: transformers' tokens."""

import pytest

from vllm_davinci_testing.engines.family_zoo import write_family
from vllm_davinci_testing.engines.generating import IN_PARTS, RACES, TWO_RANKS, assert_generates
from vllm_davinci_testing.engines.transformers_reference import TransformersReference

MAX_TOKENS = 16
THOROUGH = pytest.mark.thorough


@pytest.mark.parametrize(
    ("family", "options"),
    [
        # Short convolutions.
        pytest.param("lfm2", IN_PARTS, id="lfm2_in_parts", marks=pytest.mark.nightly("layouts")),
        pytest.param("lfm2_moe", {**TWO_RANKS, **IN_PARTS}, id="lfm2_moe_tensor2", marks=THOROUGH),
        # Mamba 1, alone and with attention and experts.
        pytest.param("falcon_mamba", IN_PARTS, id="falcon_mamba_in_parts", marks=THOROUGH),
        pytest.param("jamba", {**TWO_RANKS, **IN_PARTS}, id="jamba_tensor2", marks=THOROUGH),
        # Mamba2 alone, with attention in every layer, and with attention shared by layers.
        pytest.param("mamba2", IN_PARTS, id="mamba2_in_parts", marks=THOROUGH),
        pytest.param("falcon_h1", IN_PARTS, id="falcon_h1_in_parts", marks=THOROUGH),
        pytest.param("zamba2", IN_PARTS, id="zamba2_in_parts", marks=THOROUGH),
    ],
)
def test_tokens_equal_those_of_transformers_in_any_order_that_events_allow(
    family, options, start_engine, prompts, tmp_path
):
    checkpoint = write_family(family, tmp_path / "model")
    environment = {**RACES, "VNPU_SCHEDULE": "fuzz:3"}
    with start_engine(checkpoint, environment=environment, **options) as engine:
        reference = TransformersReference(checkpoint)
        assert_generates(engine, reference, prompts[:12], MAX_TOKENS)
