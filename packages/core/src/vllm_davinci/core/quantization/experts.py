"""Routed experts on int8 products: one quantization on the way in, one between the products."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch_npu
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.routed_experts import FusedMoeWeightScaleSupported
from vllm.model_executor.utils import set_weight_attrs

from vllm_davinci.core.errors import CheckpointError, UnsupportedFeatureError
from vllm_davinci.core.moe.experts import (
    COUNTS,
    SINGLE_OUTPUT,
    SPLIT_ROWS,
    Experts,
    sum_by_token,
)
from vllm_davinci.core.moe.forward import RoutedForward
from vllm_davinci.core.moe.layer import NPURoutedExperts
from vllm_davinci.core.moe.method import check_computable, routed_forward, transposed_in_memory
from vllm_davinci.core.ops.compiled import compiled
from vllm_davinci.core.quantization.description import QuantType, shortened
from vllm_davinci.core.quantization.loading import CHECK_COMMAND
from vllm_davinci.core.quantization.weight_layout import arrange

if TYPE_CHECKING:
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEQuantConfig
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

DYNAMIC = 1  # quant_mode of the routing and activation operators: a scale per row
# What a checkpoint calls the parts of an expert -> what vLLM calls them.
SHARDS = {"w13": ("w1", "w3"), "w2": ("w2",)}


@dataclass(frozen=True, kw_only=True)
class DynamicExperts(Experts):
    """Gated experts with int8 weights; every row is quantized with its own scale.

    gate_up:       [num_local, hidden_size, 2 * intermediate_size] int8, gate before up
    gate_up_scale: [num_local, 2 * intermediate_size] fp32
    down:          [num_local, intermediate_size, hidden_size] int8
    down_scale:    [num_local, hidden_size], in the dtype the product takes: that of a bf16 result,
                   else fp32
    dtype:         of the result
    """

    gate_up: torch.Tensor
    gate_up_scale: torch.Tensor
    down: torch.Tensor
    down_scale: torch.Tensor
    dtype: torch.dtype

    def routed(
        self, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor
    ) -> torch.Tensor:
        """See Experts.routed. Rows are quantized by the launch that sorts them: five in all."""
        stage = compiled("experts_w8a8")
        if stage is not None and x.dtype == self.dtype:
            return stage(
                x,
                topk_weights,
                topk_ids,
                self.gate_up,
                self.gate_up_scale,
                self.down,
                self.down_scale,
                self.first,
                self.num_experts,
            )
        rows, row_of_assignment, tokens_per_expert, scales = torch_npu.npu_moe_init_routing_v2(
            x,
            topk_ids,
            active_num=topk_ids.numel(),
            expert_num=self.num_experts,
            expert_tokens_num_type=COUNTS,
            expert_tokens_num_flag=True,
            active_expert_range=[self.first, self.first + self.num_local],
            quant_mode=DYNAMIC,
        )
        return sum_by_token(
            self._products(rows, scales, tokens_per_expert), row_of_assignment, topk_weights
        )

    def grouped(self, rows: torch.Tensor, tokens_per_expert: torch.Tensor) -> torch.Tensor:
        """See Experts.grouped. Four launches."""
        integers, scales = torch_npu.npu_dynamic_quant(rows)
        return self._products(integers, scales, tokens_per_expert)

    def _products(
        self, integers: torch.Tensor, scales: torch.Tensor, tokens_per_expert: torch.Tensor
    ) -> torch.Tensor:
        """integers: [num_rows, hidden_size] int8; scales: [num_rows] fp32."""
        sums = _grouped_matmul(integers, self.gate_up, tokens_per_expert, torch.int32)
        activated, activated_scales = torch_npu.npu_dequant_swiglu_quant(
            sums,
            weight_scale=self.gate_up_scale,
            activation_scale=scales,
            group_index=tokens_per_expert,
            activate_left=True,
            quant_mode=DYNAMIC,
        )
        return _grouped_matmul(
            activated,
            self.down,
            tokens_per_expert,
            self.dtype,
            scale=[self.down_scale],
            per_token_scale=[activated_scales],
        )


def _grouped_matmul(
    rows: torch.Tensor,
    weight: torch.Tensor,
    tokens_per_expert: torch.Tensor,
    dtype: torch.dtype,
    **scales: list[torch.Tensor],
) -> torch.Tensor:
    result: torch.Tensor = torch_npu.npu_grouped_matmul(
        [rows],
        [weight],
        group_list=tokens_per_expert,
        split_item=SINGLE_OUTPUT,
        group_type=SPLIT_ROWS,
        group_list_type=COUNTS,
        output_dtype=dtype,
        **scales,
    )[0]
    return result


class ExpertTensorLoader:
    """vLLM's loader of expert weights, which remembers which parts of one tensor came."""

    def __init__(self, load: Any, tensor: str) -> None:
        self._load = load
        self.tensor = tensor
        self.parts: set[tuple[int, str]] = set()  # expert's number in the checkpoint, w1 | w2 | w3

    def __call__(
        self,
        param: torch.nn.Parameter,
        loaded_weight: torch.Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int,
        return_success: bool = False,
    ) -> bool | None:
        """Raises CheckpointError when the tensor does not fit its place."""
        try:
            is_local = self._load(
                param, loaded_weight, weight_name, shard_id, expert_id, return_success=True
            )
        except (AssertionError, RuntimeError, IndexError) as error:
            raise CheckpointError(
                f"{self.tensor} of expert {expert_id}, part {shard_id}, has shape "
                f"{list(loaded_weight.shape)} in the checkpoint, which does not fit its place of "
                f"shape {list(param.shape)} on this rank ({error}). The checkpoint does not belong "
                f"to its config.json: {CHECK_COMMAND}."
            ) from error
        if is_local:
            self.parts.add((expert_id, shard_id))
        return is_local if return_success else None

    def missing(self, num_local: int, shards: tuple[str, ...]) -> str | None:
        """What did not come for the experts of this rank, or None."""
        absent = num_local * len(shards) - len(self.parts)
        if not absent:
            return None
        return f"{self.tensor} ({absent} of {num_local * len(shards)} parts)"


