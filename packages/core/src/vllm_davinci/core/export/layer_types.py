"""The type that each tensor of an export gets."""

import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from vllm_davinci.core.checkpoint.config_check import text_config
from vllm_davinci.core.quantization.scheme import FLOAT, SCHEMES

UNREACHED = "W8A8_DYNAMIC"  # layers with inputs that calibration does not observe
# Projections and experts, by the last part of the layer's name.
_QUANTIZED = re.compile(
    r"(^|\.)(\w+_proj|linear_attn\.in_proj_\w+|wq_b|attn\.(wq_a|wkv)|kv_a_proj_with_mqa|(shared_)?experts\.(\d+\.)?w[123])$"
)
# vLLM splits kv_b_proj for MLA, projections of the MTP head are small and sensitive, and the
# indexer's two projections are one float product in vLLM. Kimi-K3's projections to and from latent
# experts, and for scores of residuals, stay floats too.
_KEPT_FLOAT = re.compile(
    r"(^|\.)(kv_b_proj|(eh|e|h)_proj|indexer\.(wk|weights_proj))$"
    r"|\.(routed_expert_(down|up)|\w+_res)_proj$"
    r"|(^|\.)(visual|vision_\w+|audio_\w+)\."
)
_LAYER = re.compile(r"^(?:.*\.)?layers\.(\d+)\.")
_PREDICTING = "mtp."
_ROUTED = re.compile(r"\.experts\.\d+\.")


class LayerTypes:
    """The types of one export.

    With static layers, routed experts become W8A8_DYNAMIC: few tokens reach each expert, so a range
    from a short text would clip other inputs. The same holds for layers after config.json's
    `num_hidden_layers`.
    kind:   scheme of the projections
    config: config.json
    given:  layer -> another type
    """

    def __init__(
        self, kind: str, config: Mapping[str, Any], given: Mapping[str, str] | None = None
    ) -> None:
        depth = text_config(config).get("num_hidden_layers")
        self._num_layers = depth if isinstance(depth, int) and depth else sys.maxsize
        self._kind, self._given = kind, given or {}

    def of(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> str:
        """The type of a tensor. name: in the checkpoint"""
        prefix = name.removesuffix(".weight")
        if self._kind == FLOAT or prefix == name or len(shape) != 2:
            return FLOAT
        if not dtype.is_floating_point:
            return FLOAT
        if not _QUANTIZED.search(prefix) or _KEPT_FLOAT.search(prefix):
            return FLOAT
        is_reached = not (_ROUTED.search(prefix) or self._is_after_the_model(prefix))
        if SCHEMES[self._kind].needs_input_range and not is_reached:
            return UNREACHED
        return self._given.get(prefix, self._kind)

    def _is_after_the_model(self, prefix: str) -> bool:
        """True for a layer of multi-token prediction, which calibration does not run."""
        number = _LAYER.match(prefix)
        is_beyond = number is not None and int(number[1]) >= self._num_layers
        return is_beyond or prefix.startswith(_PREDICTING)
