"""Splits experts that a checkpoint stores in one tensor per projection into one tensor each."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from vllm_davinci.core.errors import CheckpointError
from vllm_davinci.core.weight_files.files import StoredTensor

GATE_UP = "gate_up_proj"
DOWN = "down_proj"
_KNOWN = (
    f"{GATE_UP} [experts, 2 * intermediate, hidden] with {DOWN} [experts, hidden, intermediate], "
    "or both with their last two dimensions exchanged"
)


@dataclass(frozen=True)
class FusedExperts:
    """The two tensors of a layer's experts, gate before up.

    prefix:        name without the projection
    is_transposed: whether matrices are stored as [in, out] instead of [out, in]
    """

    prefix: str
    is_transposed: bool

    def separate(self, name: str, tensor: torch.Tensor) -> Iterable[tuple[str, torch.Tensor]]:
        """Yields name and weight [out, in] of each expert's projections in one of the tensors."""
        for number, matrix in enumerate(tensor.transpose(1, 2) if self.is_transposed else tensor):
            if name.endswith(DOWN):
                yield f"{self.prefix}.{number}.{DOWN}.weight", matrix
            else:
                gate, up = matrix.chunk(2)
                yield f"{self.prefix}.{number}.gate_proj.weight", gate
                yield f"{self.prefix}.{number}.up_proj.weight", up


def find_fused_experts(stored: Mapping[str, StoredTensor]) -> dict[str, FusedExperts]:
    """Tensor name -> its experts, for all tensors that hold several experts.

    Raises CheckpointError for a tensor of experts in another layout.
    """
    found: dict[str, FusedExperts] = {}
    for name, tensor in stored.items():
        prefix, _, part = name.rpartition(".")
        if not prefix.endswith("experts") and ".experts." not in name:
            continue
        if len(tensor.shape) < 3 and not (prefix.endswith("experts") and part.endswith("_bias")):
            continue
        gate_up, down = stored.get(f"{prefix}.{GATE_UP}"), stored.get(f"{prefix}.{DOWN}")
        if part not in (GATE_UP, DOWN) or gate_up is None or down is None:
            raise _unknown(name, tensor)
        found[name] = FusedExperts(prefix, _is_transposed(gate_up, down))
    return found


def _is_transposed(gate_up: StoredTensor, down: StoredTensor) -> bool:
    """True if the matrices are stored as [in, out]; only one layout fits a pair of shapes."""
    if len(gate_up.shape) == len(down.shape) == 3 and gate_up.shape[0] == down.shape[0]:
        (rows, columns), (down_rows, down_columns) = gate_up.shape[1:], down.shape[1:]
        if columns == down_rows and rows == 2 * down_columns:
            return False
        if rows == down_columns and columns == 2 * down_rows:
            return True
    raise _unknown(f"{GATE_UP} beside {DOWN} {list(down.shape)}", gate_up)


def _unknown(name: str, tensor: StoredTensor) -> CheckpointError:
    return CheckpointError(
        f"{name} of {tensor.file} holds several experts with unknown shape "
        f"{list(tensor.shape)}; the known layout is {_KNOWN}. Save the model with one tensor "
        "per expert and projection."
    )
