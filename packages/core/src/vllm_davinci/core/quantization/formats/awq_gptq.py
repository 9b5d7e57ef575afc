"""AWQ and GPTQ: weights packed into int32, described by config.json and the tensors' names."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from vllm.model_executor.layers.quantization import register_quantization_config

from vllm_davinci.core.errors import UnsupportedFeatureError
from vllm_davinci.core.quantization.format import FORMATS
from vllm_davinci.core.quantization.packed_weights import (
    ACT_ORDER,
    AWQ,
    GPTQ,
    PackedWeights,
    PackedWeightsConfig,
    number,
    unavailable,
)


@FORMATS.register
@dataclass(frozen=True, kw_only=True)
class AWQWeights(PackedWeights):
    """AWQ's weights, of 4 bits with zero points."""

    name = method = AWQ
    quantizations = frozenset({AWQ, "auto_awq"})

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self | None:
        if str(config.get("quant_method", "")).lower() != cls.method:
            return None
        version = str(config.get("version") or "gemm").lower()
        if version != "gemm":
            raise unavailable(cls.method, f"version {version!r}; only 'gemm' is supported")
        if not config.get("zero_point", True):
            raise unavailable(cls.method, "zero_point false; files with zero points are read")
        bits = number(cls.method, config, "bits", "w_bit")
        if bits != 4:
            raise unavailable(cls.method, f"weights of {bits} bits; those of 4 are available")
        group_size = number(cls.method, config, "group_size", "q_group_size")
        return cls.made(bits, max(group_size, 0), has_zero_points=True)


@FORMATS.register
@dataclass(frozen=True, kw_only=True)
class GPTQWeights(PackedWeights):
    """GPTQ's weights, of 4 or 8 bits."""

    name = method = GPTQ
    quantizations = frozenset({GPTQ, "auto_gptq"})

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self | None:
        if str(config.get("quant_method", "")).lower() != cls.method:
            return None
        layout = str(config.get("checkpoint_format") or "gptq")
        if layout not in ("gptq", "gptq_v2") or config.get("is_marlin_format"):
            raise unavailable(
                cls.method, f"checkpoint_format {layout!r}; 'gptq' and 'gptq_v2' are read"
            )
        bits = number(cls.method, config, "bits")
        group_size = max(number(cls.method, config, "group_size"), 0)
        if config.get("desc_act") and group_size:
            raise UnsupportedFeatureError(
                f"{cls.method} with desc_act=true is not supported: its groups are not contiguous."
                f" {ACT_ORDER}."
            )
        for pattern, own in (config.get("dynamic") or {}).items():
            if not pattern.startswith("-:") and own:
                raise unavailable(cls.method, f"separate settings for {pattern!r} (dynamic)")
        return cls.made(
            bits,
            group_size,
            has_zero_points=not config.get("sym", True),
            zero_shift=1 if layout == "gptq" else 0,
        )


@register_quantization_config(AWQ)
@register_quantization_config("auto_awq")
class NPUAWQConfig(PackedWeightsConfig):
    """AWQ's checkpoints."""

    name, kind = "auto_awq", AWQWeights


@register_quantization_config(GPTQ)
@register_quantization_config("auto_gptq")
class NPUGPTQConfig(PackedWeightsConfig):
    """GPTQ's checkpoints."""

    name, kind = "auto_gptq", GPTQWeights
