"""Containers of expert weights that models or their files fill in a form of their own.

gpt-oss fills them itself, DBRX's files have one tensor of all experts, and Hunyuan and others run
Transformers' own code.
"""

from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.models.dbrx import DbrxExperts
from vllm.model_executor.models.gpt_oss import GptOssRoutedExperts
from vllm.model_executor.models.transformers.moe import TransformersRoutedExperts

from vllm_davinci.core.errors import UnsupportedFeatureError
from vllm_davinci.core.fused_moe.layer import NPURoutedExperts


class NPUGptOssRoutedExperts(NPURoutedExperts, GptOssRoutedExperts):
    """NPURoutedExperts for a model that splits the tensors of all experts itself.

    The model supports two layouts: whole experts in order, and every expert divided among all
    ranks. In other layouts experts would get weights of other experts.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        parallel = get_current_vllm_config().parallel_config
        is_whole = parallel.enable_expert_parallel
        with torch.device("cpu"):  # otherwise on the NPU, where models are built
            order = self.expert_map_manager.physical_to_logical()
        reason = None
        if order != list(range(self.moe_config.num_logical_experts)):
            reason = (
                "experts in another order or with replicas (additional_config keys "
                "'expert_map_path' and 'eplb_config'). Remove it"
            )
        elif self.moe_config.moe_parallel_config.enable_eplb:
            reason = "experts that move (additional_config key 'eplb_config'). Remove it"
        elif not is_whole and self.layout.etp_size != self.layout.world_size:
            reason = (
                f"experts shared by {self.layout.etp_size} of {self.layout.world_size} ranks "
                "(additional_config key 'expert_tensor_parallel_size', which defaults to "
                "--tensor-parallel-size). Add --enable-expert-parallel"
            )
        if reason is not None:
            raise UnsupportedFeatureError(
                f"{self.layer_name}: gpt-oss's weights cannot be loaded into {reason}."
            )


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


class NPUTransformersRoutedExperts(NPURoutedExperts, TransformersRoutedExperts):
    """NPURoutedExperts with Transformers' names of expert weights."""
