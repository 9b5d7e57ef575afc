"""Exports with rotated hidden states: how they are marked, and drafters that cannot read them."""

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_davinci.core.errors import UnsupportedFeatureError
from vllm_davinci.core.quantization.config import AscendQuantizationConfig
from vllm_davinci.core.quantization.formats.modelslim import QuantDescription
from vllm_davinci.core.quantization.rotation import (
    READ_STATES,
    has_rotation,
    refuse_heads_of_rotated_models,
)

# ModelSlim's formats for GLM-5, and for other rotated models.
WITH_MATRIX = {"is_rot_used": True}
ROTATED = {"optional": {"quarot": {"rotation_map": {"global_rotation": "quarot.safetensors"}}}}
TENSORS = {"model.layers.0.mlp.up_proj.weight": "W8A8"}


def described(options: dict[str, Any]) -> AscendQuantizationConfig:
    return AscendQuantizationConfig(QuantDescription.parse({**TENSORS, **options}))


def test_a_description_says_that_there_is_a_matrix():
    assert has_rotation(described(WITH_MATRIX))
    for other in (described(ROTATED), described({}), SimpleNamespace(), None):
        assert not has_rotation(other)


@pytest.mark.parametrize("options", [WITH_MATRIX, ROTATED])
@pytest.mark.parametrize("method", READ_STATES)
def test_heads_that_read_states_are_refused(method: str, options: dict[str, Any]):
    with pytest.raises(UnsupportedFeatureError, match=rf"'{method}'.*has rotated its hidden"):
        refuse_heads_of_rotated_models(method, described(options))


@pytest.mark.parametrize("method", ["mtp", "ngram", "draft_model", "suffix", None])
def test_other_drafters_are_not(method: str | None):
    refuse_heads_of_rotated_models(method, described(WITH_MATRIX))
    refuse_heads_of_rotated_models("eagle3", described({}))
    refuse_heads_of_rotated_models("eagle3", None)
