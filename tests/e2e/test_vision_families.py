"""Families whose encoders vLLM defines: transformers' tokens, and the host never waits.

`nox -s zoo` serves the others.
"""

import pytest

from vllm_davinci_testing.engines.multimodal_reference import reference_of
from vllm_davinci_testing.engines.multimodal_serving import served_family
from vllm_davinci_testing.engines.multimodal_zoo import FAMILIES
from vllm_davinci_testing.plugin import EXACT_SOC

# LLaVA uses the output of an encoder layer before the last. Pixtral's definition copies tables from
# the host, GLM-ASR's reads back lengths. Aria, Idefics3 and SmolVLM call operators without rules;
# `nox -s zoo` serves them.
NAMES = ("gemma4", "glm5_next", "glm_ocr", "glmasr", "llava", "minimax_m3_vl", "paddleocr_vl")
NAMES += ("kimi_k3", "pixtral", "qwen3_5", "qwen3_asr", "qwen3_omni_moe")
RACES = {"VNPU_RACES": "raise", "VNPU_SCHEDULE": "fuzz:3"}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.thorough if name != "qwen3_5" else ()) for name in NAMES],
)
def test_tokens_equal_those_of_transformers_and_the_host_waits_for_nothing(name, tmp_path):
    family = FAMILIES[name]
    (tmp_path / "model").mkdir()
    checkpoint = family.write(tmp_path / "model")
    reference = reference_of(family, checkpoint)
    environment = {"VNPU_SOC": EXACT_SOC, **RACES}
    served = served_family(family, checkpoint, reference, tmp_path / "log.txt", environment, 8)
    assert served.differences == [None] * 4
    assert served.waits == [0] * 3
