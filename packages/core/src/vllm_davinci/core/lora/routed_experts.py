"""Adapters of routed experts: vLLM's wrapper, and the deltas of dispatched rows."""

from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from vllm.config.lora import LoRAConfig
from vllm.lora.layers import FusedMoEWithLoRA
from vllm.lora.layers.base import BaseLayerWithLoRA
from vllm.model_executor.layers.fused_moe import MoERunner

from vllm_davinci.core.fused_moe.local_experts import grouped_matmul
from vllm_davinci.core.fused_moe.method import NPUFusedMoEMethodBase
from vllm_davinci.core.lora.punica import NPUPunicaWrapper

GATE_AND_UP = 2


def reason_against_experts(runner: MoERunner) -> str | None:
    """The reason why a layer's routed experts support no adapters, a clause; None if they do."""
    routed = runner.routed_experts
    method = routed.quant_method
    if not isinstance(method, NPUFusedMoEMethodBase) or method.moe_forward is None:
        return f"experts of {type(method).__name__} support none"
    forward = method.moe_forward
    if not forward.experts.takes_adapters:
        return f"{type(forward.experts).__name__} take none"
    if forward.physical_experts is not None:
        return "experts are not in order on the ranks (expert_map_path, round robin)"
    if forward.weight_on_input:
        return "weights are applied to the experts' inputs"
    if forward.dispatchers is not None:
        return "tokens are sent between ranks (data parallelism, moe_communication)"
    return None


class NPUFusedMoEWithLoRA(FusedMoEWithLoRA):
    """vLLM's wrapper of routed experts, with our products.

    vLLM's tensors are views of one matrix per expert and product, in which slots are adjacent: W is
    max_loras * max_lora_rank, and a slice of the first product is gate or up.
    """

    gate_up_a: torch.Tensor  # [num_local, hidden_size, slices * W]
    gate_up_b: torch.Tensor  # [num_local, slices * W, slices * intermediate_size], block diagonal
    down_a: torch.Tensor  # [num_local, intermediate_size, W]
    down_b: torch.Tensor  # [num_local, W, hidden_size]

    def __init__(self, base_layer: MoERunner) -> None:
        # vLLM's own constructor needs the layer's kernel; ours has none.
        BaseLayerWithLoRA.__init__(self)
        self.base_layer = base_layer
        self.moe_config = base_layer.moe_config
        parallel = self.moe_config.moe_parallel_config
        self.tp_size, self.tp_rank = parallel.tp_size, parallel.tp_rank
        self.device = base_layer.routed_experts.w2_weight.device
        self._w13_slices = GATE_AND_UP
        self.enable_moe_shared_loras = False
        self.n_slices = self.local_num_experts * (GATE_AND_UP + 1)

    def _create_lora_a_weights(self, max_loras: int, lora_config: LoRAConfig) -> None:
        rank, width = lora_config.max_lora_rank, max_loras * lora_config.max_lora_rank
        self.gate_up_a = self._zeros(lora_config, self.hidden_size, GATE_AND_UP * width)
        self.down_a = self._zeros(lora_config, self.intermediate_size_per_partition, width)
        slots = (max_loras, rank)
        by_slice = self.gate_up_a.unflatten(2, (GATE_AND_UP, *slots)).permute(2, 3, 0, 4, 1)
        self.w13_lora_a_stacked = by_slice.unbind()
        self.w2_lora_a_stacked = (self.down_a.unflatten(2, slots).permute(2, 0, 3, 1),)

    def _create_lora_b_weights(self, max_loras: int, lora_config: LoRAConfig) -> None:
        slots = (max_loras, lora_config.max_lora_rank)
        width, size = max_loras * lora_config.max_lora_rank, self.intermediate_size_per_partition
        self.gate_up_b = self._zeros(lora_config, GATE_AND_UP * width, GATE_AND_UP * size)
        self.down_b = self._zeros(lora_config, width, self.hidden_size)
        blocks = [
            self.gate_up_b[:, part * width : (part + 1) * width, part * size : (part + 1) * size]
            for part in range(GATE_AND_UP)
        ]
        self.w13_lora_b_stacked = tuple(
            block.unflatten(1, slots).permute(1, 0, 3, 2) for block in blocks
        )
        self.w2_lora_b_stacked = (self.down_b.unflatten(1, slots).permute(1, 0, 3, 2),)

    def _zeros(self, lora_config: LoRAConfig, *shape: int) -> torch.Tensor:
        dtype = cast(torch.dtype, lora_config.lora_dtype)
        return torch.zeros(self.local_num_experts, *shape, dtype=dtype, device=self.device)

    def set_mapping(self, punica_wrapper: Any) -> None:
        """Registers this wrapper as the source of deltas in the layer's forward."""
        BaseLayerWithLoRA.set_mapping(self, punica_wrapper)
        method = self.base_layer.routed_experts.quant_method
        assert isinstance(method, NPUFusedMoEMethodBase) and method.moe_forward is not None
        punica_wrapper.keep_slots()
        deltas = RoutedExpertDeltas(self, punica_wrapper)
        method.moe_forward = replace(method.moe_forward, adapters=deltas)


# vLLM's manager looks up its wrapper by name when it makes adapters for the warm-up.
NPUFusedMoEWithLoRA.__name__ = FusedMoEWithLoRA.__name__


@dataclass(frozen=True)
class RoutedExpertDeltas:
    """Adapters of one layer's routed experts."""

    layer: NPUFusedMoEWithLoRA
    step: NPUPunicaWrapper

    def slots(self, num_tokens: int) -> torch.Tensor | None:
        """See ExpertAdapters.slots."""
        return None if self.step.no_lora else self.step.slots(num_tokens)

    def of_rows(self, slots: torch.Tensor, tokens_per_expert: torch.Tensor) -> "DeltasOfRows":
        """See ExpertAdapters.of_rows."""
        return DeltasOfRows(self.layer, self.step.foreign_to_slots(slots), tokens_per_expert)


@dataclass(frozen=True)
class DeltasOfRows:
    """Deltas of rows sorted by expert, in four launches per product.

    foreign: [num_rows, W], bool: columns of other slots than the row's
    """

    layer: NPUFusedMoEWithLoRA
    foreign: torch.Tensor
    tokens_per_expert: torch.Tensor

    def add_to_gate_up(self, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """See RowDeltas.add_to_gate_up."""
        shrunk = grouped_matmul(x, self.layer.gate_up_a, self.tokens_per_expert)
        by_slice = shrunk.view(shrunk.shape[0], GATE_AND_UP, -1)
        by_slice.masked_fill_(self.foreign.unsqueeze(1), 0)
        return y.add_(grouped_matmul(shrunk, self.layer.gate_up_b, self.tokens_per_expert))

    def add_to_down(self, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """See RowDeltas.add_to_down."""
        shrunk = grouped_matmul(x, self.layer.down_a, self.tokens_per_expert)
        shrunk.masked_fill_(self.foreign, 0)
        return y.add_(grouped_matmul(shrunk, self.layer.down_b, self.tokens_per_expert))
