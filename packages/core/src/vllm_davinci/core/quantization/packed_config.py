"""vLLM's methods for checkpoints with packed weights, over the layers of `ascend`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch

from vllm_davinci.core.errors import UnsupportedFeatureError
from vllm_davinci.core.quantization.block_fp8 import tensor_names
from vllm_davinci.core.quantization.config import AscendQuantizationConfig
from vllm_davinci.core.quantization.packed_weights import (
    AWQ,
    COMPRESSED,
    GPTQ,
    PackedFormat,
    packed_format,
)

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class PackedWeightsConfig(AscendQuantizationConfig):
    """A checkpoint with packed weights, described by the names of its tensors."""

    method: ClassVar[str]  # of config.json
    name: ClassVar[str]  # vLLM's

    def __init__(self, packing: PackedFormat | None = None) -> None:
        super().__init__()
        self.packing = packing

    def get_name(self) -> Any:
        return self.name

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> PackedWeightsConfig:
        packing = packed_format(config)
        if packing is None or packing.method != cls.method:
            raise UnsupportedFeatureError(
                f"--quantization {cls.name} is for checkpoints whose config.json has quant_method "
                f"{cls.method!r}, and this one has {config.get('quant_method')!r}. Leave it out."
            )
        return cls(packing)

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> Any:
        is_own = str(hf_quant_cfg.get("quant_method", "")).lower() == cls.method
        return cls.name if is_own and user_quant in (None, cls.method, cls.name) else None

    def maybe_update_config(
        self,
        model_name: str,
        hf_config: PretrainedConfig | None = None,
        revision: str | None = None,
    ) -> None:
        """Describes the layers. Raises CheckpointError where no file names the tensors."""
        if self._description is None:
            assert self.packing is not None, "made without config.json"
            names = tensor_names(model_name, revision)
            self._description = self.packing.described(names, model_name)
        self._has_own_head = not getattr(hf_config, "tie_word_embeddings", False)


class NPUAWQConfig(PackedWeightsConfig):
    """AWQ's, of 4 bits with zero points."""

    method, name = AWQ, "auto_awq"


class NPUGPTQConfig(PackedWeightsConfig):
    """GPTQ's, of 4 or 8 bits."""

    method, name = GPTQ, "auto_gptq"


class PackedCompressedConfig(PackedWeightsConfig):
    """compressed-tensors' format pack-quantized without quantized activations."""

    method, name = COMPRESSED, COMPRESSED
