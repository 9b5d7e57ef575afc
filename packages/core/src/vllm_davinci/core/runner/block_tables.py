"""Block tables of the V2 runner, stored and read on the host."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from vllm.v1.attention.backends.utils import PAD_SLOT_ID
from vllm.v1.worker.gpu.block_table import BlockTables

from vllm_davinci.core.attention.stripes import Stripes
from vllm_davinci.core.triton_kernels.inputs import request_of
from vllm_davinci.core.ubatch.prefix_order import BlockIds, CachedPrefixes


class HostCounts(NamedTuple):
    """Blocks of each request: [groups, slots of requests] int32, only on the host."""

    np: np.ndarray


class NPUBlockTables(BlockTables):
    """Stores all requests' blocks on the host, and copies each step's part to the device.

    vLLM stores the tables on the device and computes a step's rows and slots there. The host knows
    the step's requests and positions, so a few numpy calls and one copy each do here.

    rows:            by cache group, [slots of requests, blocks] int32: a request's blocks
    slots_per_block: by cache group, number of slots in one block
    stripes:         tokens that this rank holds, for groups that ranks divide
    """

    rows: list[np.ndarray]
    slots_per_block: list[int]
    stripes: list[Stripes]

    @classmethod
    def taking_over(cls, tables: BlockTables) -> "NPUBlockTables":
        """Converts the object to this class; keeps buffers of steps and drops its tables."""
        is_divided = tables.dcp_sharded.tolist()
        tables.__class__ = cls
        assert isinstance(tables, cls)
        tables.rows = [
            np.zeros(tuple(table.shape), dtype=np.int32) for table in tables.input_block_tables
        ]
        tables.block_tables, tables.fused_writer = [], None
        tables.num_blocks = HostCounts(tables.num_blocks.np)
        tables.slots_per_block = list(tables.block_sizes)
        tables.stripes = [
            Stripes(tables.cp_size, tables.cp_rank, tables.cp_interleave)
            if divided and tables.cp_size > 1
            else Stripes(1, 0, 1)
            for divided in is_divided
        ]
        tables._version, tables._gathered = 0, None
        return tables

    def keep_slots_per_token(self, number: int) -> None:
        """Sets the number of slots per token, and so the slots per block; see `shared_pages`."""
        self.slots_per_block = [size * number for size in self.block_sizes]

    # Contents of `input_block_tables`: requests' slots, padded rows, and version of `rows`.
    _version: int
    _num_dirty_rows: int  # vLLM's: rows that a dummy step clears
    _gathered: tuple[bytes, int, int] | None

    def append_block_ids(
        self, req_index: int, new_block_ids: tuple[list[int], ...], overwrite: bool
    ) -> None:
        counts = self.num_blocks.np
        for group, block_ids in enumerate(new_block_ids):
            row = self.rows[group][req_index]
            start = 0 if overwrite else int(counts[group, req_index])
            end = start + len(block_ids)
            if end > len(row):
                raise RuntimeError(
                    f"Request {req_index} has {end} blocks of group {group}, and its block table "
                    f"has room for {len(row)}."
                )
            row[start:end] = 0 if self.redirect_writes_to_null_block else block_ids
            if overwrite:  # a drafter's writes past the end go to the null block
                row[end:] = 0
            counts[group, req_index] = end
        self._version += 1

    def apply_staged_writes(self) -> None:
        """Does nothing, because `gather` copies everything that a step needs."""

    def gather(self, slots: np.ndarray, num_padded: int) -> tuple[torch.Tensor, ...]:
        """Each group's blocks of a step's requests, then rows of the null block.

        slots: [num_reqs], slots of the requests
        Returns [num_padded, blocks] int32 on the device by group, always in the same memory.
        """
        now = slots.tobytes(), num_padded, self._version
        tables = self.input_block_tables
        if now != self._gathered:
            self._gathered = now
            self._num_dirty_rows = max(self._num_dirty_rows, num_padded)
            return self.gather_into(tables, slots, num_padded)
        return tuple(table[:num_padded] for table in tables)

    def gather_into(
        self, tables: Sequence[torch.Tensor], slots: np.ndarray, num_padded: int
    ) -> tuple[torch.Tensor, ...]:
        """`gather` into other tables, always with a copy. tables: by group, [rows, blocks] int32"""
        for rows, table in zip(self.rows, tables, strict=True):
            gathered = torch.empty((num_padded, rows.shape[1]), dtype=torch.int32, pin_memory=True)
            np.take(rows, slots, axis=0, out=gathered.numpy()[: len(slots)])
            gathered[len(slots) :] = 0
            table[:num_padded].copy_(gathered, non_blocking=True)
        return tuple(table[:num_padded] for table in tables)

    def slots_of(self, slots: np.ndarray, positions: np.ndarray, num_padded: int) -> torch.Tensor:
        """Each token's cache slot; PAD_SLOT_ID if this rank or group does not cache the token.

        slots:     [num_tokens], the slot of each token's request
        positions: [num_tokens], position of each token in its request
        Returns [groups, num_padded] int64 on the device, always in the same memory.
        """
        places = torch.empty(
            (self.num_kv_cache_groups, num_padded), dtype=torch.int64, pin_memory=True
        )
        for group, of_group in enumerate(places.numpy()):
            self._write_slots(group, slots, positions, of_group)
        mappings = self.slot_mappings[:, :num_padded]
        if self.num_kv_cache_groups > 1:  # rows of several groups need one copy, not one each
            places = places.to(self.device, non_blocking=True)
        return mappings.copy_(places, non_blocking=True)

    def _write_slots(
        self, group: int, slots: np.ndarray, positions: np.ndarray, out: np.ndarray
    ) -> None:
        out[len(positions) :] = PAD_SLOT_ID
        of_tokens = out[: len(positions)]
        if not self._slot_mapping_enabled[group]:
            of_tokens[:] = PAD_SLOT_ID
            return
        stripes = self.stripes[group]
        number, offset = np.divmod(positions, self.block_sizes[group] * stripes.size)
        blocks = self.rows[group][slots, number]
        np.multiply(blocks, self.slots_per_block[group], out=of_tokens, dtype=np.int64)
        if stripes.size == 1:
            of_tokens += offset
        else:
            of_tokens += stripes.places(offset)
            of_tokens[stripes.owners(offset) != stripes.rank] = PAD_SLOT_ID

    def prefixes(self, slots: np.ndarray, num_computed_tokens: np.ndarray) -> CachedPrefixes:
        """A step's blocks and tokens that are already cached. num_computed_tokens: [num_reqs]"""
        groups = zip(self.rows, self.block_sizes, strict=True)
        return CachedPrefixes(
            [BlockIds(rows[slots], size) for rows, size in groups], num_computed_tokens
        )

    def gather_block_tables(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        raise AssertionError("Use `gather`: the host knows the rows of a step.")

    def compute_slot_mappings(
        self,
        idx_mapping: torch.Tensor,
        query_start_loc: torch.Tensor,
        positions: torch.Tensor,
        num_tokens_padded: int,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Like `slots_of`, for a drafter's pass over the gathered rows, with positions on the
        device.

        idx_mapping:     [num_reqs] int64; -1: the request caches nothing
        query_start_loc: [num_reqs + 1 or more] int32, the first token of each request, then the end
        positions:       [num_tokens or more] int64
        Returns [groups, num_tokens_padded] int64, in `out` or always in the same memory.
        """
        mappings = (self.slot_mappings if out is None else out)[:, :num_tokens_padded]
        positions = positions[:num_tokens_padded]
        ends = query_start_loc[1 : idx_mapping.shape[0] + 1]
        request = request_of(ends, positions.shape[0])
        numbers = torch.arange(positions.shape[0], device=positions.device, dtype=torch.int64)
        is_token = (numbers < ends[-1]) & (idx_mapping.index_select(0, request) >= 0)
        mappings[:, positions.shape[0] :].fill_(PAD_SLOT_ID)
        for group, table in enumerate(self.input_block_tables):
            places = mappings[group, : positions.shape[0]]
            if not self._slot_mapping_enabled[group]:
                places.fill_(PAD_SLOT_ID)
                continue
            stripes = self.stripes[group]
            size = self.block_sizes[group] * stripes.size
            number = torch.div(positions, size, rounding_mode="floor")
            offset = positions - number * size
            is_kept = is_token
            if stripes.size > 1:
                is_kept = is_token & (stripes.owners(offset) == stripes.rank)
                offset = stripes.places(offset)
            block = request * table.shape[1] + number.clamp(max=table.shape[1] - 1)
            blocks = table.view(-1).index_select(0, block)
            slots = blocks * self.slots_per_block[group] + offset
            places.copy_(torch.where(is_kept, slots, PAD_SLOT_ID))
        return mappings

    def get_dummy_block_tables(self, num_reqs: int) -> tuple[torch.Tensor, ...]:
        self._gathered = None
        tables: tuple[torch.Tensor, ...] = super().get_dummy_block_tables(num_reqs)
        return tables
