"""vLLM's map of experts to a rank's slots, with placement from a file."""

from vllm.config.parallel import ExpertPlacementStrategy
from vllm.model_executor.layers.fused_moe.config import FusedMoEParallelConfig
from vllm.model_executor.layers.fused_moe.expert_map_manager import (
    ExpertMapManager,
    determine_expert_map,
)

from vllm_davinci.core.fused_moe.placement import Placement


class NPUExpertMapManager(ExpertMapManager):
    """vLLM's map of experts to slots, with placement from a file, and physical expert numbers.

    num_slots: of all ranks; without a placement the number of experts

    vLLM's `global_num_experts` is the number of slots. Weights are loaded by expert number, once
    for all slots of an expert, so slot numbers beyond the last expert load nothing.
    """

    def __init__(
        self,
        in_order: ExpertMapManager,
        moe_parallel_config: FusedMoEParallelConfig,
        num_expert_group: int | None,
        strategy: ExpertPlacementStrategy,
        placement: Placement | None,
        num_slots: int,
    ) -> None:
        self._placement = placement
        super().__init__(
            max_num_batched_tokens=in_order.max_num_batched_tokens,
            top_k=in_order.top_k,
            global_num_experts=num_slots,
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

    def physical_to_logical(self) -> list[int]:
        """The expert of each slot, over all ranks."""
        if self.ep_size == 1:
            return list(range(self.global_num_experts))
        if self._placement is not None:
            return self._placement.physical_to_logical
        experts = []
        for rank in range(self.ep_size):
            slots = determine_expert_map(
                self.ep_size, rank, self.global_num_experts, self.placement_strategy
            )[1]
            assert slots is not None
            held = (slots >= 0).nonzero().flatten()
            experts += held[slots[held].argsort()].tolist()
        return experts
