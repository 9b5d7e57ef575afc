"""Quantized experts as vLLM's runner calls them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.model_executor.layers.fused_moe.routed_experts import FusedMoeWeightScaleSupported
from vllm.model_executor.utils import set_weight_attrs

from vllm_davinci.core.errors import UnsupportedFeatureError
from vllm_davinci.core.fused_moe.experts import Experts
from vllm_davinci.core.fused_moe.layer import NPURoutedExperts
from vllm_davinci.core.fused_moe.method import NPUFusedMoEMethodBase, transposed_in_memory
from vllm_davinci.core.quantization.description import WEIGHT_ONLY, QuantType
from vllm_davinci.core.quantization.experts import (
    DynamicExperts,
    StaticExperts,
    StaticProjection,
    WeightOnlyExperts,
    WeightOnlyProjection,
    activation_takes_integers,
)
from vllm_davinci.core.quantization.experts_loading import SHARDS, ExpertTensorLoader
from vllm_davinci.core.quantization.loading import require_loaded, require_symmetric
from vllm_davinci.core.quantization.quant_matmul import arrange_weight
from vllm_davinci.core.quantization.tensors import (
    LINEAR_TENSORS,
    TensorSpec,
    deq_scale_as_float,
    device_dtype,
)
from vllm_davinci.core.quantization.weight_only import (
    WAY_OUT,
    arranged_experts,
    refusal,
    require_exact_offset,
)

if TYPE_CHECKING:
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEQuantConfig
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts


class QuantizedFusedMoEMethodBase(NPUFusedMoEMethodBase):
    """Experts in integers, with the tensors of their checkpoint's format.

    prefix:     name of the layer, for messages
    is_loaded:  whether tensors come through weight loaders, so that a missing one can be told
    tensors:    those of an expert's projection in the checkpoint's format; None for ModelSlim's
    group_size: entries of the input that share a scale of a weight-only layer; 0: all
    """

    kind: QuantType

    def __init__(
        self,
        moe: FusedMoEConfig,
        prefix: str = "experts",
        is_loaded: bool = True,
        use_nz: bool = False,
        tensors: tuple[TensorSpec, ...] | None = None,
        group_size: int = 0,
    ) -> None:
        super().__init__(moe)
        self._group_size = group_size if self.kind in WEIGHT_ONLY else 0
        self._tensors = LINEAR_TENSORS[self.kind] if tensors is None else tensors
        self._prefix = prefix
        self._is_loaded = is_loaded
        self._use_nz = use_nz
        self._loaders: dict[str, ExpertTensorLoader] = {}

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
        """Registers w13_* and w2_*: a projection's tensors with experts in front."""
        self._dtype = params_dtype
        load = extra_weight_attrs["weight_loader"]
        matrices = {
            "w13": (2 * intermediate_size_per_partition, hidden_size),
            "w2": (hidden_size, intermediate_size_per_partition),
        }
        for group, matrix in matrices.items():
            for spec in self._tensors:
                name = f"{group}_{spec.name}"
                loader = ExpertTensorLoader(load, f"{self._prefix}.{name}", spec, params_dtype)
                self._loaders[name] = loader
                data = torch.zeros(
                    num_experts,
                    *spec.extent.shape(*matrix, self._group_size),
                    dtype=device_dtype(spec, params_dtype),
                )
                parameter = torch.nn.Parameter(data, requires_grad=False)
                layer.register_parameter(name, parameter)
                scale_kind = FusedMoeWeightScaleSupported[
                    "GROUP" if self._group_size else "CHANNEL"
                ].value
                set_weight_attrs(parameter, {"weight_loader": loader, "quant_method": scale_kind})

    def takes_as_it_is(self, part: str) -> bool:
        """Whether the layer's parameter of that name is none of the type's tensors."""
        return part not in self._loaders

    def process_weights_after_loading(self, layer: RoutedExperts) -> None:
        """See NPUFusedMoEMethodBase.

        Raises CheckpointError for tensors that did not come, UnsupportedFeatureError for
        asymmetric weights.
        """
        if self._is_loaded:
            self._check_loaded(layer)
        super().process_weights_after_loading(layer)

    def _arranged(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        plain = transposed_in_memory(parameter)
        return arrange_weight(parameter, use_nz=True) if self._use_nz else plain

    def _check_loaded(self, layer: RoutedExperts) -> None:
        missing = [
            text
            for name, loader in self._loaders.items()
            if (text := loader.missing(layer.local_num_experts, SHARDS[name.partition("_")[0]]))
        ]
        require_loaded(self._prefix, self.kind, missing)
        for name, loader in self._loaders.items():
            loader.require_agreement()
            if name.endswith("weight_offset") and self.kind not in WEIGHT_ONLY:
                require_symmetric(self._prefix, self.kind, name, layer.get_parameter(name))


class W8A8DynamicFusedMoEMethod(QuantizedFusedMoEMethodBase):
    """int8 weights, every token quantized with its own scale."""

    kind = QuantType.W8A8_DYNAMIC

    def _experts(self, layer: NPURoutedExperts, **place: int) -> Experts:
        gate_up_scale = _plain(layer, "w13_weight_scale").squeeze(-1)
        product_scale = None
        if gate_up_scale.device.type == "npu" and not activation_takes_integers(
            *gate_up_scale.shape
        ):
            product_scale = _as_product_takes(gate_up_scale, self._dtype)
        return DynamicExperts(
            gate_up=self._arranged(layer.w13_weight),
            gate_up_scale=gate_up_scale,
            down=self._arranged(layer.w2_weight),
            down_scale=_as_product_takes(_plain(layer, "w2_weight_scale").squeeze(-1), self._dtype),
            dtype=self._dtype,
            product_scale=product_scale,
            **place,
        )


class W8A8FusedMoEMethod(QuantizedFusedMoEMethodBase):
    """int8 weights, inputs quantized with each expert's scale and offset from the checkpoint."""

    kind = QuantType.W8A8

    def _experts(self, layer: NPURoutedExperts, **place: int) -> Experts:
        # Ranks that share an expert are summed; the bias of its second product must be in the sum
        # once.
        adds_bias = layer.moe_config.moe_parallel_config.tp_rank == 0
        return StaticExperts(
            gate_up=self._projection(layer, "w13", adds_bias=True),
            down=self._projection(layer, "w2", adds_bias=adds_bias),
            **place,
        )

    def _projection(self, layer: NPURoutedExperts, group: str, adds_bias: bool) -> StaticProjection:
        deq_scale = _plain(layer, f"{group}_deq_scale")
        return StaticProjection(
            weight=self._arranged(layer.get_parameter(f"{group}_weight")),
            input_scale=_plain(layer, f"{group}_input_scale"),
            input_offset=_plain(layer, f"{group}_input_offset").float(),
            deq_scale=deq_scale_as_float(deq_scale.cpu()).to(deq_scale.device),
            quant_bias=_plain(layer, f"{group}_quant_bias") if adds_bias else None,
        )


class WeightOnlyFusedMoEMethod(QuantizedFusedMoEMethodBase):
    """Integer weights, tokens in 16 bits."""

    def create_weights(
        self,
        layer: RoutedExperts,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Raises UnsupportedFeatureError for weights that the grouped product does not take."""
        sizes = (
            (hidden_size, 2 * intermediate_size_per_partition),
            (intermediate_size_per_partition, hidden_size),
        )
        for matrix in sizes:
            if reason := refusal(self.kind, self._group_size, *matrix, is_expert=True):
                raise UnsupportedFeatureError(
                    f"{self._prefix} are {self.kind.value}: {reason}. {WAY_OUT}."
                )
        super().create_weights(
            layer, num_experts, hidden_size, intermediate_size_per_partition, params_dtype,
            **extra_weight_attrs,
        )  # fmt: skip

    def _experts(self, layer: NPURoutedExperts, **place: int) -> Experts:
        return WeightOnlyExperts(
            gate_up=self._projection(layer, "w13"), down=self._projection(layer, "w2"), **place
        )

    def _projection(self, layer: NPURoutedExperts, group: str) -> WeightOnlyProjection:
        offset = _plain(layer, f"{group}_weight_offset")
        require_exact_offset(f"{self._prefix}.{group}_weight_offset", offset)
        weight, scale, offset = arranged_experts(
            _plain(layer, f"{group}_weight"),
            _plain(layer, f"{group}_weight_scale").to(self._dtype),
            offset.to(self._dtype),
            self.kind,
        )
        setattr(layer, f"{group}_weight", torch.nn.Parameter(weight, requires_grad=False))
        for part in ("scale", "offset"):
            delattr(layer, f"{group}_weight_{part}")
        return WeightOnlyProjection(weight=weight, scale=scale, offset=offset)


class W8A16FusedMoEMethod(WeightOnlyFusedMoEMethod):
    """Weights of 8 bits."""

    kind = QuantType.W8A16


class W4A16FusedMoEMethod(WeightOnlyFusedMoEMethod):
    """Weights of 4 bits."""

    kind = QuantType.W4A16


EXPERT_METHODS: dict[QuantType, type[QuantizedFusedMoEMethodBase]] = {
    QuantType.W8A8_DYNAMIC: W8A8DynamicFusedMoEMethod,
    QuantType.W8A8: W8A8FusedMoEMethod,
    QuantType.W8A16: W8A16FusedMoEMethod,
    QuantType.W4A16: W4A16FusedMoEMethod,
}


def _as_product_takes(scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A weight's scale as the grouped product takes it: bf16 beside a bf16 result, else fp32.

    scale: fp32
    """
    return scale.to(torch.bfloat16 if dtype == torch.bfloat16 else torch.float32)


def _plain(layer: torch.nn.Module, name: str) -> torch.Tensor:
    return layer.get_parameter(name).detach()
