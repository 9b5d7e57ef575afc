"""Interface of a quantization scheme. Each is one file of `schemes`; the registry finds it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch

from vllm_davinci.core.errors import UnsupportedFeatureError
from vllm_davinci.core.quantization.registry import Registry
from vllm_davinci.core.quantization.rounding import FloatLayer
from vllm_davinci.core.quantization.tensors import TensorSpec

if TYPE_CHECKING:
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig

FLOAT = "FLOAT"


@dataclass(frozen=True)
class Layout:
    """An exporter's storage layout, as far as it differs between versions of the exporter.

    version:    of the export's format; empty for exporters before 1.0.0
    group_size: input entries that share a scale of a weight-only layer; 0: all
    """

    version: str = ""
    group_size: int = 0


class LayerSettings(NamedTuple):
    """Settings of the engine under construction that its layers need.

    is_loaded:  whether weight loaders load the tensors, so that a missing one can be reported
    use_nz:     whether int8 weights use the NZ layout
    group_size: see Layout
    """

    is_loaded: bool = True
    use_nz: bool = False
    group_size: int = 0


class WeightSize(NamedTuple):
    """Size of a weight on one rank.

    prefix:     name of the layer, for messages
    group_size: see Layout
    is_expert:  whether the weight belongs to routed experts
    """

    prefix: str
    in_features: int
    out_features: int
    group_size: int = 0
    is_expert: bool = False


class Scheme:
    """Defines how layers of one quantization type are stored, converted and computed.

    A scheme needs only a subclass in a file of `schemes`, decorated with `SCHEMES.register`:
    formats, checks, loading, serving and `vllm-davinci quantize` find it by its name.
    """

    name: ClassVar[str]
    """The type's name in descriptions."""

    computed_as: ClassVar[str] = ""
    """The scheme whose methods compute these layers; empty: this one."""

    in_decodes: ClassVar[str] = ""
    """The scheme of linear layers in a decode engine (disaggregated prefill); empty: this one."""

    keeps_experts: ClassVar[bool] = False
    """True if this scheme computes routed experts whatever `computed_as` says."""

    parameters: ClassVar[tuple[TensorSpec, ...]]
    """A layer's tensors on the device. The first is the weight."""

    linear_method: ClassVar[type[Any] | None] = None
    """The method of linear layers, made from the scheme, the layer's name and the settings."""

    experts_method: ClassVar[type[Any] | None] = None
    """The method of routed experts; see `experts` for its arguments."""

    quantizes_input: ClassVar[bool] = False
    """True if producers of the input should emit integers (`layers.quantized_activation`)."""

    is_symmetric: ClassVar[bool] = True
    """True if a layer's `weight_offset`, if any, must be zero."""

    has_groups: ClassVar[bool] = False
    """True if a weight may have a scale per group of inputs (`Layout.group_size`)."""

    folds_bias: ClassVar[bool] = False
    """True if a layer's bias is folded into another tensor, so that `bias` is ignored."""

    is_written: ClassVar[bool] = False
    """True if `vllm-davinci quantize` can write it, with `rounded`."""

    needs_input_range: ClassVar[bool] = False
    """True if `rounded` needs the calibrated range of the layer's input."""

    def stored(self, layout: Layout) -> tuple[TensorSpec, ...]:
        """A layer's tensors in a checkpoint. The first is the weight."""
        return self.parameters

    def converted(self, part: str, tensor: torch.Tensor, layout: Layout) -> torch.Tensor | None:
        """Converts a stored tensor to one of `parameters`; None for one that is not used.

        part: the last part of the tensor's name
        """
        return tensor

    def converted_of_expert(
        self, part: str, tensor: torch.Tensor, layout: Layout
    ) -> torch.Tensor | None:
        """Like `converted`, for a projection of a routed expert."""
        return self.converted(part, tensor, layout)

    def require_sizes(self, size: WeightSize) -> None:
        """Raises UnsupportedFeatureError if the device does not support such a weight on a rank."""

    def refusal_of_groups(self, group_size: int) -> str | None:
        """The reason why weights with groups of that size are not supported, or None."""
        return None

    def linear(self, prefix: str, settings: LayerSettings) -> Any:
        """The method of a linear layer. prefix: its name, for messages"""
        if self.linear_method is None:
            raise self._unavailable(prefix, "how to compute linear layers (linear_method)")
        return self.linear_method(self, prefix, settings)

    def experts(
        self,
        moe: FusedMoEConfig,
        prefix: str,
        settings: LayerSettings,
        tensors: tuple[TensorSpec, ...] | None = None,
    ) -> Any:
        """The method of routed experts; None for vLLM's own.

        tensors: of a projection, if the format has others than `parameters`
        """
        if self.experts_method is None:
            raise self._unavailable(prefix, "how to compute routed experts (experts_method)")
        return self.experts_method(self, moe, prefix, settings, tensors)

    def floats(self, tensor: Callable[[str], torch.Tensor]) -> torch.Tensor:
        """Returns a layer's dequantized weight, fp32 [out, in]. tensor: gets a parameter"""
        raise self._unavailable("A layer that is needed as floats", "its values (floats)")

    def seen(self, inputs: torch.Tensor, tensor: Callable[[str], torch.Tensor]) -> torch.Tensor:
        """Returns a layer's inputs after their quantization, fp32; see `floats`."""
        return inputs

    def rounded(self, layer: FloatLayer) -> dict[str, torch.Tensor]:
        """Rounds a layer to its stored tensors."""
        raise self._unavailable("A float weight", "how to round it (rounded)")

    def _unavailable(self, subject: str, what: str) -> UnsupportedFeatureError:
        return UnsupportedFeatureError(
            f"{subject} is {self.name}, and this scheme does not say {what}. Export the model with "
            "another type for it, such as W8A8_DYNAMIC."
        )


SCHEMES: Registry[type[Scheme]] = Registry("schemes")


def find_scheme(name: str, tensor: str) -> Scheme:
    """The scheme of that name. Raises UnsupportedFeatureError, naming the tensor, if unknown."""
    if name in SCHEMES:
        return SCHEMES[name]()
    close = SCHEMES.nearest(str(name))
    hint = f" Did the export mean {close}?" if close else ""
    raise UnsupportedFeatureError(
        f"{tensor} has quantization type {name!r}, and {', '.join(sorted(SCHEMES))} are supported."
        f"{hint} Export the model again with a supported type for this layer, such as "
        "W8A8_DYNAMIC, or run vllm-davinci quantize on the float checkpoint."
    )


def computing_scheme(name: str, tensor: str, is_expert: bool = False) -> Scheme:
    """The scheme whose methods compute layers of that type; see `find_scheme`.

    is_expert: whether the layers are projections of routed experts
    """
    stored = find_scheme(name, tensor)
    is_own = not stored.computed_as or (is_expert and stored.keeps_experts)
    return stored if is_own else find_scheme(stored.computed_as, tensor)
