"""compressed-tensors: the parts that vLLM implements for other devices only."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from compressed_tensors.quantization import (
    QuantizationConfig,
    QuantizationScheme,
    QuantizationStrategy,
)
from compressed_tensors.utils.match import is_match
from pydantic import ValidationError
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, register_weight_loader_v2_supported_method
from vllm.model_executor.layers.quantization import register_quantization_config
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
from vllm_davinci.core.quantization.format import FORMATS, Checkpoint, Format, Weights
from vllm_davinci.core.quantization.formats.fp8_block import Fp8Weights, NPUFp8Config
from vllm_davinci.core.quantization.formats.packed_compressed_tensors import (
    PackedCompressedConfig,
    PackedCompressedTensors,
)
from vllm_davinci.core.quantization.quant_matmul import require_sizes
from vllm_davinci.core.quantization.scheme import find_scheme
from vllm_davinci.core.quantization.tensors import dtype_name
from vllm_davinci.core.weight_files.files import StoredTensor
from vllm_davinci.core.weight_files.issues import CheckReport
from vllm_davinci.core.weight_files.layer_names import shortened

_EXPERT = re.compile(r"\.experts\.\d+\.")
_LINEAR = torch.nn.Linear(1, 1, device="meta")  # stands for a layer when vLLM looks up its scheme


@FORMATS.register
@dataclass(frozen=True, kw_only=True)
class CompressedTensors(Format):
    """int8 weights and activations, described by vLLM's configuration of the format.

    content: config.json's section
    """

    content: Mapping[str, Any] = field(default_factory=dict)

    name = NAME

    @classmethod
    def find(cls, checkpoint: Checkpoint, quantization: str | None) -> CompressedTensors | None:
        """The format; None for packed weights and fp8, which other methods load."""
        content = checkpoint.quantization
        if content.get("quant_method") != NAME:
            return None
        if PackedCompressedTensors.of(content) is not None or Fp8Weights.of(content) is not None:
            return None
        return cls(types={}, source="config.json", content=content)

    def converted(self, weights: Weights, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        """Returns the tensors unchanged: vLLM's layers load them."""
        yield from weights

    def check(self, tensors: Mapping[str, StoredTensor], report: CheckReport) -> None:
        """Checks that every quantized layer's scheme is supported and its tensors exist."""
        try:
            config = QuantizationConfig.model_validate(dict(self.content))
        except (ValidationError, NotImplementedError) as error:
            told = error.errors()[0] if isinstance(error, ValidationError) else error
            report.problem("config.json", f"its {NAME} section cannot be read: {told}")
            return
        refused: dict[str, list[str]] = {}
        for name, weight in tensors.items():
            prefix, _, last = name.rpartition(".")
            is_plain = weight.dtype.is_floating_point and weight.dtype.itemsize > 1
            if is_plain or last not in ("weight", "weight_packed"):
                continue
            scheme = _scheme_of(prefix, config.config_groups.values(), config.ignore or [])
            if scheme is None:
                refused.setdefault("no group of config.json has it", []).append(name)
                continue
            is_expert = bool(_EXPERT.search(prefix))
            reason = refusal(scheme.weights, scheme.input_activations, is_expert)
            if reason is None and weight.dtype != torch.int8:
                reason = f"it holds {dtype_name(weight.dtype)} and its scheme says int8"
            if reason is not None:
                refused.setdefault(f"{reason}. {WAY_OUT}", []).append(name)
            elif len(weight.shape) != 2:
                report.problem(name, f"has shape {list(weight.shape)} and must be a matrix")
            else:
                _check_beside(prefix, weight.shape[0], scheme, tensors, report)
        for reason, names in refused.items():
            report.problem(shortened(sorted(names)), reason)


@dataclass(frozen=True)
class _Expected:
    """A tensor that belongs to an int8 weight, with its allowed shapes."""

    name: str
    shapes: tuple[tuple[int, ...], ...]
    is_float: bool = True


def _scheme_of(
    prefix: str, schemes: Iterable[QuantizationScheme], ignore: list[str]
) -> QuantizationScheme | None:
    return next((one for one in schemes if is_match(prefix, _LINEAR, one.targets, ignore)), None)


def _check_beside(
    prefix: str,
    out_features: int,
    scheme: QuantizationScheme,
    tensors: Mapping[str, StoredTensor],
    report: CheckReport,
) -> None:
    is_channel = scheme.weights.strategy == QuantizationStrategy.CHANNEL
    one: tuple[tuple[int, ...], ...] = ((1,), ())
    expected = [_Expected("weight_scale", ((out_features, 1),) if is_channel else one)]
    if not scheme.input_activations.dynamic:
        expected.append(_Expected("input_scale", one))
        if not scheme.input_activations.symmetric:
            expected.append(_Expected("input_zero_point", one, is_float=False))
    for each in expected:
        name = f"{prefix}.{each.name}"
        tensor = tensors.get(name)
        if tensor is None:
            report.problem(name, "is missing: its scheme in config.json needs it")
        elif tensor.shape not in each.shapes:
            report.problem(
                name, f"has shape {list(tensor.shape)} and must have {list(each.shapes[0])}"
            )
        elif tensor.dtype.is_floating_point != each.is_float:
            kind = "a floating dtype" if each.is_float else "integers"
            report.problem(name, f"holds {dtype_name(tensor.dtype)} and must hold {kind}")


@register_quantization_config(NAME)
class NPUCompressedTensorsConfig(CompressedTensorsConfig):
    """vLLM's configuration, with int8 experts and MLA's float weights."""

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        """Returns another configuration for packed weights and fp8, whose layers differ."""
        if PackedCompressedTensors.of(config) is not None:
            return PackedCompressedConfig.from_config(config)
        fp8 = Fp8Weights.of(config)
        return super().from_config(config) if fp8 is None else NPUFp8Config(fp8)

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
        """The method of int8 experts, or None for other experts."""
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
            scheme = find_scheme("W8A8_DYNAMIC", prefix)
            tensors = tuple(spec for spec in scheme.parameters if spec.name != "weight_offset")
            method: QuantizeMethodBase = scheme.experts(
                layer.moe_config, prefix, load_settings(), tensors
            )
            return method
        raise UnsupportedFeatureError(f"{prefix}: experts of {NAME} with {reason}. {WAY_OUT}.")


@register_weight_loader_v2_supported_method
class Int8LinearMethod(CompressedTensorsLinearMethod):
    """vLLM's method, for weights that this device's product supports.

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
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Raises UnsupportedFeatureError for weights that the product does not support."""
        require_sizes(self.prefix, input_size_per_partition, sum(output_partition_sizes))
        sizes = input_size_per_partition, output_partition_sizes
        super().create_weights(layer, *sizes, *args, **kwargs)


@register_weight_loader_v2_supported_method
class FloatsAtLoadMethod(CompressedTensorsLinearMethod):
    """int8 weights converted to weight * weight_scale, for absorbed matrices."""

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        # Already prepared by the kernel, with a scale per channel.
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
