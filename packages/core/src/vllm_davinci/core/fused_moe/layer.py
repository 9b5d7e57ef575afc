"""vLLM's container of expert weights, with our expert layout."""

import dataclasses
from collections.abc import Generator, Iterable
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.distributed import get_ep_group
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.model_executor.layers.fused_moe.expert_map_manager import ExpertMapManager
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.models.utils import extract_layer_index

from vllm_davinci.core.config.parsing import get_config
from vllm_davinci.core.errors import UnsupportedFeatureError
from vllm_davinci.core.fused_moe.expert_layout import (
    ExpertLayout,
    check_expert_count,
    check_intermediate_size,
    expert_layout,
)
from vllm_davinci.core.fused_moe.expert_map_file import placement_of_layer, redundant_experts
from vllm_davinci.core.fused_moe.expert_map_manager import NPUExpertMapManager
from vllm_davinci.core.fused_moe.placement import Placement
from vllm_davinci.core.fused_moe.supported_experts import check_supported_experts

# Activation of experts without gates -> an activation of vLLM that stands for it, because vLLM
# refuses activations without gates except on CUDA, ROCm and XPU.
GATED_IN_NAME = {"relu2": "swiglustep"}
_UNGATED = {MoEActivation.SWIGLUSTEP: MoEActivation.RELU2_NO_MUL}

_BIAS_OF_CHOICE = "e_score_correction_bias"


class NPURoutedExperts(RoutedExperts):
    """Expert weights of one layer on this rank.

    vLLM divides whole experts among ranks or cuts all of them among all ranks. Here `layout` gives
    the number of ranks per expert, and a file may place experts.
    """

    layout: ExpertLayout
    expert_map_manager: NPUExpertMapManager

    def __init__(
        self,
        layer_name: str,
        params_dtype: torch.dtype,
        moe_config: FusedMoEConfig,
        quant_config: QuantizationConfig | None,
        expert_map_manager: ExpertMapManager,
        *arguments: Any,
        **options: Any,
    ) -> None:
        if options.get("ckpt_up_proj_name", "") is None:
            moe_config.activation = _UNGATED.get(moe_config.activation, moe_config.activation)
        vllm_config = get_current_vllm_config()
        config = get_config(vllm_config)
        layout = expert_layout(vllm_config.parallel_config, config)
        num_experts = moe_config.num_logical_experts
        num_redundant = redundant_experts(config, num_experts, layout.ep_size)
        check_expert_count(num_experts, layout, num_redundant)
        # The number of all slots: vLLM counts only the redundant slots of its own option.
        moe_config.num_experts = num_experts + num_redundant
        check_intermediate_size(layer_name, moe_config.intermediate_size, layout)
        rank = get_ep_group().rank_in_group
        # The object of this layer, which vLLM's runner reads too.
        moe_config.moe_parallel_config = dataclasses.replace(
            moe_config.moe_parallel_config,
            tp_size=layout.etp_size,
            tp_rank=layout.etp_rank(rank),
            ep_size=layout.ep_size,
            ep_rank=layout.ep_rank(rank),
            use_ep=layout.ep_size > 1,
            # For this layer only. The value that NPUPlatform sets makes vLLM divide tokens
            # differently; here it would prevent the overlap of shared and routed experts.
            all2all_backend="allgather_reducescatter",
        )
        moe_config.num_local_experts = moe_config.num_experts // layout.ep_size
        moe_config.intermediate_size_per_partition = moe_config.intermediate_size // layout.etp_size
        moe_config.intermediate_size_per_partition_unpadded = (
            moe_config.intermediate_size_per_partition
        )
        super().__init__(
            layer_name,
            params_dtype,
            moe_config,
            quant_config,
            NPUExpertMapManager(
                expert_map_manager,
                moe_config.moe_parallel_config,
                options.get("num_expert_group"),
                vllm_config.parallel_config.expert_placement_strategy,
                _placement(config.expert_map_path, layer_name, num_experts, num_redundant, layout),
                moe_config.num_experts,
            ),
            *arguments,
            **options,
        )
        self.layout = layout
        check_supported_experts(self)

    def load_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]]
    ) -> Generator[str, None, None]:
        """Also loads the router's correction bias, which vLLM's method ignores (Laguna)."""
        loaded = []

        def of_experts() -> Generator[tuple[str, torch.Tensor], None, None]:
            for name, tensor in weights:
                if name == _BIAS_OF_CHOICE and self.e_score_correction_bias is not None:
                    self.e_score_correction_bias.data.copy_(tensor)
                    loaded.append(name)
                else:
                    yield name, tensor

        yield from super().load_weights(of_experts())
        yield from loaded

    def get_expert_weights(self) -> list[torch.Tensor]:
        """The tensors that move with an expert: [local_num_experts, values] each, views.

        Raises UnsupportedFeatureError for tensors without such a view.
        """
        forward = getattr(self.quant_method, "moe_forward", None)
        assert forward is not None, "weights are loaded"
        views = []
        for name, tensor in forward.experts.tensors.items():
            if len(tensor) != self.local_num_experts or not tensor.is_contiguous():
                raise UnsupportedFeatureError(
                    "additional_config key 'eplb_config.dynamic_eplb' is not supported for "
                    f"{self.layer_name}: {name} {list(tensor.shape)} does not hold one expert "
                    "after another. Remove it."
                )
            views.append(tensor.view(self.local_num_experts, -1))
        return views

    def _get_quant_method(
        self, prefix: str, quant_config: QuantizationConfig | None, moe_config: FusedMoEConfig
    ) -> FusedMoEMethodBase:
        try:
            return super()._get_quant_method(prefix, quant_config, moe_config)
        except NotImplementedError as error:  # the format's kernels in vLLM are for other devices
            name = None if quant_config is None else quant_config.get_name()
            raise UnsupportedFeatureError(
                f"{prefix}: quantized experts of {name} are not available on NPUs. Run "
                "`vllm-davinci quantize` on the float checkpoint and serve what it writes."
            ) from error


def _placement(
    path: str | None, layer_name: str, num_experts: int, num_redundant: int, layout: ExpertLayout
) -> Placement | None:
    """The layer's placement; None if vLLM places experts, each once."""
    if path is not None and layout.ep_size > 1:
        return placement_of_layer(
            path, extract_layer_index(layer_name), num_experts, layout.ep_size
        )
    if num_redundant:
        return Placement.in_order(num_experts, num_redundant, layout.ep_size)
    return None
