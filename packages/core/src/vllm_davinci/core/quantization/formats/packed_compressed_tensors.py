"""compressed-tensors' format pack-quantized, which quantizes weights only."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from vllm_davinci.core.errors import UnsupportedFeatureError
from vllm_davinci.core.quantization.format import FORMATS
from vllm_davinci.core.quantization.packed_weights import (
    ACT_ORDER,
    PackedWeights,
    PackedWeightsConfig,
    number,
    unavailable,
)
from vllm_davinci.core.quantization.packed_weights import COMPRESSED as NAME

PACK_QUANTIZED = "pack-quantized"


@FORMATS.register
@dataclass(frozen=True, kw_only=True)
class PackedCompressedTensors(PackedWeights):
    """Weights of 4 or 8 bits with a scale per group or channel."""

    name, method = f"{NAME} ({PACK_QUANTIZED})", NAME
    quantizations = frozenset({NAME})

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self | None:
        """The format; None if layers without packed weights are quantized, too."""
        if str(config.get("quant_method", "")).lower() != NAME:
            return None
        groups = list((config.get("config_groups") or {}).values())
        whole = config.get("format")
        if not groups or any(
            group.get("format") not in (None, PACK_QUANTIZED)
            or (group.get("format") or whole) != PACK_QUANTIZED
            or group.get("input_activations")
            or not group.get("weights")
            for group in groups
        ):
            return None
        for key in ("kv_cache_scheme", "transform_config"):
            if config.get(key):
                raise unavailable(NAME, f"{key}, which is not supported")
        found = {_scheme(group["weights"]) for group in groups}
        if len(found) > 1:
            raise unavailable(NAME, "packed weights of several schemes; only one is supported")
        bits, group_size, has_zero_points = found.pop()
        return cls.made(bits, group_size, has_zero_points=has_zero_points)


def _scheme(weights: Mapping[str, Any]) -> tuple[int, int, bool]:
    """Reads bits, group size and whether there are zero points from a group of config.json."""
    if weights.get("type", "int") != "int" or weights.get("dynamic"):
        raise unavailable(NAME, "packed weights that are not static integers")
    strategy = weights.get("strategy")
    if strategy not in ("group", "channel"):
        raise unavailable(NAME, f"a scale per {strategy}; only group and channel are supported")
    if weights.get("actorder") in ("group", True):
        raise UnsupportedFeatureError(
            f"{NAME} with actorder 'group' is not supported: its groups are not contiguous. "
            f"{ACT_ORDER}."
        )
    return (
        number(NAME, weights, "num_bits"),
        number(NAME, weights, "group_size") if strategy == "group" else 0,
        not weights.get("symmetric", True),
    )


class PackedCompressedConfig(PackedWeightsConfig):
    """vLLM's method of these checkpoints; `NPUCompressedTensorsConfig` chooses it."""

    name, kind = NAME, PackedCompressedTensors
