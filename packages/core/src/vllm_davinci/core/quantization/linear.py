"""Linear layers on int8 products.

Static:  xq = clamp(round(x / input_scale + input_offset), -128, 127)
         y  = (xq * weight^T + quant_bias) * deq_scale
Dynamic: s  = max|x| / 127 per token, xq = round(x / s)
         y  = (xq * weight^T) * weight_scale * s + bias
Sums are int32, scaling is fp32, the result is rounded once to the input's dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch_npu
from vllm.model_executor.layers.linear import (
    LinearMethodBase,
    QKVParallelLinear,
    RowParallelLinear,
    register_weight_loader_v2_supported_method,
)
from vllm.model_executor.parameter import (
    BasevLLMParameter,
    ChannelQuantScaleParameter,
    ModelWeightParameter,
    PerTensorScaleParameter,
)

from vllm_davinci.core.errors import CheckpointError
from vllm_davinci.core.ops.linear import NPUUnquantizedLinearMethod
from vllm_davinci.core.quantization.description import QuantType
from vllm_davinci.core.quantization.dynamic_product import dynamic_product, scaled_product
from vllm_davinci.core.quantization.handover import (
    InputScale,
    IntegerProjection,
    QuantizedActivation,
)
from vllm_davinci.core.quantization.loading import (
    RecordingLoader,
    require_loaded,
    require_symmetric,
)
from vllm_davinci.core.quantization.tensors import (
    LINEAR_TENSORS,
    Extent,
    TensorSpec,
    device_dtype,
)
from vllm_davinci.core.quantization.weight_layout import arrange


class QuantizedLinearMethodBase(LinearMethodBase):
    """The tensors of one type: made, filled from the checkpoint, checked.

    prefix:    name of the layer, for messages
    is_loaded: whether tensors come through weight loaders, so that a missing one can be told
    """

    kind: QuantType

    def __init__(self, prefix: str, is_loaded: bool) -> None:
        self.prefix = prefix
        self._is_loaded = is_loaded
        self._loaders: dict[str, RecordingLoader] = {}

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
        """Registers the parameters of LINEAR_TENSORS on the layer."""
        self._dtype = params_dtype
        load = extra_weight_attrs["weight_loader"]
        out_features = sum(output_partition_sizes)
        for spec in LINEAR_TENSORS[self.kind]:
            loader = RecordingLoader(load, f"{self.prefix}.{spec.name}", spec, params_dtype)
            self._loaders[spec.name] = loader
            layer.register_parameter(
                spec.name,
                _parameter(
                    spec,
                    device_dtype(spec, params_dtype),
                    (out_features, input_size_per_partition),
                    len(output_partition_sizes),
                    loader,
                ),
            )

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Raises CheckpointError for a tensor that is missing or that the format rules out."""
        if not self._is_loaded:
            return
        parts = _parts(layer)
        missing = [text for loader in self._loaders.values() for text in loader.missing(parts)]
        require_loaded(self.prefix, self.kind, missing)
        offset = "weight_offset"
        require_symmetric(self.prefix, self.kind, offset, _plain(layer, offset))


