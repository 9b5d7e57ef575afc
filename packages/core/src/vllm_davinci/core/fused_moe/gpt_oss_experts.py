"""The container of gpt-oss's expert weights, which the model fills itself."""

from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.models.gpt_oss import GptOssRoutedExperts

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
