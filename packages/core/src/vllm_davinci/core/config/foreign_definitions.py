"""Models that vLLM defines in CUDA's and ROCm's kernels alone, and that nobody defines for NPUs."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import ModelConfig

# vLLM keeps definitions of one vendor's kernels here. Of one of them it gives other platforms
# its generic definition.
_OF_VENDORS = "vllm.models."
_GENERIC = ("vllm.models.deepseek_v32",)
# Architectures whose definitions import what vLLM requires on CUDA alone, so that it cannot even
# look at them, and where it would say no more than that: in their place it finds one that looks
# like a model, and that `refuse_architectures` refuses.
WITHOUT_IMPORT = ("InklingForCausalLM", "InklingForConditionalGeneration")
PLACEHOLDER = "vllm_davinci.core.config.unserved_model:UnservedModel"


def is_foreign(model: "ModelConfig") -> bool:
    """Whether a definition of the model would come from another vendor's kernels."""
    return any(_is_foreign(architecture) for architecture in model.architectures)


def _is_foreign(architecture: str) -> bool:
    from vllm.model_executor.models import ModelRegistry

    if architecture in WITHOUT_IMPORT:
        return True
    module = getattr(ModelRegistry.models.get(architecture), "module_name", "")
    return module.startswith(_OF_VENDORS) and module not in _GENERIC
