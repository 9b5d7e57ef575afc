"""Facts about models, one row per architecture.

An architecture without a row is an attention model that vLLM's definition serves unchanged. Our own
definitions, and whether they are sequence parallel, are rows of vllm-davinci-models.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import ModelConfig

_OWN_DRAFTER = "its drafter in vLLM is a separate class, which does not count tokens on the host"
_STATES = "layers of the model have recurrent states of an unsupported kind"
IMAGES = "MTP has not been tried with models that take images"
UNTRIED = "no small model of it has been tried"
_OTHERS_CHIPS = "vLLM's definition of the model is for other vendors' chips only"


class Bidirectional(Enum):
    """Tokens of a prompt with bidirectional attention."""

    IMAGES = "the tokens of each image"
    PROMPTS = "all tokens of a prompt that has an image"
    EVERY_PROMPT = "all tokens of each prompt"


def _norms_of_olmo_hybrid(_: Any, name: str) -> str:
    return name.replace(".attention_layer_norm.", ".input_layernorm.").replace(
        ".feedforward_layer_norm.", ".post_attention_layernorm."
    )


def _without_zero_experts(config: Any, name: str) -> str | None:
    """Drops weights of experts that return their token unchanged; transformers writes them."""
    found = re.search(r"\.experts\.(\d+)\.", name)
    return None if found and int(found[1]) >= config.n_routed_experts else name


@dataclass(frozen=True)
class Architecture:
    """One architecture of vLLM's registry.

    states:        whether `core.linear_attention` supports all its recurrent states
    drafts_for:    for a supported drafter (vLLM's method "mtp"): the models that use it
    no_drafts:     for an unsupported drafter: the reason, a clause
    bidirectional: tokens with bidirectional attention, if supported
    named:         maps (configuration, tensor name in files) to vLLM's name if vLLM's own mapping
                   lacks it; None for a tensor that nothing reads
    is_importable: whether vLLM can import its definition here
    """

    states: bool = False
    drafts_for: str = ""
    no_drafts: str = ""
    bidirectional: Bidirectional | None = None
    named: Callable[[Any, str], str | None] | None = None
    is_importable: bool = True


_WITH_STATES = Architecture(states=True)
_FOREIGN = Architecture(is_importable=False)

ARCHITECTURES: dict[str, Architecture] = {
    # Hybrid models: some layers have recurrent state.
    "FalconH1ForCausalLM": _WITH_STATES,
    "FalconMambaForCausalLM": _WITH_STATES,
    "Glm5NextForCausalLM": _WITH_STATES,
    "Glm5NextForConditionalGeneration": _WITH_STATES,
    "GraniteMoeHybridForCausalLM": _WITH_STATES,
    "JambaForCausalLM": _WITH_STATES,
    "KimiK3ForConditionalGeneration": _WITH_STATES,
    "KimiLinearForCausalLM": _WITH_STATES,
    "Lfm2ForCausalLM": _WITH_STATES,
    "Lfm2MoeForCausalLM": _WITH_STATES,
    "Lfm2VlForConditionalGeneration": _WITH_STATES,
    "Mamba2ForCausalLM": _WITH_STATES,
    "MambaForCausalLM": _WITH_STATES,
    "NemotronHForCausalLM": _WITH_STATES,
    "OlmoHybridForCausalLM": Architecture(states=True, named=_norms_of_olmo_hybrid),
    "Qwen3NextForCausalLM": _WITH_STATES,
    "Qwen3_5ForCausalLM": _WITH_STATES,
    "Qwen3_5ForConditionalGeneration": _WITH_STATES,
    "Qwen3_5MoeForCausalLM": _WITH_STATES,
    "Qwen3_5MoeForConditionalGeneration": _WITH_STATES,
    "Qwen4ExpForCausalLM": _WITH_STATES,
    "Qwen4ExpForConditionalGeneration": _WITH_STATES,
    "Zamba2ForCausalLM": _WITH_STATES,
    # Models whose tensors vLLM knows by other names.
    "DbrxForCausalLM": Architecture(
        named=lambda _, name: name.replace(".experts.mlp.", ".experts.routed_experts.mlp.")
    ),
    "LongcatFlashForCausalLM": Architecture(named=_without_zero_experts),
    # Models with bidirectional attention in prompts.
    "Gemma3ForConditionalGeneration": Architecture(bidirectional=Bidirectional.IMAGES),
    "PaliGemmaForConditionalGeneration": Architecture(bidirectional=Bidirectional.PROMPTS),
    "HrmTextForCausalLM": Architecture(bidirectional=Bidirectional.EVERY_PROMPT),
    # Models whose definitions in vLLM import packages that vLLM requires only on CUDA.
    "InklingForCausalLM": _FOREIGN,
    "InklingForConditionalGeneration": _FOREIGN,
    # Multi-token prediction layers, vLLM's "mtp".
    "DeepSeekMTPModel": Architecture(drafts_for="DeepSeek-V3, R1"),
    "DeepSeekV4MTPModel": Architecture(drafts_for="DeepSeek-V4"),
    "DeepseekV32MTPModel": Architecture(drafts_for="DeepSeek-V3.2, GLM-5"),
    "ErnieMTPModel": Architecture(drafts_for="ERNIE 4.5 with experts"),
    "ExaoneMoeMTP": Architecture(drafts_for="K-EXAONE"),
    "Glm4MoeMTPModel": Architecture(drafts_for="GLM-4.5, 4.6, 4.7"),
    "Glm5NextMTPModel": Architecture(drafts_for="GLM-5.3-Flash"),
    "HYV3MTPModel": Architecture(drafts_for="Hy3"),
    "MiMoMTPModel": Architecture(drafts_for="MiMo"),
    "Qwen3NextMTP": Architecture(drafts_for="Qwen3-Next"),
    "Qwen3_5MTP": Architecture(drafts_for="Qwen3.5"),
    "Qwen3_5MoeMTP": Architecture(drafts_for="Qwen3.5 with experts"),
    "Qwen4ExpMTP": Architecture(drafts_for="Qwen3.8-Flash-Next"),
    "BailingMoeV25MTPModel": Architecture(no_drafts=_STATES),
    "BailingMoeV3MTPModel": Architecture(no_drafts=_STATES),
    "Dots3NoteMTPModel": Architecture(no_drafts=_OTHERS_CHIPS),
    "Exaone4_5_MTP": Architecture(no_drafts=IMAGES),
    "Gemma4MTPModel": Architecture(no_drafts=_OWN_DRAFTER),
    "Glm4MoeLiteMTPModel": Architecture(
        no_drafts="vLLM loads the model's first layer instead of the MTP layer"
    ),
    "GlmOcrMTPModel": Architecture(no_drafts=IMAGES),
    "HYV4MTPModel": Architecture(no_drafts=_OTHERS_CHIPS),
    "InklingMTPModel": Architecture(no_drafts=_OTHERS_CHIPS),
    "InternS2MobiusMTP": Architecture(no_drafts=IMAGES),
    "KimiK3MTPModel": Architecture(no_drafts=_OTHERS_CHIPS),
    "LongCatFlashMTPModel": Architecture(no_drafts=UNTRIED),
    "MiMoV2MTPModel": Architecture(no_drafts=UNTRIED),
    "MiMoV2OmniMTPModel": Architecture(no_drafts=IMAGES),
    "MiniMaxM3MTP": Architecture(no_drafts=_OTHERS_CHIPS),
    "NemotronHMTPModel": Architecture(no_drafts=UNTRIED),
    "OpenPanguMTPModel": Architecture(no_drafts=UNTRIED),
    "ParseAuxMTPModel": Architecture(no_drafts="no small model of it has been tried"),
    "Step3p5MTP": Architecture(no_drafts=_OWN_DRAFTER),
    "Step5MTP": Architecture(no_drafts=_OTHERS_CHIPS),
    "TransformersForMTP": Architecture(no_drafts=UNTRIED),
    "TransformersMoEForMTP": Architecture(no_drafts=UNTRIED),
}

# Replaces unimportable models in vLLM's registry, so that they are refused by name.
UNSERVED_MODEL = "vllm_davinci.core.config.unserved_model:UnservedModel"
# vLLM keeps definitions that use one vendor's kernels in this package. Those in _GENERIC also have
# a generic definition for other platforms.
_OF_VENDORS = "vllm.models."
_GENERIC = ("vllm.models.deepseek_v32",)


def known(model: "ModelConfig") -> list[Architecture]:
    """The rows of a model's architectures."""
    return [ARCHITECTURES.get(name, Architecture()) for name in model.architectures]


def name_in_vllm(model: "ModelConfig", name: str) -> str | None:
    """The name of a file's tensor in vLLM's definition of a model; None: nothing reads it."""
    found: str | None = name
    for row in known(model):
        if row.named is not None and found is not None:
            found = row.named(model.hf_text_config, found)
    return found


def with_states() -> list[str]:
    """Supported architectures with recurrent state."""
    return [name for name, row in ARCHITECTURES.items() if row.states]


def not_importable() -> list[str]:
    """Architectures that need a stand-in in vLLM's registry, so that they are refused by name."""
    return [name for name, row in ARCHITECTURES.items() if not row.is_importable]


def keeps_states(model: "ModelConfig | None") -> bool:
    """True for hybrid models: some layers have recurrent state instead of a KV cache."""
    return model is not None and bool(model.is_hybrid or model.has_inner_state)


def takes_images(model: "ModelConfig | None") -> bool:
    """True for models of images and videos, unless the limit of both is 0."""
    asked = None if model is None else model.multimodal_config
    return asked is not None and any(map(asked.get_limit_per_prompt, ("image", "video")))


def is_sparse(model: "ModelConfig | None") -> bool:
    """True if an indexer chooses the tokens that the model's MLA attends to."""
    return model is not None and hasattr(model.hf_text_config, "index_topk")


def bidirectional(model: "ModelConfig | None") -> Bidirectional | None:
    """Prompt tokens with bidirectional attention; None for causal or unknown models."""
    if model is None:
        return None
    found = next((row.bidirectional for row in known(model) if row.bidirectional), None)
    if found is Bidirectional.EVERY_PROMPT or model.is_mm_prefix_lm:
        return found
    return None


def is_foreign(model: "ModelConfig") -> bool:
    """True if the model's definition would use another vendor's kernels."""
    return any(_is_foreign(architecture) for architecture in model.architectures)


def _is_foreign(architecture: str) -> bool:
    from vllm.model_executor.models import ModelRegistry

    if architecture in not_importable():
        return True
    module = getattr(ModelRegistry.models.get(architecture), "module_name", "")
    return module.startswith(_OF_VENDORS) and module not in _GENERIC
