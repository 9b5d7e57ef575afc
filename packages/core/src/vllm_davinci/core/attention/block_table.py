"""Maps tokens to cache slots on the host.

vLLM computes the slot mapping with a Triton kernel. The host has block tables and positions, so
a few numpy calls and one copy to the device do here.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from vllm.v1.utils import CpuGpuBuffer
from vllm.v1.worker.block_table import BlockTable, MultiGroupBlockTable, SlotMappingMode

from vllm_davinci.core.attention.stripes import Stripes


class HostBatch(NamedTuple):
    """One step's tokens on the host.

    req_indices: [num_tokens], row of the token's request in the batch
    positions:   [num_tokens], position of the token in its request
    """

    req_indices: np.ndarray
    positions: np.ndarray


class NPUBlockTable(BlockTable):
    """Block table of one KV cache group.

    slots_per_block: number of slots in one block
    stripes: which tokens this rank holds. A block has room for the tokens of every rank
    """

    host_batch: Callable[[int], HostBatch]
    slots_per_block: int
    stripes: Stripes

    @classmethod
    def taking_over(
        cls,
        block_table: BlockTable,
        host_batch: Callable[[int], HostBatch],
        slots_per_token: int = 1,
    ) -> "NPUBlockTable":
        """Wraps the buffers of `block_table`. slots_per_token: slots of each token in a block"""
        ours = cls.__new__(cls)
        ours.__dict__.update(vars(block_table))
        ours.host_batch = host_batch
        ours.slots_per_block = slots_per_token * block_table.block_size
        size, rank = block_table.dcp_world_size, block_table.dcp_rank
        ours.stripes = Stripes(size, rank, block_table.cp_kv_cache_interleave_size)
        return ours

    def compute_slot_mapping(
        self,
        num_reqs: int,
        query_start_loc: torch.Tensor,
        positions: torch.Tensor,
    ) -> None:
        """Writes `slot_mapping`: block * slots_per_block + offset for each token of the step.

        Tokens held by other ranks get slot -1.
        """
        if self.slot_mapping_mode == SlotMappingMode.NONE:
            return
        num_tokens = positions.shape[0]
        batch = self.host_batch(num_tokens)
        stripes = self.stripes
        block_index, offset = np.divmod(batch.positions, self.block_size * stripes.size)
        blocks = self.block_table.np[batch.req_indices, block_index]
        slots = self.slot_mapping.np[:num_tokens]
        np.multiply(blocks, self.slots_per_block, out=slots, casting="unsafe", dtype=np.int64)
        if stripes.size == 1:
            slots += offset
        else:
            slots += stripes.places(offset)
            slots[stripes.owners(offset) != stripes.rank] = -1
        self.slot_mapping.copy_to_gpu(num_tokens)


class NPUMultiGroupBlockTable(MultiGroupBlockTable):
    """Block tables of all KV cache groups."""

    @classmethod
    def taking_over(
        cls,
        block_table: MultiGroupBlockTable,
        host_batch: Callable[[int], HostBatch],
        slots_per_token: int = 1,
    ) -> "NPUMultiGroupBlockTable":
        """Wraps the tables so that slot mappings are computed on the host. Idempotent."""
        ours = cls.__new__(cls)
        ours.__dict__.update(vars(block_table))
        ours.block_tables = [
            NPUBlockTable.taking_over(table, host_batch, slots_per_token)
            for table in block_table.block_tables
        ]
        return ours


def map_slots_on_host(
    batch: Any,
    req_indices: CpuGpuBuffer,
    query_pos: CpuGpuBuffer,
    rejected: np.ndarray,
    slots_per_token: int = 1,
) -> None:
    """Makes vLLM's input batch map tokens to cache slots on the host.

    req_indices: row of each token's request, written before slots are computed
    query_pos:   index of each token among its request's new tokens, likewise
    rejected:    [max_num_reqs], tokens that the batch counts as computed although they were
                 rejected
    slots_per_token: slots of each token in a block: 2 where a block's values follow its keys
    """

    def host_batch(num_tokens: int) -> HostBatch:
        rows = req_indices.np[:num_tokens]
        computed = batch.num_computed_tokens_cpu[rows] - rejected[rows]
        positions: np.ndarray = computed + query_pos.np[:num_tokens]
        return HostBatch(rows, positions)

    batch.block_table = NPUMultiGroupBlockTable.taking_over(
        batch.block_table, host_batch, slots_per_token
    )
