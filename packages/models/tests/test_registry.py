"""What core and vLLM find: architectures, and classes that are vLLM's in all other respects."""

from importlib.metadata import entry_points

import pytest
from vllm.model_executor.models import ModelRegistry
from vllm.model_executor.models.deepseek_v2 import DeepseekV2ForCausalLM

from vllm_davinci.core import registration
from vllm_davinci.models import registry


def test_core_finds_the_definitions_by_their_entry_point():
    (entry,) = entry_points(group="vllm_davinci.model_providers", name="models")
    assert entry.load().models() == registry.MODELS


@pytest.mark.parametrize("architecture", sorted(registry.MODELS))
def test_vllm_takes_the_definition_after_registration(architecture: str):
    registration.register()
    definition = ModelRegistry.models[architecture].load_model_cls()
    assert definition.__module__ == "vllm_davinci.models.deepseek"
    assert issubclass(definition, DeepseekV2ForCausalLM)
    assert definition.load_weights is DeepseekV2ForCausalLM.load_weights
