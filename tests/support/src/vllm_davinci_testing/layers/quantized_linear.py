"""Quantized linear layers as vLLM builds them, with random weights and expected results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from vllm.model_executor.layers.linear import LinearBase, ReplicatedLinear

from vllm_davinci.core.quantization.config import AscendQuantizationConfig
from vllm_davinci.core.quantization.formats.modelslim import QuantDescription
from vllm_davinci.core.quantization.tensors import bits_from_float
from vllm_davinci.operators.quantization import dynamic_quant, static_quant

IN, OUT = 64, 48

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
TYPES = pytest.mark.parametrize("kind", ["W8A8", "W8A8_DYNAMIC"])


@dataclass
class Exported:
    """A checkpoint's linear layer, in the format's names, shapes and dtypes."""

    tensors: dict[str, Tensor]

    @classmethod
    def make(
        cls, kind: str, out: int, columns: int, dtype: torch.dtype, seed: int = 0, parts: int = 1
    ) -> Exported:
        g = torch.Generator().manual_seed(seed)
        weight_scale = torch.rand(out, 1, generator=g) * 1e-3 + 1e-4
        weight = torch.randint(-128, 128, (out, columns), generator=g, dtype=torch.int8)
        if kind == "W8A8_DYNAMIC":
            offset = torch.zeros(out, 1)
            return cls({"weight": weight, "weight_scale": weight_scale, "weight_offset": offset})
        deq_scale = (torch.rand(out, generator=g) + 0.5) * 3e-5
        tensors = {
            "weight": weight,
            "quant_bias": torch.randint(-3000, 3000, (out,), generator=g, dtype=torch.int32),
            "input_scale": torch.tensor([0.0314]),
            "input_offset": torch.tensor([-7.0]),
            "deq_scale": deq_scale if dtype == torch.bfloat16 else bits_from_float(deq_scale),
        }
        return cls(tensors)

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def sums(self, integers: Tensor) -> Tensor:
        return (integers.long() @ self["weight"].long().t()).int()

    def static(self, x: Tensor, adds_bias: bool = True) -> Tensor:
        integers = static_quant(x, self["input_scale"].float(), self["input_offset"].float())
        sums = self.sums(integers)
        deq_scale = self["deq_scale"]
        if deq_scale.dtype == torch.int64:
            deq_scale = deq_scale.int().view(torch.float32)
        total = sums + self["quant_bias"] if adds_bias else sums
        return (total.float() * deq_scale).to(x.dtype)

    def dynamic(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        integers, scale = dynamic_quant(x)
        return self.scaled(integers, scale, bias).to(x.dtype)

    def scaled(self, integers: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
        """Returns fp32 values, not yet rounded to the model's dtype."""
        values = self.sums(integers).float() * self["weight_scale"].float().flatten()
        values = values * scale[:, None]
        return values if bias is None else values + bias.float()


def config_of(types: dict[str, str]) -> AscendQuantizationConfig:
    return AscendQuantizationConfig(
        QuantDescription.parse({f"{name}.weight": kind for name, kind in types.items()})
    )


def build(
    layer: type[LinearBase], *args: Any, kinds: dict[str, str], prefix: str, **kwargs: Any
) -> LinearBase:
    kwargs = {"bias": False, "return_bias": False, **kwargs}
    with torch.device("npu", 0):
        made: LinearBase = layer(*args, quant_config=config_of(kinds), prefix=prefix, **kwargs)
    return made


def fill(layer: LinearBase, export: Exported, *shard: Any) -> None:
    for name, tensor in export.tensors.items():
        parameter = layer.get_parameter(name)
        parameter.weight_loader(parameter, tensor, *shard)


def prepare(layer: LinearBase) -> LinearBase:
    layer.quant_method.process_weights_after_loading(layer)
    return layer


def single(kind: str, dtype: torch.dtype, layer: type[LinearBase] = ReplicatedLinear) -> LinearBase:
    return build(layer, IN, OUT, kinds={"p": kind}, prefix="p", params_dtype=dtype)


def inputs(dtype: torch.dtype, rows: int = 9, columns: int = IN) -> Tensor:
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(5)).to(dtype)
    x[rows // 2] = 0  # all zeros, so no range
    return x
