"""Creates a quantized linear layer's tensors as vLLM's parameters, fills and checks them."""

from collections.abc import Sequence
from typing import Any

import torch
from vllm.model_executor.layers.linear import (
    LinearMethodBase,
    QKVParallelLinear,
    register_weight_loader_v2_supported_method,
)
from vllm.model_executor.parameter import (
    BasevLLMParameter,
    ChannelQuantScaleParameter,
    GroupQuantScaleParameter,
    ModelWeightParameter,
    PerTensorScaleParameter,
)

from vllm_davinci.core.layers.quantized_activation import InputScale, OutputKind
from vllm_davinci.core.quantization.loading import (
    RecordingLoader,
    require_loaded,
    require_symmetric,
)
from vllm_davinci.core.quantization.quant_matmul import QuantMatmul
from vllm_davinci.core.quantization.scheme import LayerSettings, Scheme, WeightSize
from vllm_davinci.core.quantization.tensors import Extent, TensorSpec, device_dtype


class QuantizedLinearMethodBase(LinearMethodBase):
    """The tensors of one scheme: created, filled from the checkpoint, checked.

    prefix: name of the layer, for messages

    After loading, `quant_matmul` has the operands for stages that multiply themselves; None for a
    layer that is more than a product.
    """

    quant_matmul: QuantMatmul | None = None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        register_weight_loader_v2_supported_method(cls)

    def __init__(self, scheme: Scheme, prefix: str, settings: LayerSettings) -> None:
        self.scheme = scheme
        self.prefix = prefix
        self.settings = settings
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
        """Registers the scheme's parameters on the layer.

        Raises UnsupportedFeatureError for weights that the product does not support.
        """
        self._dtype = params_dtype
        load = extra_weight_attrs["weight_loader"]
        out_features = sum(output_partition_sizes)
        group_size = self.settings.group_size
        size = WeightSize(self.prefix, input_size_per_partition, out_features, group_size)
        self.scheme.require_sizes(size)
        for spec in self.scheme.parameters:
            loader = RecordingLoader(load, f"{self.prefix}.{spec.name}", spec, params_dtype)
            self._loaders[spec.name] = loader
            layer.register_parameter(
                spec.name,
                _parameter(
                    spec,
                    device_dtype(spec, params_dtype),
                    (out_features, input_size_per_partition),
                    len(output_partition_sizes),
                    group_size,
                    loader,
                ),
            )

    def takes_as_it_is(self, part: str) -> bool:
        """True if the layer uses a parameter of that name that the scheme does not define."""
        return part not in self._loaders and not self.scheme.folds_bias

    def can_return(self, kind: OutputKind | InputScale) -> bool:
        """True if `apply` can return that kind of output; call it after loading."""
        return False

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Raises CheckpointError for a missing or invalid tensor."""
        if not self.settings.is_loaded:
            return
        parts = _parts(layer)
        missing = [text for loader in self._loaders.values() for text in loader.missing(parts)]
        require_loaded(self.prefix, self.scheme, missing)
        offset = "weight_offset"
        if offset in self._loaders and self.scheme.is_symmetric:
            require_symmetric(self.prefix, self.scheme, offset, plain_tensor(layer, offset))
        for loader in self._loaders.values():
            loader.is_closed = True


def plain_tensor(layer: torch.nn.Module, name: str) -> torch.Tensor:
    """A parameter without vLLM's subclass, for which torch calls back into Python."""
    return layer.get_parameter(name).detach().as_subclass(torch.Tensor)


def _parts(layer: torch.nn.Module) -> Sequence[Any]:
    """The shard ids of the checkpoint's tensors for this layer."""
    if isinstance(layer, QKVParallelLinear):
        return ("q", "k", "v")
    count = len(getattr(layer, "output_partition_sizes", [0]))
    return range(count) if count > 1 else (None,)


def _parameter(
    spec: TensorSpec,
    dtype: torch.dtype,
    matrix: tuple[int, int],
    num_parts: int,
    group_size: int,
    loader: RecordingLoader,
) -> BasevLLMParameter:
    """The vLLM parameter that divides a tensor over ranks according to its extent."""
    is_one = spec.extent is Extent.ONE
    shape = (num_parts,) if is_one else spec.extent.shape(*matrix, group_size)
    data = torch.zeros(shape, dtype=dtype)
    if spec.extent in (Extent.MATRIX, Extent.PACKED_COLUMNS):
        return ModelWeightParameter(data=data, input_dim=1, output_dim=0, weight_loader=loader)
    if is_one:
        return PerTensorScaleParameter(data=data, weight_loader=loader)
    if spec.extent is Extent.GROUPS and group_size:
        return GroupQuantScaleParameter(data=data, input_dim=1, output_dim=0, weight_loader=loader)
    return ChannelQuantScaleParameter(data=data, output_dim=0, weight_loader=loader)
