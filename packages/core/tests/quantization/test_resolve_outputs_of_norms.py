"""Norms return integers if only quantized layers read them, otherwise floats."""

from typing import Any

import pytest
import torch
import torch_npu
from torch import Tensor
from vllm.config import VllmConfig
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import LinearBase

from vllm_davinci.core.components import fused_ops
from vllm_davinci.core.layers.norm import NPURMSNorm
from vllm_davinci.core.layers.quantized_activation import QuantizedActivation, map_rows
from vllm_davinci_testing.layers.quantized_linear import (
    IN,
    OUT,
    TYPES,
    Exported,
    config_of,
    fill,
    inputs,
    prepare,
    single,
)
from vllm_davinci_testing.layers.resolved_outputs import in_order, mlp, resolve

pytestmark = pytest.mark.usefixtures("registered")


class DynamicNorm:
    """A provider with only the quantizing norm, composed of torch_npu's operators."""

    calls = 0

    def __call__(self, x: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> Any:
        self.calls += 1
        normalized, _, total = torch_npu.npu_add_rms_norm(x, residual, weight, epsilon)
        return *torch_npu.npu_dynamic_quant(normalized), total


@pytest.fixture
def dynamic_norm(monkeypatch: pytest.MonkeyPatch) -> DynamicNorm:
    operator = DynamicNorm()
    monkeypatch.setitem(fused_ops._fused_ops, "add_rms_norm_dynamic_quant", operator)
    return operator


class StaticNorm:
    """The norm that quantizes with a given scale, composed of torch_npu's operators."""

    calls = 0

    def __call__(
        self, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None,
        scale: Tensor, offset: Tensor, epsilon: float,
    ) -> Any:  # fmt: skip
        self.calls += 1
        normalized, _, total = torch_npu.npu_add_rms_norm(x, residual, weight, epsilon)
        if bias is not None:
            normalized += bias
        return torch_npu.npu_quantize(normalized, scale, offset, torch.qint8, -1, True), total


@pytest.fixture
def static_norm(monkeypatch: pytest.MonkeyPatch) -> StaticNorm:
    operator = StaticNorm()
    monkeypatch.setitem(fused_ops._fused_ops, "add_rms_norm_quant", operator)
    return operator


@pytest.fixture
def norm(vllm_config: VllmConfig, device: torch.device) -> NPURMSNorm:
    with device:
        norm = RMSNorm(IN, dtype=torch.bfloat16)
    assert isinstance(norm, NPURMSNorm)
    torch.nn.init.normal_(norm.weight.data)
    return norm


def quantized_layer(kind: str, export: Exported | None = None) -> LinearBase:
    layer = single(kind, torch.bfloat16)
    fill(layer, export or Exported.make(kind, OUT, IN, torch.bfloat16))
    return prepare(layer)


def norm_and_values(norm: RMSNorm) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Returns (inputs, residual) and (their norm, their sum)."""
    x = inputs(torch.bfloat16).npu()
    residual = x.flip(0)
    values, _, total = torch_npu.npu_add_rms_norm(x, residual, norm.weight, norm.variance_epsilon)
    return (x, residual), (values, total)


@pytest.mark.parametrize("is_mlp", [False, True], ids=["one_layer", "mlp"])
def test_a_norm_quantizes_for_a_dynamic_layer(is_mlp, norm, dynamic_norm):
    if is_mlp:
        gate_up, down_proj, _ = mlp("W8A8_DYNAMIC", "W8A8_DYNAMIC", torch.bfloat16)
        layers = [gate_up, SiluAndMul(), down_proj]
    else:
        layers = [quantized_layer("W8A8_DYNAMIC")]
    x, (values, expected_total) = norm_and_values(norm)
    resolve(lambda: in_order(layers, norm(*x)[0]), norm, *layers)
    assert dynamic_norm.calls == 0
    for call in range(3):
        normalized, total = norm(*x)
        assert isinstance(normalized, QuantizedActivation)
        assert torch.equal(total, expected_total)
        assert torch.equal(in_order(layers, normalized), in_order(layers, values))
        assert dynamic_norm.calls == call + 1


@pytest.mark.parametrize("kind", ["W8A8", "W8A8_DYNAMIC", "FLOAT"])
def test_a_norm_that_anything_else_reads_returns_floats(kind, norm, dynamic_norm, static_norm):
    layer = prepare(single("FLOAT", torch.bfloat16)) if kind == "FLOAT" else quantized_layer(kind)
    x, (values, _) = norm_and_values(norm)

    def run() -> None:
        normalized, _ = norm(*x)
        layer(normalized)
        if kind != "FLOAT":
            _ = normalized[:2] + 0

    resolve(run, norm, layer)
    normalized, _ = norm(*x)
    assert type(normalized) is torch.Tensor and torch.equal(normalized, values)
    resolve(lambda: norm(*x), norm)  # no layer reads it
    assert type(norm(*x)[0]) is torch.Tensor
    assert dynamic_norm.calls == static_norm.calls == 0


@pytest.mark.parametrize("kind", ["W8A8", "W8A8_DYNAMIC"])
@pytest.mark.parametrize("has_bias", [False, True], ids=["no_bias", "bias"])
def test_a_norm_with_a_bias_quantizes_for_static_layers_only(
    kind: str, has_bias: bool, static_norm: StaticNorm, dynamic_norm: DynamicNorm,
    vllm_config: VllmConfig, device: torch.device,
):  # fmt: skip
    config = config_of({"p": kind})
    config.description.types["norm.bias"] = "W8A8"
    vllm_config.quant_config = config
    with device:
        norm = RMSNorm(IN, dtype=torch.bfloat16)
    vllm_config.quant_config = None
    x, (values, expected_total) = norm_and_values(norm)
    if has_bias:
        bias = torch.randn(IN).bfloat16()
        norm.bias.weight_loader(norm.bias, bias)
        values = values + bias.npu()
    layers = [quantized_layer(kind) for _ in range(2)]  # with equal scales
    resolve(lambda: [layer(norm(*x)[0]) for layer in layers], norm, *layers)
    for _ in range(3):
        normalized, total = norm(*x)
        assert torch.equal(total, expected_total)
        for layer in layers:
            assert torch.equal(layer(normalized), layer(values))
    is_static = kind == "W8A8"
    assert static_norm.calls == 3 * is_static
    assert dynamic_norm.calls == 3 * (not is_static and not has_bias)
    assert isinstance(normalized, QuantizedActivation) is (is_static or not has_bias)


@pytest.mark.parametrize("other", ["W8A8", "W8A8_DYNAMIC", "FLOAT"])
def test_disagreeing_readers_get_floats(other, norm, static_norm, dynamic_norm):
    x, (values, _) = norm_and_values(norm)
    first = Exported.make("W8A8", OUT, IN, torch.bfloat16)
    layers = [quantized_layer("W8A8", first)]
    if other == "FLOAT":
        layers.append(prepare(single("FLOAT", torch.bfloat16)))
    else:
        second = Exported.make(other, OUT, IN, torch.bfloat16)
        if other == "W8A8":
            second.tensors["input_scale"] = first["input_scale"] * 2
        layers.append(quantized_layer(other, second))

    def run() -> None:
        normalized, _ = norm(*x)
        for layer in layers:
            layer(normalized)

    resolve(run, norm, *layers)
    normalized, _ = norm(*x)
    assert type(normalized) is torch.Tensor and torch.equal(normalized, values)
    assert static_norm.calls == dynamic_norm.calls == 0


@TYPES
def test_rows_of_a_norm_move_as_integers(kind, norm, static_norm, dynamic_norm):
    x, (values, _) = norm_and_values(norm)
    layer = quantized_layer(kind)
    moved_dtypes: list[torch.dtype] = []

    def move(rows: Tensor) -> Tensor:
        moved_dtypes.append(rows.dtype)
        return rows.flip(0)[:-1]

    resolve(lambda: layer(map_rows(norm(*x)[0], move)), norm, layer)
    assert moved_dtypes == [torch.bfloat16]
    expected = layer(values.flip(0)[:-1])
    for _ in range(2):
        moved_dtypes.clear()
        moved = map_rows(norm(*x)[0], move)
        moved.record_stream(torch.npu.current_stream())
        assert moved.shape == (len(values) - 1, IN)
        assert torch.equal(layer(moved), expected)
        assert sorted(moved_dtypes, key=str) == sorted(
            [torch.int8, torch.float32] if kind == "W8A8_DYNAMIC" else [torch.int8], key=str
        )
    assert torch.equal(map_rows(values, move), values.flip(0)[:-1])
