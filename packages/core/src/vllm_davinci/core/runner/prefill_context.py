"""Prefills whose tokens are divided among ranks, each of which caches all of them."""

import torch
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.pcp_manager import PCPManager

from vllm_davinci.core.runner.block_tables import NPUBlockTables


class NPUPCPManager(PCPManager):
    """vLLM's manager, with blocks from our tables, which are on the host."""

    _block_tables: NPUBlockTables
    _local_block_tables: tuple[torch.Tensor, ...]

    def prepare_attn(
        self, input_batch: InputBatch
    ) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        """Blocks of this rank's parts of requests, and slots of the rows of all ranks.

        Returns [parts, blocks] int32 by group, and [groups, ranks * rows] int64.
        """
        tables, whole = self._block_tables, self.global_batch
        tables.gather(whole.idx_mapping_np, whole.num_reqs)
        slots: torch.Tensor = self.prepare_slot_mappings()
        blocks = tables.gather_into(
            self._local_block_tables, input_batch.idx_mapping_np, input_batch.num_reqs_after_padding
        )
        return blocks, slots
