"""Cosines and sines of one step, shared by its layers."""

from dataclasses import dataclass, field

import torch

_NO_TABLE = 0  # key of `no_rotation` in the cache; other keys are the addresses of tables


@dataclass
class StepRope:
    """Caches the cosines and sines of a step's positions in its metadata."""

    _cos_sin: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(
        default_factory=dict, kw_only=True
    )

    def cos_sin(
        self, table: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines of this step's positions; layers with the same table share them.

        table:     [max_position, rotary_dim], cosines then sines, one per pair of entries
        positions: [num_actual_tokens], int64, the same at every call of a step
        Returns two tensors [num_actual_tokens, 1, 1, rotary_dim].
        """
        rows = self._cos_sin.get(table.data_ptr())
        if rows is None:
            cos, sin = table.index_select(0, positions).chunk(2, dim=-1)
            shape = (positions.shape[0], 1, 1, table.shape[1])
            rows = cos.repeat(1, 2).view(shape), sin.repeat(1, 2).view(shape)
            self._cos_sin[table.data_ptr()] = rows
        return rows

    def no_rotation(
        self, num_tokens: int, rotary_dim: int, rows: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines of 1 and sines of 0, for a model without positions.

        rows: gives dtype and device
        """
        shape = (num_tokens, 1, 1, rotary_dim)
        found = self._cos_sin.get(_NO_TABLE)
        if found is None:
            dtype, device = rows.dtype, rows.device
            cos = torch.ones(shape, dtype=dtype, device=device)
            found = cos, torch.zeros_like(cos)
            self._cos_sin[_NO_TABLE] = found
        return found
