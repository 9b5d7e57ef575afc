"""The container of DBRX's expert weights, whose files have one tensor of all experts."""

import torch
from vllm.model_executor.models.dbrx import DbrxExperts

from vllm_davinci.core.fused_moe.layer import NPURoutedExperts

# Parts of a gated layer: name in files -> vLLM's name for a single expert's part.
_SHARDS = {"mlp.w1": "w1", "mlp.v1": "w3", "mlp.w2": "w2"}


class NPUDbrxExperts(NPURoutedExperts, DbrxExperts):
    """NPURoutedExperts that splits tensors of all experts, so that any layout can load its own."""

    def weight_loader(
        self,
        param: torch.nn.Parameter,
        loaded_weight: torch.Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int | None = None,
        return_success: bool = False,
    ) -> bool | None:
        """Loads one part of all experts: [num_experts * intermediate_size, hidden_size].

        weight_name: the part's name in files; shard_id: the parameter's name
        """
        of_experts = loaded_weight.view(self.moe_config.num_logical_experts, -1, self.d_model)
        part = _SHARDS[weight_name]
        for expert, weight in enumerate(of_experts):
            own = weight.t() if part == "w2" else weight
            super(DbrxExperts, self).weight_loader(param, own, shard_id, part, expert)
        return True if return_success else None
