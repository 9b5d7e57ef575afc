"""Definitions replace vLLM's classes by architecture, and otherwise equal them."""

from importlib.metadata import entry_points

import pytest
from vllm.model_executor.models import ModelRegistry
from vllm.model_executor.models.aria import AriaForConditionalGeneration
from vllm.model_executor.models.deepseek_mtp import DeepSeekMTP
from vllm.model_executor.models.deepseek_v2 import DeepseekV2ForCausalLM, DeepseekV3ForCausalLM
from vllm.model_executor.models.gemma4_mm import Gemma4ForConditionalGeneration
from vllm.model_executor.models.glm_ocr import GlmOcrForConditionalGeneration
from vllm.model_executor.models.idefics3 import Idefics3ForConditionalGeneration
from vllm.model_executor.models.interfaces import (
    supports_eagle,
    supports_eagle3,
    supports_lora,
    supports_pp,
)
from vllm.model_executor.models.interns1 import InternS1ForConditionalGeneration
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.mistral import MistralForCausalLM
from vllm.model_executor.models.nemotron_h import NemotronHForCausalLM
from vllm.model_executor.models.paddleocr_vl import PaddleOCRVLForConditionalGeneration
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
from vllm.model_executor.models.qwen2_5_vl import Qwen2_5_VLForConditionalGeneration
from vllm.model_executor.models.qwen2_vl import Qwen2VLForConditionalGeneration
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM
from vllm.model_executor.models.qwen3_5 import (
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeForConditionalGeneration,
)
from vllm.model_executor.models.qwen3_moe import Qwen3MoeForCausalLM
from vllm.model_executor.models.qwen3_vl import Qwen3VLForConditionalGeneration
from vllm.model_executor.models.smolvlm import SmolVLMForConditionalGeneration
from vllm.models.kimi_k3.amd.linear import KimiLinearForCausalLM
from vllm.models.kimi_k3.amd.model import KimiK3ForConditionalGeneration

from vllm_davinci.core import out_of_tree
from vllm_davinci.models import registry


def test_core_finds_the_definitions_by_their_entry_point():
    (entry,) = entry_points(group="vllm_davinci.model_providers", name="models")
    assert entry.load().models() == registry.MODELS


SEQUENCE_PARALLEL = {
    "DeepseekV2ForCausalLM": DeepseekV2ForCausalLM,
    "DeepseekV3ForCausalLM": DeepseekV3ForCausalLM,
    "LlamaForCausalLM": LlamaForCausalLM,
    "MistralForCausalLM": MistralForCausalLM,
    "Qwen2ForCausalLM": Qwen2ForCausalLM,
    "Qwen3ForCausalLM": Qwen3ForCausalLM,
    "Qwen3MoeForCausalLM": Qwen3MoeForCausalLM,
}
VLLMS = {
    **SEQUENCE_PARALLEL,
    "AriaForConditionalGeneration": AriaForConditionalGeneration,
    "DeepSeekMTPModel": DeepSeekMTP,
    "DeepseekV32MTPModel": DeepSeekMTP,
    "Gemma4ForConditionalGeneration": Gemma4ForConditionalGeneration,
    "GlmOcrForConditionalGeneration": GlmOcrForConditionalGeneration,
    "Idefics3ForConditionalGeneration": Idefics3ForConditionalGeneration,
    "InternS1ForConditionalGeneration": InternS1ForConditionalGeneration,
    "InternVLForConditionalGeneration": InternS1ForConditionalGeneration,
    "KimiK3ForConditionalGeneration": KimiK3ForConditionalGeneration,
    "KimiLinearForCausalLM": KimiLinearForCausalLM,
    "NemotronHForCausalLM": NemotronHForCausalLM,
    "PaddleOCRVLForConditionalGeneration": PaddleOCRVLForConditionalGeneration,
    "Qwen2VLForConditionalGeneration": Qwen2VLForConditionalGeneration,
    "Qwen2_5_VLForConditionalGeneration": Qwen2_5_VLForConditionalGeneration,
    "Qwen3_5ForConditionalGeneration": Qwen3_5ForConditionalGeneration,
    "Qwen3_5MoeForConditionalGeneration": Qwen3_5MoeForConditionalGeneration,
    "Qwen3VLForConditionalGeneration": Qwen3VLForConditionalGeneration,
    "SmolVLMForConditionalGeneration": SmolVLMForConditionalGeneration,
}


OWN = {  # vLLM's definitions have GPU kernels
    "DSparkDraftModel", "DeepseekV4ForCausalLM", "DeepSeekV4MTPModel", "Glm5NextForCausalLM",
    "Glm5NextForConditionalGeneration", "Glm5NextMTPModel", "HYV4ForCausalLM",
    "MiniMaxM3SparseForCausalLM",
    "MiniMaxM3SparseForConditionalGeneration", "Qwen4ExpForCausalLM",
    "Qwen4ExpForConditionalGeneration", "Qwen4ExpMTP",
}  # fmt: skip


@pytest.mark.parametrize("architecture", sorted(set(registry.MODELS) - OWN))
def test_vllm_takes_the_definition_after_registration(architecture: str):
    out_of_tree.register()
    definition = ModelRegistry.models[architecture].load_model_cls()
    theirs = VLLMS[architecture]
    assert definition.__module__.startswith("vllm_davinci.models.")
    assert issubclass(definition, theirs)
    if architecture not in registry.DRAFTERS:
        assert definition.load_weights is theirs.load_weights
    for supports in (supports_lora, supports_pp, supports_eagle, supports_eagle3):
        assert supports(definition) == supports(theirs)


def test_every_text_model_runs_sequence_parallel():
    assert registry.sequence_parallel_architectures() == set(SEQUENCE_PARALLEL)
