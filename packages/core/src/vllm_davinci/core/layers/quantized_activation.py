"""Quantized activations: integers with scales, passed from the quantizing operator to readers.

A norm or a projection whose readers all quantize their input quantizes it for them, in its own
launch. Dummy runs of all kinds of steps find the readers (`quantization.resolve_outputs`):
operators then return a TracedActivation. After these runs each operator has one output kind.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeAlias

import torch
import torch_npu
from torch.utils._pytree import tree_map

from vllm_davinci.core.errors import UnsupportedFeatureError


@dataclass(frozen=True)
class InputScale:
    """A checkpoint's scale and offset with which a layer quantizes: round(x / scale + offset).

    scale:  [1] fp32, on the device
    offset: [1] int32, on the device
    values: both, on the host, for comparison
    """

    scale: torch.Tensor = field(compare=False)
    offset: torch.Tensor = field(compare=False)
    values: tuple[float, int]

    @classmethod
    def of(cls, scale: torch.Tensor, offset: torch.Tensor) -> InputScale:
        return cls(scale, offset, (float(scale), int(offset)))


class OutputKind(Enum):
    """The form of an operator's output; an InputScale is another form."""

    FLOAT = "the model's dtype"
    PER_TOKEN = "int8 with a scale per row"
    SUMS = "int32 sums of an int8 product, for a gated activation that scales and quantizes them"


class QuantizedActivation(torch.Tensor):
    """Integers and their scales in place of a tensor that vLLM's models pass on.

    Has the shape, device and float dtype of the dequantized values. `quantize`, `map_rows` and
    NPUSiluAndMul accept it; every other operator raises UnsupportedFeatureError.

    integers:     [num_tokens, features] int8, or int32 sums
    scales:       [num_tokens] fp32; None if the reader's own InputScale was used
    weight_scale: [features] fp32 for sums, which must be multiplied by it too; None for int8
    """

    integers: torch.Tensor
    scales: torch.Tensor | None
    weight_scale: torch.Tensor | None

    @staticmethod
    def __new__(
        cls: type[QuantizedActivation],
        integers: torch.Tensor,
        scales: torch.Tensor | None,
        dtype: torch.dtype,
        weight_scale: torch.Tensor | None = None,
    ) -> QuantizedActivation:
        made: QuantizedActivation = torch.Tensor._make_wrapper_subclass(
            cls, integers.shape, dtype=dtype, device=integers.device
        )
        made.integers = integers
        made.scales = scales
        made.weight_scale = weight_scale
        return made

    def record_stream(self, stream: Any) -> None:
        for tensor in (self.integers, self.scales, self.weight_scale):
            if tensor is not None:
                tensor.record_stream(stream)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        raise UnsupportedFeatureError(
            f"{func} would read an activation that is stored as integers. In the dummy runs at "
            "start only quantized layers read it, and this step of the model uses it differently."
            " Serve the model's float checkpoint, and report the model with the options of the "
            "start."
        )


class Readers:
    """Readers of an output, collected in dummy runs, during which it replaces the output kind."""

    def __init__(self) -> None:
        self._inputs: list[OutputKind | InputScale] = []  # the forms that readers compute with
        self._activations: list[Readers] = []  # readers of gated activations

    def add(self, wanted: OutputKind | InputScale) -> None:
        self._inputs.append(wanted)

    def add_activation(self) -> Readers:
        """Adds a gated activation. Returns the readers of its output."""
        readers = Readers()
        self._activations.append(readers)
        return readers

    def kind(self) -> OutputKind | InputScale:
        """The form that every reader supports: FLOAT if they differ or there is none."""
        if self._activations:
            is_fused = all(each.kind() is OutputKind.PER_TOKEN for each in self._activations)
            return OutputKind.SUMS if is_fused and not self._inputs else OutputKind.FLOAT
        if not self._inputs:
            return OutputKind.FLOAT
        first = self._inputs[0]
        return first if all(each == first for each in self._inputs) else OutputKind.FLOAT


Output: TypeAlias = OutputKind | InputScale | Readers


class TracedActivation(torch.Tensor):
    """A float output during a dummy run that registers its readers with its producer.

    floats: the output, a plain tensor
    """

    floats: torch.Tensor
    readers: Readers

    @staticmethod
    def __new__(
        cls: type[TracedActivation], floats: torch.Tensor, readers: Readers
    ) -> TracedActivation:
        made: TracedActivation = torch.Tensor._make_wrapper_subclass(
            cls, floats.shape, dtype=floats.dtype, device=floats.device
        )
        made.floats = floats
        made.readers = readers
        return made

    def record_stream(self, stream: Any) -> None:
        self.floats.record_stream(stream)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        def read(x: Any) -> Any:
            if not isinstance(x, TracedActivation):
                return x
            x.readers.add(OutputKind.FLOAT)
            return x.floats

        return func(*tree_map(read, args), **tree_map(read, kwargs or {}))


def read_as_floats(*activations: torch.Tensor) -> None:
    """During a dummy run, registers a reader of floats that runs only in other steps."""
    for x in activations:
        if isinstance(x, TracedActivation):
            x.readers.add(OutputKind.FLOAT)


def quantize(
    x: torch.Tensor, input_scale: InputScale | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Quantizes the input of an int8 product; all readers use this function.

    x:           [..., features]
    input_scale: None for a scale per row
    Returns int8 [num_tokens, features] and, without an input_scale, the scales, [num_tokens] fp32.
    One launch, or none for a QuantizedActivation.
    """
    if isinstance(x, QuantizedActivation):
        assert (x.scales is None) is (input_scale is not None) and x.weight_scale is None
        return x.integers, x.scales
    if isinstance(x, TracedActivation):
        x.readers.add(OutputKind.PER_TOKEN if input_scale is None else input_scale)
        x = x.floats
    rows = x.reshape(-1, x.shape[-1])
    if input_scale is None:
        integers, scales = torch_npu.npu_dynamic_quant(rows)
        return integers, scales
    integers = torch_npu.npu_quantize(
        rows, input_scale.scale, input_scale.offset, torch.qint8, -1, True
    )
    return integers, None


def map_rows(x: torch.Tensor, move: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Applies `move` to an activation's rows, as integers if it is stored as integers.

    move: [num_rows, ...] -> [other number of rows, ...]; slices, gathers, permutes or copies rows.
          Called for integers and for scales.
    """
    if isinstance(x, QuantizedActivation):
        scales = None if x.scales is None else move(x.scales)
        return QuantizedActivation(move(x.integers), scales, x.dtype, x.weight_scale)
    if isinstance(x, TracedActivation):
        return TracedActivation(move(x.floats), x.readers)
    return move(x)
