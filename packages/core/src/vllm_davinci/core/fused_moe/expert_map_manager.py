"""vLLM's map of experts to the slots of a rank, with placement by a file."""

import torch
from vllm.config.parallel import ExpertPlacementStrategy
from vllm.model_executor.layers.fused_moe.config import FusedMoEParallelConfig
from vllm.model_executor.layers.fused_moe.expert_map_manager import (
    ExpertMapManager,
    determine_expert_map,
)

from vllm_davinci.core.fused_moe.expert_map_file import Placement


class NPUExpertMapManager(ExpertMapManager):
    """vLLM's map of experts to slots, with placement by a file, and physical expert numbers."""

    def __init__(
        self,
        in_order: ExpertMapManager,
        moe_parallel_config: FusedMoEParallelConfig,
        num_expert_group: int | None,
        strategy: ExpertPlacementStrategy,
        placement: Placement | None,
    ) -> None:
        self._placement = placement
        super().__init__(
            max_num_batched_tokens=in_order.max_num_batched_tokens,
            top_k=in_order.top_k,
            global_num_experts=in_order.global_num_experts,
            num_redundant_experts=0,
            num_expert_group=num_expert_group,
            moe_parallel_config=moe_parallel_config,
            placement_strategy=strategy,
            enable_eplb=False,
        )

    def _calculate_expert_maps(self) -> None:
        super()._calculate_expert_maps()
        if self._placement is not None and self.ep_size > 1:
            self._expert_map = self._placement.slots(self.ep_rank, self.global_num_experts)

    def physical_experts(self) -> torch.Tensor | None:
        """[num_experts], int32: each expert's physical number; None when it is its own."""
        if self.ep_size == 1:
            return None
        num_local = self.global_num_experts // self.ep_size
        numbers = torch.empty(self.global_num_experts, dtype=torch.int32)
        for rank in range(self.ep_size):
            slots = self._slots(rank)
            held = slots >= 0
            numbers[held] = slots[held] + rank * num_local
        in_order = torch.arange(self.global_num_experts, dtype=torch.int32)
        return None if torch.equal(numbers, in_order) else numbers

    def _slots(self, rank: int) -> torch.Tensor:
        if self._placement is not None:
            return self._placement.slots(rank, self.global_num_experts)
        slots = determine_expert_map(
            self.ep_size, rank, self.global_num_experts, self.placement_strategy
        )[1]
        assert slots is not None
        return slots.cpu()
