"""Checkpoints whose integers are packed into int32: AWQ, GPTQ, compressed-tensors.

For a layer X of [out, in], with 4-bit integers eight of which lie in one of int32:
    AWQ                 X.qweight [in, out / 8], the eight in an order of its own;
                        X.scales [groups, out]; X.qzeros [groups, out / 8]
    GPTQ                X.qweight [in / 8, out]; X.scales and X.qzeros as there, in plain order and,
                        in its first format, one less; X.g_idx [in], the group of each input
    compressed-tensors  X.weight_packed [out, in / 8]; X.weight_scale [out, groups];
                        X.weight_zero_point [out / 8, groups]; X.weight_shape [2]
While they are read they become the tensors of W4A16 or W8A16 (see `weight_only`), one by one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from vllm_davinci.core.errors import CheckpointError, UnsupportedFeatureError
from vllm_davinci.core.quantization.description import QuantDescription, QuantType
from vllm_davinci.core.quantization.weight_only import (
    WAY_OUT,
    packed_columns,
    refusal_of_groups,
    unpacked_columns,
)

AWQ, GPTQ, COMPRESSED = "awq", "gptq", "compressed-tensors"
PACK_QUANTIZED = "pack-quantized"
# Where each of eight neighbours lies among the halves of AWQ's four bytes.
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
_KINDS = {4: QuantType.W4A16, 8: QuantType.W8A16}


@dataclass(frozen=True)
class PackedFormat:
    """The format of a checkpoint's packed weights, from config.json.

    method:          AWQ, GPTQ or COMPRESSED
    bits:            of an integer, 4 or 8
    group_size:      entries of the input that share a scale; 0: all
    has_zero_points: whether the integer of zero is in the files, or half of the range
    zero_shift:      added to a zero point of the files
    """

    method: str
    bits: int
    group_size: int
    has_zero_points: bool
    zero_shift: int = 0

    @property
    def kind(self) -> QuantType:
        return _KINDS[self.bits]

    @property
    def weight(self) -> str:
        """The last part of a packed weight's name."""
        return "weight_packed" if self.method == COMPRESSED else "qweight"

    def tensors(self, out_features: int, in_features: int) -> dict[str, tuple[int, ...]]:
        """The last parts of the names of a layer's tensors -> their shapes."""
        each = 32 // self.bits
        groups = in_features // self.group_size if self.group_size else 1
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
        """[out, in] of a packed weight of that shape."""
        rows, columns = stored
        each = 32 // self.bits
        if self.method == AWQ:
            return columns * each, rows
        return (columns, rows * each) if self.method == GPTQ else (rows, columns * each)

    def described(self, names: Iterable[str], source: str) -> QuantDescription:
        """The types of a checkpoint's layers.

        names: of all tensors
        """
        ending, listed = f".{self.weight}", list(names)
        types = {
            f"{name.removesuffix(ending)}.weight": self.kind.value
            for name in listed
            if name.endswith(ending)
        }
        types |= dict.fromkeys((name for name in listed if name.endswith(".weight")), "FLOAT")
        options = {"version": self.method, "group_size": self.group_size}
        return QuantDescription(types, options, source)

    def converted(
        self, weights: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors of `described`'s layers in place of those in the files.

        Raises UnsupportedFeatureError for groups that are not of neighbours.
        """
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
        """int8 [out, in], or of 4 bits [out, in / 2]."""
        if self.method == AWQ:
            return packed_columns(self._in_order(packed).t().contiguous())
        rows = packed if self.method == COMPRESSED else packed.t().contiguous()
        return _signed_bytes(rows, self.bits)

    def _offset(self, packed: torch.Tensor) -> torch.Tensor:
        """fp32 [out, groups]."""
        rows = packed.t().contiguous() if self.method == COMPRESSED else packed
        return (self._in_order(rows).float() + self.zero_shift).t().contiguous()

    def _in_order(self, packed: torch.Tensor) -> torch.Tensor:
        """int8 [rows, columns] of int32 [rows, columns / 8]; signed, half of the range less."""
        integers = _signed_bytes(packed, self.bits)
        if self.bits == 4:
            integers = unpacked_columns(integers)
        if self.method == AWQ:
            integers = integers.unflatten(-1, (-1, 8))[..., _AWQ_ORDER].flatten(-2)
        return integers

    def _require_neighbours(self, name: str, g_idx: torch.Tensor) -> None:
        number = torch.arange(len(g_idx))
        expected = number // self.group_size if self.group_size else torch.zeros_like(number)
        if not torch.equal(g_idx.long(), expected):
            raise UnsupportedFeatureError(
                f"{name} puts inputs that are no neighbours into one group, which the product does "
                f"not take. {_ACT_ORDER}."
            )


_ACT_ORDER = "Quantize the model again without activation order (desc_act false, actorder none)"


def _signed_bytes(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 [..., n] as int8 [..., 4 n], in which each integer of `bits` has its sign.

    Integers from 0 become those from -half of the range: its highest bit is turned.
    """
    return packed.contiguous().view(torch.int8) ^ (-0x78 if bits == 4 else -0x80)


def packed_format(config: Mapping[str, Any] | None) -> PackedFormat | None:
    """The format of a checkpoint, or None for one of another method.

    config: `quantization_config` of config.json
    Raises UnsupportedFeatureError for what the products do not take.
    """
    method = str((config or {}).get("quant_method", "")).lower()
    readers = {AWQ: _of_awq, GPTQ: _of_gptq, COMPRESSED: _of_compressed}
    found = readers[method](config) if config and method in readers else None
    if found is None:
        return None
    if found.bits not in _KINDS:
        raise _unavailable(method, f"weights of {found.bits} bits; those of 4 and 8 are available")
    if reason := refusal_of_groups(found.group_size):
        raise _unavailable(method, reason)
    return found


def _number(method: str, config: Mapping[str, Any], *names: str) -> int:
    """The first of some settings that config.json has."""
    for name in names:
        if isinstance(value := config.get(name), int):
            return value
    raise CheckpointError(
        f"config.json says {method} and has no {' or '.join(names)}. Copy the file again."
    )


def _unavailable(method: str, reason: str) -> UnsupportedFeatureError:
    return UnsupportedFeatureError(f"config.json says {method} with {reason}. {WAY_OUT}.")


def _of_awq(config: Mapping[str, Any]) -> PackedFormat:
    version = str(config.get("version") or "gemm").lower()
    if version != "gemm":
        raise _unavailable(AWQ, f"version {version!r}, whose layout is not read; that of 'gemm' is")
    if not config.get("zero_point", True):
        raise _unavailable(AWQ, "zero_point false; files with zero points are read")
    bits = _number(AWQ, config, "bits", "w_bit")
    if bits != 4:
        raise _unavailable(AWQ, f"weights of {bits} bits; those of 4 are available")
    group_size = _number(AWQ, config, "group_size", "q_group_size")
    return PackedFormat(AWQ, bits, max(group_size, 0), has_zero_points=True)


def _of_gptq(config: Mapping[str, Any]) -> PackedFormat:
    layout = str(config.get("checkpoint_format") or "gptq")
    if layout not in ("gptq", "gptq_v2") or config.get("is_marlin_format"):
        raise _unavailable(GPTQ, f"checkpoint_format {layout!r}; 'gptq' and 'gptq_v2' are read")
    bits = _number(GPTQ, config, "bits")
    group_size = max(_number(GPTQ, config, "group_size"), 0)
    if config.get("desc_act") and group_size:
        raise UnsupportedFeatureError(
            f"config.json says {GPTQ} with desc_act, whose groups are of inputs that are no "
            f"neighbours; the product does not take them. {_ACT_ORDER}."
        )
    for pattern, own in (config.get("dynamic") or {}).items():
        if not pattern.startswith("-:") and own:
            raise _unavailable(GPTQ, f"settings of its own for {pattern!r} (dynamic)")
    return PackedFormat(
        GPTQ,
        bits,
        group_size,
        has_zero_points=not config.get("sym", True),
        zero_shift=1 if layout == "gptq" else 0,
    )


def _of_compressed(config: Mapping[str, Any]) -> PackedFormat | None:
    """None for checkpoints of which other layers than those with packed weights are quantized."""
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
            raise _unavailable(COMPRESSED, f"{key}, which is not read")
    found = {_of_scheme(group["weights"]) for group in groups}
    if len(found) > 1:
        raise _unavailable(COMPRESSED, "packed weights of several schemes; those of one are read")
    return found.pop()


def _of_scheme(weights: Mapping[str, Any]) -> PackedFormat:
    if weights.get("type", "int") != "int" or weights.get("dynamic"):
        raise _unavailable(COMPRESSED, "packed weights that are not static integers")
    strategy = weights.get("strategy")
    if strategy not in ("group", "channel"):
        raise _unavailable(COMPRESSED, f"a scale per {strategy}; per group and channel are read")
    if weights.get("actorder") in ("group", True):
        raise UnsupportedFeatureError(
            f"config.json says {COMPRESSED} with actorder 'group', whose groups are of inputs that "
            f"are no neighbours; the product does not take them. {_ACT_ORDER}."
        )
    return PackedFormat(
        COMPRESSED,
        _number(COMPRESSED, weights, "num_bits"),
        _number(COMPRESSED, weights, "group_size") if strategy == "group" else 0,
        has_zero_points=not weights.get("symmetric", True),
    )