class W8A8DynamicFusedMoEMethod(FusedMoEMethodBase):
    """int8 experts as vLLM's runner calls them.

    Takes the router's logits: choosing experts, moving tokens and computing are all here.
    """

    kind = QuantType.W8A8_DYNAMIC
    routed_forward: RoutedForward | None = None

    def __init__(self, moe: FusedMoEConfig, prefix: str, is_loaded: bool, use_nz: bool) -> None:
        super().__init__(moe)
        self._prefix = prefix
        self._is_loaded = is_loaded
        self._use_nz = use_nz
        self._loaders: dict[str, ExpertTensorLoader] = {}

    @property
    def is_monolithic(self) -> bool:
        return True

    @property
    def supports_internal_mk(self) -> bool:
        """Tokens of other replicas are fetched here, not by vLLM's runner."""
        return True

    def get_fused_moe_quant_config(self, layer: RoutedExperts) -> FusedMoEQuantConfig | None:
        return None

    def create_weights(
        self,
        layer: RoutedExperts,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Registers w13_* and w2_*: weight int8, weight_scale and weight_offset fp32."""
        self._dtype = params_dtype
        load = extra_weight_attrs["weight_loader"]
        matrices = {
            "w13": (2 * intermediate_size_per_partition, hidden_size),
            "w2": (hidden_size, intermediate_size_per_partition),
        }
        for group, (out, columns) in matrices.items():
            for name, width, dtype in (
                ("weight", columns, torch.int8),
                ("weight_scale", 1, torch.float32),
                ("weight_offset", 1, torch.float32),
            ):
                loader = ExpertTensorLoader(load, f"{self._prefix}.{group}_{name}")
                self._loaders[f"{group}_{name}"] = loader
                parameter = torch.nn.Parameter(
                    torch.zeros(num_experts, out, width, dtype=dtype), requires_grad=False
                )
                layer.register_parameter(f"{group}_{name}", parameter)
                scale_kind = FusedMoeWeightScaleSupported.CHANNEL.value
                set_weight_attrs(parameter, {"weight_loader": loader, "quant_method": scale_kind})

    def process_weights_after_loading(self, layer: RoutedExperts) -> None:
        """Lays the weights out for the grouped products and prepares the forward.

        Raises CheckpointError for tensors that did not come, UnsupportedFeatureError for
        asymmetric weights.
        """
        check_computable(layer)
        assert isinstance(layer, NPURoutedExperts)
        if self._is_loaded:
            self._check_loaded(layer)
        self.routed_forward = routed_forward(
            layer,
            DynamicExperts(
                gate_up=self._arranged(layer.w13_weight),
                gate_up_scale=_scales(layer, "w13_weight_scale"),
                down=self._arranged(layer.w2_weight),
                down_scale=_scales(layer, "w2_weight_scale").to(
                    self._dtype if self._dtype == torch.bfloat16 else torch.float32
                ),
                dtype=self._dtype,
                first=layer.local_num_experts * layer.moe_config.ep_rank,
                num_local=layer.local_num_experts,
                num_experts=layer.global_num_experts,
            ),
        )

    def apply_monolithic(
        self,
        layer: RoutedExperts,
        x: torch.Tensor,
        router_logits: torch.Tensor,
        input_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See RoutedForward."""
        assert self.routed_forward is not None
        return self.routed_forward(x, router_logits)

    def _arranged(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        plain = transposed_in_memory(parameter)
        return arrange(parameter, use_nz=True) if self._use_nz else plain

    def _check_loaded(self, layer: RoutedExperts) -> None:
        missing = [
            text
            for name, loader in self._loaders.items()
            if (text := loader.missing(layer.local_num_experts, SHARDS[name.partition("_")[0]]))
        ]
        if missing:
            raise CheckpointError(
                f"{self._prefix} is quantized as {self.kind.value}, and the checkpoint lacks "
                f"{shortened(missing, 6)}. Copy the export again or export it again: "
                f"{CHECK_COMMAND}."
            )
        for name in ("w13_weight_offset", "w2_weight_offset"):
            if bool(layer.get_parameter(name).any()):
                raise UnsupportedFeatureError(
                    f"{self._prefix}.{name} is not zero: the weights are asymmetric, and "
                    f"{self.kind.value} multiplies symmetric ones. Export the model with symmetric "
                    "weights."
                )


def _scales(layer: torch.nn.Module, name: str) -> torch.Tensor:
    """[num_local, out] fp32, contiguous."""
    return layer.get_parameter(name).detach().squeeze(-1).contiguous()
