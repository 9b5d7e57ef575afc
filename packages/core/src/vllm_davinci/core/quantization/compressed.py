"""compressed-tensors: what vLLM's own configuration of the format leaves to its other devices."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, register_weight_loader_v2_supported_method
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsConfig,
    CompressedTensorsLinearMethod,
)
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import (
    CompressedTensorsW8A8Int8,
)

from vllm_davinci.core.errors import CheckpointError, UnsupportedFeatureError
from vllm_davinci.core.layers.linear import NPUUnquantizedLinearMethod
from vllm_davinci.core.quantization.compressed_schemes import NAME, WAY_OUT, refusal
from vllm_davinci.core.quantization.config import load_settings
from vllm_davinci.core.quantization.description import QuantType
from vllm_davinci.core.quantization.experts_method import W8A8DynamicFusedMoEMethod
from vllm_davinci.core.quantization.packed_config import PackedCompressedConfig
from vllm_davinci.core.quantization.packed_weights import packed_format
from vllm_davinci.core.quantization.quant_matmul import require_sizes
from vllm_davinci.core.quantization.tensors import LINEAR_TENSORS

_EXPERT_TENSORS = tuple(
    spec for spec in LINEAR_TENSORS[QuantType.W8A8_DYNAMIC] if spec.name != "weight_offset"
)


class NPUCompressedTensorsConfig(CompressedTensorsConfig):
    """vLLM's configuration, with int8 experts and the floats that MLA takes."""

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        """Another configuration for checkpoints of which only the weights are quantized."""
        packing = packed_format(config)
        return super().from_config(config) if packing is None else PackedCompressedConfig(packing)

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        if isinstance(layer, RoutedExperts) and (experts := self._int8_experts(layer, prefix)):
            return experts
        if not isinstance(layer, LinearBase):
            return super().get_quant_method(layer, prefix)
        scheme = self.get_scheme_dict(layer, prefix)
        if scheme and (reason := refusal(scheme["weights"], scheme["input_activations"])):
            raise UnsupportedFeatureError(f"{prefix}: {NAME} with {reason}. {WAY_OUT}.")
        method = super().get_quant_method(layer, prefix)
        if type(method) is not CompressedTensorsLinearMethod:
            return method
        if prefix.rpartition(".")[2] == "kv_b_proj":
            return FloatsAtLoadMethod(self)
        return Int8LinearMethod(self, prefix)

    def _int8_experts(self, layer: RoutedExperts, prefix: str) -> QuantizeMethodBase | None:
        """The method of int8 experts, or None for those of another kind."""
        self._add_fused_moe_to_target_scheme_map()
        names = [f"{prefix}.0.{part}_proj" for part in ("gate", "up", "down")]
        schemes = [self.get_scheme_dict(layer, name) for name in names]
        if any(scheme != schemes[0] for scheme in schemes):
            raise CheckpointError(
                f"{prefix} is one product, and its parts have different schemes in config.json: "
                f"{', '.join(names)}. Quantize the model again with one scheme for all of them."
            )
        if schemes[0] is None:
            return None
        reason = refusal(schemes[0]["weights"], schemes[0]["input_activations"], is_expert=True)
        if reason is None:
            return W8A8DynamicFusedMoEMethod(
                layer.moe_config, prefix, *load_settings(), tensors=_EXPERT_TENSORS
            )
        raise UnsupportedFeatureError(f"{prefix}: experts of {NAME} with {reason}. {WAY_OUT}.")


@register_weight_loader_v2_supported_method
class Int8LinearMethod(CompressedTensorsLinearMethod):
    """vLLM's, for weights that the product of this device takes.

    prefix: name of the layer, for messages
    """

    def __init__(self, quantization_config: CompressedTensorsConfig, prefix: str) -> None:
        super().__init__(quantization_config)
        self.prefix = prefix

    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Raises UnsupportedFeatureError for weights that it does not take."""
        require_sizes(self.prefix, input_size_per_partition, sum(output_partition_sizes))
        super().create_weights(
            layer,
            input_size_per_partition,
            output_partition_sizes,
            input_size,
            output_size,
            params_dtype,
            **extra_weight_attrs,
        )


@register_weight_loader_v2_supported_method
class FloatsAtLoadMethod(CompressedTensorsLinearMethod):
    """int8 weights that become weight * weight_scale, of which absorbed matrices are made."""

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        # As the kernel prepares them, with a scale per channel.
        super().process_weights_after_loading(layer)
        scheme = layer.scheme
        assert isinstance(scheme, CompressedTensorsW8A8Int8)
        scaled = scheme.kernel.floats()
        for name in [name for name, _ in layer.named_parameters(recurse=False) if name != "bias"]:
            delattr(layer, name)
        assert isinstance(layer, LinearBase)
        weight = scaled.to(layer.params_dtype)
        layer.weight = torch.nn.Parameter(weight, requires_grad=False)
        method = NPUUnquantizedLinearMethod()
        method.process_weights_after_loading(layer)
        layer.quant_method = method
