"""After loading, it is decided once which layers return integer activations."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_npu
from torch import Tensor
from vllm.config import VllmConfig
from vllm.model_executor.layers.activation import GeluAndMul, SiluAndMul
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import LinearBase

from vllm_davinci.core.components import fused_ops
from vllm_davinci.core.errors import UnsupportedFeatureError
from vllm_davinci.core.layers.norm import NPURMSNorm
from vllm_davinci.core.layers.quantized_activation import QuantizedActivation, map_rows
from vllm_davinci.core.quantization.resolve_outputs import OutputPlan, step_sizes
from vllm_davinci.operators.quantization import dynamic_quant, dynamic_quant_in_launch
from vllm_davinci_testing.layers.quantized_linear import (
    DTYPES,
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


def resolved_mlp(dtype: torch.dtype) -> tuple[LinearBase, LinearBase, list[Exported]]:
    gate_up, down_proj, exports = mlp("W8A8_DYNAMIC", "W8A8_DYNAMIC", dtype)
    layers = [gate_up, SiluAndMul(), down_proj]
    resolve(lambda: in_order(layers, inputs(dtype).npu()), *layers)
    return gate_up, down_proj, exports


@DTYPES
def test_a_dynamic_mlp_keeps_integers_and_equals_its_definition(dtype: torch.dtype):
    gate_up, down_proj, exports = resolved_mlp(dtype)
    x = inputs(dtype)
    projected = gate_up(x.npu())
    assert isinstance(projected, QuantizedActivation) and projected.integers.dtype == torch.int32
    activated = SiluAndMul()(projected)
    assert isinstance(activated, QuantizedActivation) and activated.integers.dtype == torch.int8
    assert activated.shape == (len(x), 96) and activated.dtype == dtype
    actual = down_proj(activated).cpu()

    integers, scale = dynamic_quant(x)
    gate, up = (export.scaled(integers, scale) for export in exports[:2])
    gated = torch.nn.functional.silu(gate) * up
    again, scale = dynamic_quant_in_launch(gated)
    assert torch.equal(activated.integers.cpu(), again)
    expected = exports[2].scaled(again, scale).to(dtype)
    assert torch.equal(actual, expected)


def test_other_operators_that_read_or_write_integers_are_refused():
    gate_up, _, _ = resolved_mlp(torch.bfloat16)
    x = inputs(torch.bfloat16).npu()
    projected = gate_up(x)
    values = torch.zeros(projected.shape, dtype=projected.dtype, device=projected.device)
    for use in (
        lambda: projected + 0,
        lambda: projected[:2],
        lambda: projected.mul_(2),
        lambda: values.mul_(projected),
        lambda: torch.add(values, 1, out=projected),
        lambda: torch._foreach_add_([projected], 1),
        lambda: SiluAndMul()(projected) + 0,
    ):
        with pytest.raises(
            UnsupportedFeatureError, match="an activation that is stored as integers"
        ):
            use()
    assert not values.any()


@pytest.mark.parametrize(
    "use",
    [
        lambda projected: GeluAndMul()(projected),
        lambda projected: projected[:, :96] + 0,
        lambda projected: projected.mul_(2),
        lambda projected: (SiluAndMul()(projected), projected + 0),
        lambda projected: SiluAndMul()(projected) + 0,
        lambda projected: SiluAndMul()(projected),
        lambda projected: projected,
    ],
    ids=["gelu", "slice", "write", "also_read", "activated_read", "activated_unread", "unread"],
)
def test_a_projection_that_anything_else_reads_returns_floats(use: Callable[[Tensor], object]):
    dtype = torch.bfloat16
    gate_up, _, exports = mlp("W8A8_DYNAMIC", "W8A8_DYNAMIC", dtype)
    x = inputs(dtype)
    plain = torch.cat([export.dynamic(x) for export in exports[:2]], -1)
    resolve(lambda: use(gate_up(x.npu())), gate_up)
    again = gate_up(x.npu())
    assert type(again) is torch.Tensor
    assert torch.equal(again.cpu(), plain)


def test_operators_compute_the_same_in_the_dummy_run():
    gate_up, down_proj, _ = mlp("W8A8_DYNAMIC", "W8A8_DYNAMIC", torch.bfloat16)
    x = inputs(torch.bfloat16).npu()
    layers = [gate_up, SiluAndMul(), down_proj]
    expected, seen = in_order(layers, x), []
    resolve(lambda: seen.append(in_order(layers, x)), *layers)
    assert torch.equal(seen[0], expected)


def test_a_dummy_run_that_fails_leaves_floats():
    gate_up, _, _ = mlp("W8A8_DYNAMIC", "W8A8_DYNAMIC", torch.bfloat16)

    def run() -> None:
        SiluAndMul()(gate_up(inputs(torch.bfloat16).npu()))
        raise RuntimeError("no memory")

    with pytest.raises(RuntimeError, match="no memory"):
        resolve(run, gate_up)
    assert type(gate_up(inputs(torch.bfloat16).npu())) is torch.Tensor


def test_an_output_read_differently_by_some_steps_is_float_in_all(caplog: pytest.LogCaptureFixture):
    gate_up, down_proj, _ = mlp("W8A8_DYNAMIC", "W8A8_DYNAMIC", torch.bfloat16)
    x = inputs(torch.bfloat16).npu()
    layers = [gate_up, SiluAndMul(), down_proj]
    plan = OutputPlan(torch.nn.ModuleList(layers))
    assert not plan.resolve([lambda: in_order(layers, x)] * 2)
    plan.check([lambda: in_order(layers, x)])
    assert isinstance(gate_up(x), QuantizedActivation) and not caplog.records
    with caplog.at_level("WARNING"):
        plan.check([lambda: gate_up(x).new_empty(3), lambda: in_order(layers, x)])
    assert "read as floats what other steps read as integers: 0." in caplog.text
    assert type(gate_up(x)) is torch.Tensor
    plan.check([lambda: in_order(layers, x)])
    assert type(gate_up(x)) is torch.Tensor


@pytest.mark.parametrize(
    ("tensor", "data", "most", "sizes"),
    [
        (1, 1, 8192, [1, 2]),
        (2, 1, 8192, [1, 3, 256, 257]),  # sequence parallel
        (2, 2, 8192, [1, 3, 17, 256, 257]),
        (2, 2, 64, [1, 3, 17, 64]),
    ],
)
def test_dummy_runs_have_the_sizes_of_all_kinds_of_steps(vllm_config, tensor, data, most, sizes):
    vllm_config.parallel_config.tensor_parallel_size = tensor
    vllm_config.parallel_config.data_parallel_size = data
    vllm_config.scheduler_config.max_num_batched_tokens = most
    vllm_config.scheduler_config.max_num_seqs = 16
    vllm_config.additional_config = {"sequence_parallel": {"enabled": True}}
    assert step_sizes(vllm_config) == sizes


@pytest.mark.parametrize(("gate", "down"), [("W8A8", "W8A8_DYNAMIC"), ("W8A8_DYNAMIC", "W8A8")])
def test_an_mlp_of_several_types_rounds_between_its_layers(gate: str, down: str):
    dtype = torch.bfloat16
    gate_up, down_proj, exports = mlp(gate, down, dtype)
    x = inputs(dtype)
    run: Callable[[Exported, Tensor], Tensor] = (
        Exported.static if gate == "W8A8" else Exported.dynamic
    )
    layers = [gate_up, SiluAndMul(), down_proj]
    resolve(lambda: in_order(layers, x.npu()), *layers)
    projected = gate_up(x.npu())
    assert torch.equal(projected.cpu(), torch.cat([run(e, x) for e in exports[:2]], -1))
    activated = SiluAndMul()(projected)
    last = Exported.static if down == "W8A8" else Exported.dynamic
    assert torch.equal(down_proj(activated).cpu(), last(exports[2], activated.cpu()))


# Norms return integers if only quantized layers read them, otherwise floats.


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
