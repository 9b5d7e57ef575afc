"""Integers packed into int32, in the layouts of AWQ, GPTQ and compressed-tensors.

For a layer X of [out, in], with eight 4-bit integers per int32:
    AWQ                 X.qweight [in, out / 8], in AWQ's own order of the eight;
                        X.scales [groups, out]; X.qzeros [groups, out / 8]
    GPTQ                X.qweight [in / 8, out]; X.scales and X.qzeros as in AWQ, in plain
                        order and, in its first format, one less; X.g_idx [in], each input's group
    compressed-tensors  X.weight_packed [out, in / 8]; X.weight_scale [out, groups];
                        X.weight_zero_point [out / 8, groups]; X.weight_shape [2]
Reading converts them one by one to the tensors of W4A16 or W8A16 (see `weight_only`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch

from vllm_davinci.core.errors import CheckpointError, UnsupportedFeatureError
from vllm_davinci.core.quantization.config import AscendQuantizationConfig
from vllm_davinci.core.quantization.format import Checkpoint, Format, Weights
from vllm_davinci.core.quantization.scheme import FLOAT, Layout
from vllm_davinci.core.quantization.tensors import dtype_name
from vllm_davinci.core.quantization.weight_only import (
    WAY_OUT,
    packed_columns,
    refusal_of_groups,
    unpacked_columns,
)
from vllm_davinci.core.weight_files.files import StoredTensor
from vllm_davinci.core.weight_files.issues import CheckReport

AWQ, GPTQ, COMPRESSED = "awq", "gptq", "compressed-tensors"
ACT_ORDER = "Quantize the model again without activation order (desc_act false, actorder none)"
KINDS = {4: "W4A16", 8: "W8A16"}
# For each of eight adjacent integers, its index among the half bytes of AWQ's four bytes.
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
_FLOATS = ("scales", "weight_scale")


@dataclass(frozen=True, kw_only=True)
class PackedWeights(Format):
    """A checkpoint with packed weights. A subclass reads config.json (`of`).

    bits:            per integer, 4 or 8
    has_zero_points: whether files contain zero points; otherwise zero is half of the range
    zero_shift:      added to a zero point from the files
    """

    bits: int
    has_zero_points: bool
    zero_shift: int = 0

    method: ClassVar[str]
    """AWQ, GPTQ or COMPRESSED, as in config.json."""

    @property
    def label(self) -> str:
        return f"{self.method} (config.json)"

    def loads_as(self, prefix: str) -> str:
        return self.method

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self | None:
        """The format without its layers, or None if config.json names another one.

        config: `quantization_config` of config.json
        Raises UnsupportedFeatureError for settings that the products do not support.
        """
        raise NotImplementedError

    @classmethod
    def find(cls, checkpoint: Checkpoint, quantization: str | None) -> Self | None:
        found = cls.of(checkpoint.quantization)
        return None if found is None else found.described(checkpoint)

    @classmethod
    def made(cls, bits: int, group_size: int, **zeros: Any) -> Self:
        """Makes the format. Raises UnsupportedFeatureError for unsupported widths and groups."""
        if bits not in KINDS:
            raise unavailable(cls.method, f"weights of {bits} bits; those of 4 and 8 are available")
        if reason := refusal_of_groups(group_size):
            raise unavailable(cls.method, reason)
        layout = Layout(version=cls.method, group_size=group_size)
        return cls(types={}, source="config.json", layout=layout, bits=bits, **zeros)

    @property
    def kind(self) -> str:
        """The scheme that computes the layers."""
        return KINDS[self.bits]

    @property
    def weight(self) -> str:
        """Suffix of a packed weight's name."""
        return "weight_packed" if self.method == COMPRESSED else "qweight"

    def tensors(self, out_features: int, in_features: int) -> dict[str, tuple[int, ...]]:
        """Suffixes of the names of a layer's tensors -> their shapes."""
        each = 32 // self.bits
        groups = in_features // self.layout.group_size if self.layout.group_size else 1
        if self.method == COMPRESSED:
            made: dict[str, tuple[int, ...]] = {
                "weight_packed": (out_features, in_features // each),
                "weight_scale": (out_features, groups),
                "weight_shape": (2,),
            }
            zeros = {"weight_zero_point": (out_features // each, groups)}
            return {**made, **zeros} if self.has_zero_points else made
        packed = (
            (in_features, out_features // each)
            if self.method == AWQ
            else (in_features // each, out_features)
        )
        made = {"qweight": packed, "scales": (groups, out_features)}
        if self.has_zero_points:
            made["qzeros"] = (groups, out_features // each)
        return made

    def matrix(self, stored: tuple[int, ...]) -> tuple[int, int]:
        """Returns [out, in] of a packed weight with that stored shape."""
        rows, columns = stored
        each = 32 // self.bits
        if self.method == AWQ:
            return columns * each, rows
        return (columns, rows * each) if self.method == GPTQ else (rows, columns * each)

    def described(self, checkpoint: Checkpoint) -> Self:
        """A copy with the schemes of a checkpoint's layers, found by its tensor names."""
        ending, listed = f".{self.weight}", checkpoint.tensor_names()
        types = {
            f"{name.removesuffix(ending)}.weight": self.kind
            for name in listed
            if name.endswith(ending)
        }
        types |= dict.fromkeys((name for name in listed if name.endswith(".weight")), FLOAT)
        return replace(self, types=types, source=checkpoint.model)

    def converted(self, weights: Weights, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        """See Format. Raises UnsupportedFeatureError for groups that are not contiguous."""
        for name, tensor in weights:
            prefix, _, part = name.rpartition(".")
            if part == self.weight:
                yield f"{prefix}.weight", self._weight(tensor)
            elif part == ("weight_scale" if self.method == COMPRESSED else "scales"):
                scale = tensor if self.method == COMPRESSED else tensor.t().contiguous()
                yield f"{prefix}.weight_scale", scale
                if not self.has_zero_points:
                    yield f"{prefix}.weight_offset", torch.zeros(scale.shape)
            elif part in ("qzeros", "weight_zero_point"):
                if self.has_zero_points:
                    yield f"{prefix}.weight_offset", self._offset(tensor)
            elif part in ("g_idx", "weight_g_idx"):
                self._require_neighbours(name, tensor)
            elif part != "weight_shape" or self.method != COMPRESSED:
                yield name, tensor

    def _weight(self, packed: torch.Tensor) -> torch.Tensor:
        """Unpacks a weight to int8 [out, in]; with 4 bits [out, in / 2]."""
        if self.method == AWQ:
            return packed_columns(self._in_order(packed).t().contiguous())
        rows = packed if self.method == COMPRESSED else packed.t().contiguous()
        return _signed_bytes(rows, self.bits)

    def _offset(self, packed: torch.Tensor) -> torch.Tensor:
        """Returns fp32 [out, groups]."""
        rows = packed.t().contiguous() if self.method == COMPRESSED else packed
        return (self._in_order(rows).float() + self.zero_shift).t().contiguous()

    def _in_order(self, packed: torch.Tensor) -> torch.Tensor:
        """Unpacks int32 [rows, columns / 8] to int8 [rows, columns], minus half of the range."""
        integers = _signed_bytes(packed, self.bits)
        if self.bits == 4:
            integers = unpacked_columns(integers)
        if self.method == AWQ:
            integers = integers.unflatten(-1, (-1, 8))[..., _AWQ_ORDER].flatten(-2)
        return integers

    def _require_neighbours(self, name: str, g_idx: torch.Tensor) -> None:
        number = torch.arange(len(g_idx))
        size = self.layout.group_size
        expected = number // size if size else torch.zeros_like(number)
        if not torch.equal(g_idx.long(), expected):
            raise UnsupportedFeatureError(
                f"{name} has groups that are not contiguous, which the product does not support. "
                f"{ACT_ORDER}."
            )

    def whole(self, tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
        found = dict(tensors)
        ending = f".{self.weight}"
        for name, tensor in tensors.items():
            if name.endswith(ending) and len(tensor.shape) == 2:
                weight = f"{name.removesuffix(ending)}.weight"
                found[weight] = replace(tensor, shape=self.matrix(tensor.shape))
        return found

    def check(self, tensors: Mapping[str, StoredTensor], report: CheckReport) -> None:
        """Checks that every packed weight's other tensors exist and fit it."""
        ending = f".{self.weight}"
        others = set(self.tensors(32, 32)) - {self.weight}
        for name in tensors:
            prefix, _, part = name.rpartition(".")
            if part in others and f"{prefix}{ending}" not in tensors:
                report.problem(f"{prefix}{ending}", f"is missing, and {name} is there")
        for name, weight in tensors.items():
            if not name.endswith(ending):
                continue
            prefix = name.removesuffix(ending)
            if len(weight.shape) != 2:
                report.problem(name, f"has shape {list(weight.shape)} and must be a matrix")
                continue
            for part, shape in self.tensors(*self.matrix(weight.shape)).items():
                own = f"{prefix}.{part}"
                tensor = tensors.get(own)
                if tensor is None:
                    report.problem(own, f"is missing: {self.method} needs it. Copy the files again")
                elif tensor.shape != shape:
                    report.problem(
                        own, f"has shape {list(tensor.shape)} and must have {list(shape)}"
                    )
                elif tensor.dtype.is_floating_point != (part in _FLOATS):
                    kind = "a floating dtype" if part in _FLOATS else "integers"
                    report.problem(own, f"holds {dtype_name(tensor.dtype)} and must hold {kind}")


def _signed_bytes(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Converts int32 [..., n] to int8 [..., 4 n], in which each integer of `bits` is signed.

    Flips the highest bit: integers from 0 become integers from minus half of the range.
    """
    return packed.contiguous().view(torch.int8) ^ (-0x78 if bits == 4 else -0x80)


def number(method: str, config: Mapping[str, Any], *names: str) -> int:
    """The first of the named settings in config.json."""
    for name in names:
        if isinstance(value := config.get(name), int):
            return value
    raise CheckpointError(
        f"config.json says {method} and has no {' or '.join(names)}. Copy the file again."
    )


def unavailable(method: str, reason: str) -> UnsupportedFeatureError:
    return UnsupportedFeatureError(f"config.json says {method} with {reason}. {WAY_OUT}.")


class PackedWeightsConfig(AscendQuantizationConfig):
    """# vLLM's"""

    name: ClassVar[str]  # vLLM's
    kind: ClassVar[type[PackedWeights]]

    def get_name(self) -> Any:
        return self.name

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> PackedWeightsConfig:
        if cls.kind.of(config) is None:
            raise UnsupportedFeatureError(
                f"--quantization {cls.name} is for checkpoints whose config.json has quant_method "
                f"{cls.kind.method!r}, and this one has {config.get('quant_method')!r}. Remove it."
            )
        made = cls()
        made.named = config
        return made

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> Any:
        own = cls.kind.method
        is_own = str(hf_quant_cfg.get("quant_method", "")).lower() == own
        return cls.name if is_own and user_quant in (None, own, cls.name) else None