@register_weight_loader_v2_supported_method
class W8A8LinearMethod(QuantizedLinearMethodBase):
    """int8 weight, input quantized with the scale and offset of the checkpoint."""

    kind = QuantType.W8A8

    def __init__(self, prefix: str, is_loaded: bool, use_nz: bool) -> None:
        super().__init__(prefix, is_loaded)
        self._use_nz = use_nz

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        super().process_weights_after_loading(layer)
        self._weight = arrange(layer.get_parameter("weight"), self._use_nz)
        self._input_scale = InputScale.of(
            self._one_of(layer, "input_scale").to(torch.float32),
            self._one_of(layer, "input_offset").to(torch.int32),
        )
        self._deq_scale = _plain(layer, "deq_scale")
        # Ranks of a row-parallel layer are summed; the bias must be in the sum once.
        adds_bias = not isinstance(layer, RowParallelLinear) or layer.tp_rank == 0
        self._quant_bias = _plain(layer, "quant_bias") if adds_bias else None

    def apply(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x: [..., in_features]. Returns [..., out_features] of the same dtype.

        bias: not used; the export folded it into quant_bias
        """
        result: torch.Tensor = torch_npu.npu_quant_matmul(
            self._input_scale.quantize(x),
            self._weight,
            self._deq_scale,
            bias=self._quant_bias,
            output_dtype=x.dtype,
        )
        return result.view(*x.shape[:-1], -1)

    def _one_of(self, layer: torch.nn.Module, name: str) -> torch.Tensor:
        """The value that all parts of a fused layer have, [1]."""
        values = _plain(layer, name)
        if self._is_loaded and bool((values != values[0]).any()):
            raise CheckpointError(
                f"{self.prefix} is one product of one input, and {name} differs between its parts: "
                f"{values.tolist()}. Export the model with one input scale for these parts."
            )
        return values[:1].contiguous()


@register_weight_loader_v2_supported_method
class W8A8DynamicLinearMethod(QuantizedLinearMethodBase):
    """int8 weight, every token quantized with its own scale.

    hands_over: leave scaling to the next layer of an MLP, which does it in its own launch
    """

    kind = QuantType.W8A8_DYNAMIC

    def __init__(
        self, prefix: str, is_loaded: bool, use_nz: bool, hands_over: bool = False
    ) -> None:
        super().__init__(prefix, is_loaded)
        self._use_nz = use_nz
        self.hands_over = hands_over

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        super().process_weights_after_loading(layer)
        self._weight = arrange(layer.get_parameter("weight"), self._use_nz)
        self._weight_scale = _plain(layer, "weight_scale").flatten().to(torch.float32)

    def apply(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x: [..., in_features]. Returns [..., out_features] of the same dtype."""
        handed = x if isinstance(x, QuantizedActivation) else None
        if self.hands_over and bias is None and x.dim() == 2:
            integers, scales = (
                torch_npu.npu_dynamic_quant(x)
                if handed is None
                else (handed.integers, handed.scales)
            )
            sums = torch_npu.npu_quant_matmul(
                integers, self._weight, self._weight_scale, output_dtype=torch.int32
            )
            return IntegerProjection(
                sums, scales, self._weight_scale, x.dtype, self._stop_handing_over
            )
        if handed is not None:
            return scaled_product(
                handed.integers, handed.scales, self._weight, self._weight_scale, bias, x.dtype
            )
        return dynamic_product(x, self._weight, self._weight_scale, bias)

    def _stop_handing_over(self) -> None:
        """This model does something else with the projection: scale it here from now on."""
        self.hands_over = False


@register_weight_loader_v2_supported_method
class WeightOnlyAtLoadLinearMethod(QuantizedLinearMethodBase):
    """A quantized weight that is needed as floats: weight * weight_scale, computed once.

    Latent attention derives its absorbed matrices from `kv_b_proj`.
    """

    def __init__(self, kind: QuantType, prefix: str, is_loaded: bool) -> None:
        super().__init__(prefix, is_loaded)
        self.kind = kind

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        super().process_weights_after_loading(layer)
        scaled = _plain(layer, "weight").float() * _plain(layer, "weight_scale").float()
        for name in self._loaders:
            delattr(layer, name)
        layer.weight = torch.nn.Parameter(scaled.to(self._dtype), requires_grad=False)
        method = NPUUnquantizedLinearMethod()
        method.process_weights_after_loading(layer)
        layer.quant_method = method

    def apply(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        raise CheckpointError(
            f"{self.prefix} is used before its weights were prepared: load the model through vLLM."
        )


def _parts(layer: torch.nn.Module) -> Sequence[Any]:
    """The shard ids under which a checkpoint's tensors come for this layer."""
    if isinstance(layer, QKVParallelLinear):
        return ("q", "k", "v")
    count = len(getattr(layer, "output_partition_sizes", [0]))
    return range(count) if count > 1 else (None,)


def _plain(layer: torch.nn.Module, name: str) -> torch.Tensor:
    return layer.get_parameter(name).detach().as_subclass(torch.Tensor)


def _parameter(
    spec: TensorSpec,
    dtype: torch.dtype,
    matrix: tuple[int, int],
    num_parts: int,
    loader: RecordingLoader,
) -> BasevLLMParameter:
    """The vLLM parameter that divides a tensor over ranks as its extent says."""
    shape = (num_parts,) if spec.extent is Extent.ONE else spec.extent.shape(*matrix)
    data = torch.zeros(shape, dtype=dtype)
    if spec.extent is Extent.MATRIX:
        return ModelWeightParameter(data=data, input_dim=1, output_dim=0, weight_loader=loader)
    if spec.extent is Extent.ONE:
        return PerTensorScaleParameter(data=data, weight_loader=loader)
    return ChannelQuantScaleParameter(data=data, output_dim=0, weight_loader=loader)
