"""Base of quantized expert methods: creates, fills and checks their tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.model_executor.layers.fused_moe.routed_experts import FusedMoeWeightScaleSupported
from vllm.model_executor.utils import set_weight_attrs

from vllm_davinci.core.errors import CheckpointError
from vllm_davinci.core.fused_moe.method import NPUFusedMoEMethodBase, transposed_in_memory
from vllm_davinci.core.quantization.loading import TensorLoader, require_loaded, require_symmetric
from vllm_davinci.core.quantization.quant_matmul import arrange_weight
from vllm_davinci.core.quantization.scheme import LayerSettings, Scheme, WeightSize
from vllm_davinci.core.quantization.tensors import Extent, TensorSpec, device_dtype

# vLLM's names for an expert's parts within one tensor.
SHARDS = {"w13": ("w1", "w3"), "w2": ("w2",)}


class ExpertTensorLoader(TensorLoader):
    """Records which parts of which experts were loaded."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        # (expert number in the checkpoint, w1 | w2 | w3) -> the value, for tensors of one value
        self.parts: dict[tuple[int, str], float | None] = {}

    def __call__(
        self,
        param: torch.nn.Parameter,
        loaded_weight: torch.Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int,
        return_success: bool = False,
    ) -> bool | None:
        # vLLM treats tensors with this attribute as one value per expert.
        is_one = self._spec.extent is Extent.ONE
        known_name = weight_name.replace(self._spec.name, "input_scale") if is_one else weight_name
        is_local: bool = self._put(
            f" of expert {expert_id}, part {shard_id},",
            param,
            loaded_weight,
            known_name,
            shard_id,
            expert_id,
            return_success=True,
        )
        if is_local:
            value = loaded_weight.item() if loaded_weight.numel() == 1 else None
            self.parts[expert_id, shard_id] = value
        return is_local if return_success else None

    def missing(self, num_local: int, shards: tuple[str, ...]) -> str | None:
        """The parts not loaded for this rank's experts, for a message; None if all were."""
        absent = num_local * len(shards) - len(self.parts)
        if not absent:
            return None
        return f"{self.tensor} ({absent} of {num_local * len(shards)} parts)"

    def require_agreement(self) -> None:
        """Raises CheckpointError if gate and up of an expert have different single values."""
        for (expert, shard), value in self.parts.items():
            other = self.parts.get((expert, "w3"), value) if shard == "w1" else value
            if value != other:
                raise CheckpointError(
                    f"{self.tensor} of expert {expert} is {value} for gate_proj and {other} for "
                    "up_proj, which form one product with one input. Export the model with one "
                    "input scale for both."
                )


if TYPE_CHECKING:
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEQuantConfig
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts


class QuantizedFusedMoEMethodBase(NPUFusedMoEMethodBase):
    """Quantized experts with the tensors of their scheme.

    prefix:  name of the layer, for messages
    tensors: of an expert's projection, if the format has other tensors than the scheme
    """

    def __init__(
        self,
        scheme: Scheme,
        moe: FusedMoEConfig,
        prefix: str = "experts",
        settings: LayerSettings | None = None,
        tensors: tuple[TensorSpec, ...] | None = None,
    ) -> None:
        super().__init__(moe)
        self.scheme = scheme
        self.settings = settings or LayerSettings()
        self._group_size = self.settings.group_size if scheme.has_groups else 0
        self._tensors = scheme.parameters if tensors is None else tensors
        self._prefix = prefix
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
        """Registers w13_* and w2_*: a projection's tensors with a leading expert dimension.

        Raises UnsupportedFeatureError for weights that the grouped product does not support.
        """
        self._dtype = params_dtype
        load = extra_weight_attrs["weight_loader"]
        matrices = {
            "w13": (2 * intermediate_size_per_partition, hidden_size),
            "w2": (hidden_size, intermediate_size_per_partition),
        }
        for group, matrix in matrices.items():
            size = WeightSize(self._prefix, matrix[1], matrix[0], self._group_size, is_expert=True)
            self.scheme.require_sizes(size)
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
        """True if the layer has a parameter of that name that the scheme does not define."""
        return part not in self._loaders

    def process_weights_after_loading(self, layer: RoutedExperts) -> None:
        """See NPUFusedMoEMethodBase.

        Raises CheckpointError for missing tensors, UnsupportedFeatureError for asymmetric weights.
        """
        if self.settings.is_loaded:
            self._check_loaded(layer)
        super().process_weights_after_loading(layer)
        for loader in self._loaders.values():
            loader.is_closed = True

    def arranged(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """Converts a loaded weight [experts, out, in] for grouped products: [experts, in, out]."""
        if self.settings.use_nz:
            return arrange_weight(parameter, use_nz=True)
        return transposed_in_memory(parameter)

    def _check_loaded(self, layer: RoutedExperts) -> None:
        missing = [
            text
            for name, loader in self._loaders.items()
            if (text := loader.missing(layer.local_num_experts, SHARDS[name.partition("_")[0]]))
        ]
        require_loaded(self._prefix, self.scheme, missing)
        for name, loader in self._loaders.items():
            loader.require_agreement()
            if name.endswith("weight_offset") and self.scheme.is_symmetric:
                require_symmetric(self._prefix, self.scheme, name, layer.get_parameter(name))


def loaded(layer: torch.nn.Module, name: str) -> torch.Tensor:
    """A parameter of the layer as a plain tensor."""
    return layer.get_parameter(name).detach()
