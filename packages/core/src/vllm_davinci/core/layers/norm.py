"""Root-mean-square normalization on torch_npu's fused operators."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch
import torch_npu
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.model_executor.utils import set_weight_attrs

from vllm_davinci.core.components.fused_ops import compiled
from vllm_davinci.core.quantization.config import AscendQuantizationConfig
from vllm_davinci.core.quantization.handover import (
    InputScale,
    Move,
    QuantizedNorm,
    StaticNorm,
)


class HandOver(Enum):
    """What a norm behind a residual addition returns."""

    FLOATS = "floats"
    DYNAMIC = "integers with a scale per row"
    ASKS = "floats, for a layer that says how it quantizes"


class NPURMSNorm(RMSNorm):
    """One launch, with or without the residual addition, and one for a bias.

    Before a layer that quantizes its input, token by token or with a scale of the checkpoint, a
    compiled operator does both in one call. The layers behind a norm tell it in the first step, and
    one that wants floats ends that for good.

    A quantized checkpoint whose outliers were moved into the norms has biases for some of them.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        vllm_config = get_current_vllm_config_or_none()
        quantization = None if vllm_config is None else vllm_config.quant_config
        self._has_loaded_bias = False
        self._hands_over: HandOver | InputScale = HandOver.FLOATS
        if not self.has_weight or not isinstance(quantization, AscendQuantizationConfig):
            return
        if quantization.description.has_dynamic_layers:
            self._hands_over = HandOver.DYNAMIC
        elif quantization.description.has_static_layers:
            self._hands_over = HandOver.ASKS
        if quantization.description.has_norm_biases:
            self.bias = torch.nn.Parameter(torch.zeros_like(self.weight), requires_grad=False)
            set_weight_attrs(self.bias, {"weight_loader": self._load_bias})

    def _load_bias(self, parameter: torch.nn.Parameter, loaded: torch.Tensor) -> None:
        """Which norms have one, only the checkpoint knows."""
        default_weight_loader(parameter, loaded)
        self._has_loaded_bias = True
        if self._hands_over is HandOver.DYNAMIC:
            self._hands_over = HandOver.ASKS  # that operator takes no bias

    @property
    def loaded_bias(self) -> torch.Tensor | None:
        """[hidden_size], or None when the checkpoint has none for this norm."""
        return self.bias.data if self._has_loaded_bias else None

    @property
    def is_plain(self) -> bool:
        """Whether it is one norm with a weight, over all of the last dimension, and no more."""
        return self.covers_rows and self.loaded_bias is None

    @property
    def covers_rows(self) -> bool:
        """Whether it has a weight and is over all of the last dimension; perhaps with a bias."""
        return self.variance_size_override is None and self.has_weight

    def forward_oot(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Normalizes x, or x + residual, over the last dimension.

        x:        [..., hidden_size]
        residual: shape and dtype of x, or None
        Returns the normalized tensor, or that and the sum. Accumulates in fp32.
        """
        if self.variance_size_override is not None or not self.has_weight:
            return self.forward_native(x, residual)
        if residual is not None:
            return self._behind_sum(x, residual)
        if norm := compiled("rms_norm"):
            normalized = norm(x, self.weight, self.variance_epsilon)
        else:
            normalized = torch_npu.npu_rms_norm(x, self.weight, self.variance_epsilon)[0]
        return self._with_bias(normalized)

    def _behind_sum(
        self, x: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The norm of x + residual as the layer behind it takes it, and that sum."""
        wanted = self._hands_over if x.dim() == 2 else HandOver.FLOATS
        by_row, by_scale = compiled("add_rms_norm_dynamic_quant"), compiled("add_rms_norm_quant")
        if isinstance(wanted, InputScale) and by_scale:
            integers, total = by_scale(
                x,
                residual,
                self.weight,
                self.loaded_bias,
                wanted.scale,
                wanted.offset,
                self.variance_epsilon,
            )
            return StaticNorm(x.dtype, _Rows(self, x, residual, wanted, integers)), total
        if wanted is HandOver.DYNAMIC and by_row:
            integers, scales, total = by_row(x, residual, self.weight, self.variance_epsilon)
            return QuantizedNorm.of(integers, scales, x.dtype, _Rows(self, x, residual)), total
        normalized, total = self.of_sum(x, residual)
        if wanted is HandOver.ASKS and by_scale:
            normalized = StaticNorm(x.dtype, _Rows(self, x, residual, normalized=normalized))
        return normalized, total

    def want(self, wanted: HandOver | InputScale) -> None:
        """What the next calls hand over, until a layer wants something else: then floats."""
        known = self._hands_over
        if isinstance(known, HandOver) and known is not HandOver.FLOATS:
            self._hands_over = wanted
        elif isinstance(known, InputScale) and (
            isinstance(wanted, HandOver) or known.values != wanted.values
        ):
            self._hands_over = HandOver.FLOATS

    def of_sum(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The norm of x + residual in floats, and that sum."""
        if add_norm := compiled("add_rms_norm"):
            normalized, total = add_norm(x, residual, self.weight, self.variance_epsilon)
        else:
            normalized, _, total = torch_npu.npu_add_rms_norm(
                x, residual, self.weight, self.variance_epsilon
            )
        return self._with_bias(normalized), total

    def _with_bias(self, normalized: torch.Tensor) -> torch.Tensor:
        bias = self.loaded_bias
        return normalized if bias is None else normalized.add_(bias)


def _where_they_are(rows: torch.Tensor) -> torch.Tensor:
    return rows


@dataclass(frozen=True)
class _Rows:
    """See NormRows. `integers` are quantized with `scale`; `normalized` are the values.

    move: brings what the norm makes of x and residual to where integers and normalized are
    """

    norm: NPURMSNorm
    x: torch.Tensor
    residual: torch.Tensor
    scale: InputScale | None = None
    integers: torch.Tensor | None = None
    normalized: torch.Tensor | None = None
    move: Move = _where_they_are

    def values(self) -> torch.Tensor:
        self.norm.want(HandOver.FLOATS)
        return self._floats()

    def quantized(self, wanted: InputScale) -> torch.Tensor:
        if self.scale is not None and self.scale.values == wanted.values:
            assert self.integers is not None
            return self.integers
        self.norm.want(wanted)
        return wanted.quantize(self._floats())

    def moved(self, move: Move) -> "_Rows":
        return replace(
            self,
            integers=None if self.integers is None else move(self.integers),
            normalized=None if self.normalized is None else move(self.normalized),
            move=lambda rows: move(self.move(rows)),
        )

    def stored(self) -> torch.Tensor:
        stored = self.normalized if self.integers is None else self.integers
        assert stored is not None
        return stored

    def tensors(self) -> Iterable[torch.Tensor]:
        every = (self.x, self.residual, self.integers, self.normalized)
        return tuple(tensor for tensor in every if tensor is not None)

    def _floats(self) -> torch.Tensor:
        if self.normalized is not None:
            return self.normalized
        return self.move(self.norm.of_sum(self.x, self.residual)[0])
