"""Quantized linear layers equal an integer definition in plain torch, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch_npu
from torch import Tensor
from vllm.config import VllmConfig
from vllm.model_executor.layers.activation import GeluAndMul, SiluAndMul
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from vllm_davinci.core.checkpoint.load_errors import describe_failure, require_norm_biases
from vllm_davinci.core.components import fused_ops
from vllm_davinci.core.errors import CheckpointError, DeviceError, UnsupportedFeatureError
from vllm_davinci.core.layers.linear import NPUUnquantizedLinearMethod
from vllm_davinci.core.layers.norm import NPURMSNorm
from vllm_davinci.core.layers.quantized_activation import QuantizedActivation, map_rows
from vllm_davinci.core.quantization.config import AscendQuantizationConfig
from vllm_davinci.core.quantization.description import QuantDescription
from vllm_davinci.core.quantization.resolve_outputs import resolve_outputs
from vllm_davinci.core.quantization.tensors import bits_from_float, float_from_bits
from vllm_davinci.core.registration import register
from vllm_davinci_testing.operators.reference import (
    dynamic_quant,
    dynamic_quant_in_launch,
    static_quant,
)

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
TYPES = pytest.mark.parametrize("kind", ["W8A8", "W8A8_DYNAMIC"])
IN, OUT = 64, 48


@pytest.fixture(autouse=True)
def ready(one_rank: None) -> None:
    register()


# --- the definition ------------------------------------------------------------------------------


@dataclass
class Exported:
    """One linear layer of a checkpoint, in the format's names, shapes and dtypes."""

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
        """fp32, before rounding to the model's dtype."""
        values = self.sums(integers).float() * self["weight_scale"].float().flatten()
        values = values * scale[:, None]
        return values if bias is None else values + bias.float()


# --- layers under test ---------------------------------------------------------------------------


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
    x[rows // 2] = 0  # a row without a range
    return x


LAYERS = pytest.mark.parametrize(
    "layer", [ReplicatedLinear, ColumnParallelLinear, RowParallelLinear]
)


@DTYPES
@LAYERS
def test_static_layers_equal_the_integer_definition(layer: type[LinearBase], dtype: torch.dtype):
    export = Exported.make("W8A8", OUT, IN, dtype)
    made = single("W8A8", dtype, layer)
    fill(made, export)
    prepare(made)
    x = inputs(dtype) * 3  # some values leave the range
    assert torch.equal(made(x.npu()).cpu(), export.static(x))


@DTYPES
@LAYERS
def test_dynamic_layers_equal_the_integer_definition(layer: type[LinearBase], dtype: torch.dtype):
    export = Exported.make("W8A8_DYNAMIC", OUT, IN, dtype)
    made = single("W8A8_DYNAMIC", dtype, layer)
    fill(made, export)
    prepare(made)
    x = inputs(dtype)
    assert torch.equal(made(x.npu()).cpu(), export.dynamic(x))
    batched = x.view(3, 3, IN)
    assert torch.equal(made(batched.npu()).cpu(), export.dynamic(x).view(3, 3, OUT))


def test_a_dynamic_layer_adds_its_float_bias_after_scaling():
    dtype = torch.bfloat16
    export = Exported.make("W8A8_DYNAMIC", OUT, IN, dtype)
    made = build(
        ReplicatedLinear, IN, OUT, bias=True, kinds={"p": "W8A8_DYNAMIC"}, prefix="p",
        params_dtype=dtype,
    )  # fmt: skip
    fill(made, export)
    bias = torch.randn(OUT).to(dtype)
    made.bias.data.copy_(bias)
    prepare(made)
    x = inputs(dtype)
    assert torch.equal(made(x.npu()).cpu(), export.dynamic(x, bias))


@TYPES
def test_fused_projections_equal_their_parts(kind: str):
    dtype = torch.bfloat16
    kinds = {f"attn.{name}": kind for name in ("q_proj", "k_proj", "v_proj")}
    made = build(
        QKVParallelLinear, IN, 16, 4, 2, kinds=kinds, prefix="attn.qkv_proj", params_dtype=dtype
    )
    exports = {
        name: Exported.make(kind, heads * 16, IN, dtype, seed)
        for seed, (name, heads) in enumerate({"q": 4, "k": 2, "v": 2}.items())
    }
    for name, export in exports.items():
        fill(made, export, name)
    prepare(made)
    x = inputs(dtype)
    parts = [
        export.static(x) if kind == "W8A8" else export.dynamic(x) for export in exports.values()
    ]
    assert torch.equal(made(x.npu()).cpu(), torch.cat(parts, -1))


@TYPES
def test_tokens_do_not_depend_on_their_neighbours(kind: str):
    dtype = torch.bfloat16
    made = single(kind, dtype)
    fill(made, Exported.make(kind, OUT, IN, dtype))
    prepare(made)
    x = inputs(dtype)
    sane = made(x.npu()).cpu()
    x[3, 7], x[5] = float("nan"), float("inf")
    disturbed = made(x.npu()).cpu()
    others = [0, 1, 2, 4, 6, 7, 8]
    assert torch.equal(disturbed[others], sane[others])
    if kind == "W8A8_DYNAMIC":  # the token's own scale carries it on
        assert not disturbed[[3, 5]].isfinite().any()


def test_the_bias_of_a_row_parallel_layer_is_added_on_one_rank():
    dtype = torch.bfloat16
    export = Exported.make("W8A8", OUT, IN, dtype)
    x = inputs(dtype)
    made = single("W8A8", dtype, RowParallelLinear)
    fill(made, export)
    made.tp_rank = 1
    prepare(made)
    on_second_rank = made.quant_method.apply(made, x.npu()).cpu()
    assert torch.equal(on_second_rank, export.static(x, adds_bias=False))
    made.tp_rank = 0
    assert torch.equal(prepare(made).quant_method.apply(made, x.npu()).cpu(), export.static(x))


def test_a_column_parallel_layer_adds_the_bias_on_every_rank():
    export = Exported.make("W8A8", OUT, IN, torch.bfloat16)
    made = single("W8A8", torch.bfloat16, ColumnParallelLinear)
    fill(made, export)
    made.tp_rank = 1
    x = inputs(torch.bfloat16)
    assert torch.equal(prepare(made)(x.npu()).cpu(), export.static(x))


@DTYPES
def test_scales_may_come_as_bits_or_as_floats(dtype: torch.dtype):
    export = Exported.make("W8A8", OUT, IN, dtype)
    x = inputs(dtype)
    expected = export.static(x)
    deq_scale = export["deq_scale"]
    is_bits = deq_scale.dtype == torch.int64
    export.tensors["deq_scale"] = (
        float_from_bits(deq_scale) if is_bits else bits_from_float(deq_scale)
    )
    made = single("W8A8", dtype)
    fill(made, export)
    assert torch.equal(prepare(made)(x.npu()).cpu(), expected)


def test_bits_of_floats_are_the_format_s_and_go_back():
    values = torch.tensor([1.0, -2.5, 3e-5, 0.0])
    bits = bits_from_float(values)
    assert bits.tolist()[:2] == [0x3F800000, 0xC0200000]
    assert torch.equal(float_from_bits(bits), values)
    signed = values.view(torch.int32).long()  # some exporters extend the sign
    assert torch.equal(float_from_bits(signed), values)


# --- activations that stay integers ---------------------------------------------------------------


def resolve(run: Callable[[], object], *modules: torch.nn.Module) -> None:
    """What the model runner does after loading, with `run` as the dummy run."""
    resolve_outputs(torch.nn.ModuleList(modules), run)


def in_order(layers: list[torch.nn.Module], x: Tensor) -> Tensor:
    for layer in layers:
        x = layer(x)
    return x


def mlp(
    gate: str, down: str, dtype: torch.dtype, inter: int = 96
) -> tuple[LinearBase, LinearBase, list[Exported]]:
    kinds = {"mlp.gate_proj": gate, "mlp.up_proj": gate, "mlp.down_proj": down}
    gate_up = build(
        MergedColumnParallelLinear, IN, [inter, inter], kinds=kinds, prefix="mlp.gate_up_proj",
        params_dtype=dtype,
    )  # fmt: skip
    down_proj = build(
        RowParallelLinear, inter, IN, kinds=kinds, prefix="mlp.down_proj", params_dtype=dtype
    )
    exports = [Exported.make(gate, inter, IN, dtype, seed) for seed in (1, 2)]
    exports.append(Exported.make(down, IN, inter, dtype, 3))
    fill(gate_up, exports[0], 0)
    fill(gate_up, exports[1], 1)
    fill(down_proj, exports[2])
    return prepare(gate_up), prepare(down_proj), exports


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
        with pytest.raises(UnsupportedFeatureError, match="an activation that is kept as integers"):
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


def test_operators_compute_in_the_dummy_run_what_they_always_do():
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


class DynamicNorm:
    """A provider of operators that has only the quantizing norm, composed of torch_npu's."""

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
    """The norm that quantizes with a given scale, composed of torch_npu's."""

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
    """Inputs, and what the norm is of them, with the sum."""
    x = inputs(torch.bfloat16).npu()
    residual = x.flip(0)
    values, _, total = torch_npu.npu_add_rms_norm(x, residual, norm.weight, norm.variance_epsilon)
    return (x, residual), (values, total)


@pytest.mark.parametrize("is_mlp", [False, True], ids=["one_layer", "mlp"])
def test_a_norm_quantizes_for_a_dynamic_layer(
    is_mlp: bool, norm: NPURMSNorm, dynamic_norm: DynamicNorm
):
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
def test_a_norm_that_anything_else_reads_returns_floats(
    kind: str, norm: NPURMSNorm, dynamic_norm: DynamicNorm, static_norm: StaticNorm
):
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
    resolve(lambda: norm(*x), norm)  # nothing reads it
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
def test_readers_that_disagree_get_floats(
    other: str, norm: NPURMSNorm, static_norm: StaticNorm, dynamic_norm: DynamicNorm
):
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
def test_rows_of_a_norm_move_as_integers(
    kind: str, norm: NPURMSNorm, static_norm: StaticNorm, dynamic_norm: DynamicNorm
):
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


# --- layers that stay floats ---------------------------------------------------------------------


def test_a_float_layer_of_a_quantized_model_is_an_ordinary_one():
    made = build(ReplicatedLinear, IN, OUT, kinds={"p": "FLOAT"}, prefix="p")
    assert type(made.quant_method) is NPUUnquantizedLinearMethod


def test_layers_without_an_entry_are_floats_and_named_once(monkeypatch: pytest.MonkeyPatch):
    config = config_of({"p": "W8A8"})
    for prefix in ("lm_head", "visual.proj"):
        with torch.device("npu", 0):
            made = ReplicatedLinear(IN, OUT, quant_config=config, prefix=prefix)
        assert type(made.quant_method) is NPUUnquantizedLinearMethod
    told: list[str] = []
    monkeypatch.setattr(
        "vllm_davinci.core.quantization.config.logger.warning",
        lambda text, *args: told.append(text % args),
    )
    config.log_missing()
    config.log_missing()
    assert len(told) == 1
    assert "lm_head, visual.proj" in told[0]


@TYPES
@DTYPES
def test_the_projection_after_mla_becomes_floats(kind: str, dtype: torch.dtype):
    made = build(
        ColumnParallelLinear, IN, OUT, kinds={"attn.kv_b_proj": kind}, prefix="attn.kv_b_proj",
        params_dtype=dtype,
    )  # fmt: skip
    export = Exported.make(kind, OUT, IN, dtype)
    fill(made, export)
    prepare(made)
    if kind == "W8A8":
        deq_scale = export["deq_scale"]
        if deq_scale.dtype == torch.int64:
            deq_scale = float_from_bits(deq_scale)
        scale = (deq_scale / export["input_scale"]).unsqueeze(1)
    else:
        scale = export["weight_scale"]
    weight = (export["weight"].float() * scale).to(dtype)
    assert torch.equal(made.weight.cpu(), weight)
    assert [name for name, _ in made.named_parameters()] == ["weight"]
    x = inputs(dtype)
    torch.testing.assert_close(made(x.npu()).cpu(), x @ weight.t(), atol=0.05, rtol=0.05)


@pytest.mark.parametrize("with_residual", [False, True])
def test_a_norm_adds_the_bias_that_the_checkpoint_has(
    with_residual: bool, vllm_config: VllmConfig, device: torch.device
):
    name = "model.layers.0.input_layernorm.bias"
    vllm_config.quant_config = AscendQuantizationConfig(QuantDescription.parse({name: "W8A8"}))
    with device:
        biased, plain = RMSNorm(IN, dtype=torch.bfloat16), RMSNorm(IN, dtype=torch.bfloat16)
    bias = torch.randn(IN).bfloat16()
    biased.bias.weight_loader(biased.bias, bias)
    x = inputs(torch.bfloat16).npu()
    residual = x.flip(0) if with_residual else None
    with_bias, without = biased(x, residual), plain(x, residual)
    if with_residual:
        assert torch.equal(with_bias[1], without[1])
        with_bias, without = with_bias[0], without[0]
    assert torch.equal(with_bias.cpu(), without.cpu() + bias)


def test_a_norm_whose_bias_is_described_and_did_not_come_is_named(
    vllm_config: VllmConfig, device: torch.device
):
    description = QuantDescription.parse(dict.fromkeys(("a.norm.bias", "b.norm.bias"), "W8A8"))
    vllm_config.quant_config = AscendQuantizationConfig(description)
    with device:
        model = torch.nn.ModuleDict(
            {name: torch.nn.ModuleDict({"norm": RMSNorm(IN)}) for name in ("a", "b", "c")}
        )
    bias = model["a"]["norm"].bias
    bias.weight_loader(bias, torch.ones(IN))
    with pytest.raises(CheckpointError, match=r"entry for b\.norm\.bias, and no file"):
        require_norm_biases(model, description)
    bias = model["b"]["norm"].bias
    bias.weight_loader(bias, torch.ones(IN))
    require_norm_biases(model, description)


def test_norms_of_other_checkpoints_have_no_bias(vllm_config: VllmConfig):
    vllm_config.quant_config = config_of({"p": "W8A8"})
    assert [name for name, _ in RMSNorm(IN).named_parameters()] == ["weight"]


# --- bad checkpoints -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *(("W8A8", name) for name in ("weight", "quant_bias", "input_scale", "input_offset")),
        ("W8A8", "deq_scale"),
        *(("W8A8_DYNAMIC", name) for name in ("weight", "weight_scale", "weight_offset")),
    ],
)
def test_a_missing_tensor_is_named_at_load(kind: str, name: str):
    made = single(kind, torch.bfloat16)
    export = Exported.make(kind, OUT, IN, torch.bfloat16)
    del export.tensors[name]
    fill(made, export)
    with pytest.raises(CheckpointError, match=rf"lacks p\.{name}.*check-model"):
        prepare(made)


def test_a_missing_part_of_a_fused_layer_is_named_at_load():
    kinds = {f"attn.{name}": "W8A8_DYNAMIC" for name in ("q_proj", "k_proj", "v_proj")}
    made = build(QKVParallelLinear, IN, 16, 4, 2, kinds=kinds, prefix="attn.qkv_proj")
    fill(made, Exported.make("W8A8_DYNAMIC", 64, IN, torch.float32), "q")
    fill(made, Exported.make("W8A8_DYNAMIC", 32, IN, torch.float32), "v")
    with pytest.raises(CheckpointError, match=r"attn\.qkv_proj\.weight \(part 'k'\)"):
        prepare(made)


@pytest.mark.parametrize("name", ["weight", "quant_bias", "deq_scale", "input_scale"])
@pytest.mark.parametrize("layer", [ReplicatedLinear, ColumnParallelLinear, RowParallelLinear])
def test_a_wrong_shape_is_named_at_load(name: str, layer: type[LinearBase]):
    made = single("W8A8", torch.bfloat16, layer)
    export = Exported.make("W8A8", OUT, IN, torch.bfloat16)
    export.tensors[name] = torch.cat([export[name], export[name]])[: export[name].shape[0] + 1]
    if layer is ColumnParallelLinear and name != "input_scale":
        export.tensors[name] = export[name][:-2]  # a column-parallel layer takes a slice
    with pytest.raises(CheckpointError, match=rf"p\.{name}.*has shape .*config\.json"):
        fill(made, export)


@pytest.mark.parametrize(
    ("kind", "name", "stored", "allowed"),
    [
        ("W8A8", "weight", torch.bfloat16, "int8"),
        ("W8A8", "weight", torch.uint8, "int8"),
        ("W8A8_DYNAMIC", "weight_scale", torch.int8, "a floating dtype"),
        ("W8A8", "input_scale", torch.int8, "a floating dtype"),
        ("W8A8", "input_offset", torch.int64, "int8 or int32 or float16 or bfloat16 or float32"),
        ("W8A8", "deq_scale", torch.bfloat16, "float32 or int64"),
        ("W8A8", "quant_bias", torch.float32, "int32"),
    ],
)
def test_a_wrong_dtype_is_named_at_load(kind: str, name: str, stored: torch.dtype, allowed: str):
    made = single(kind, torch.bfloat16)
    export = Exported.make(kind, OUT, IN, torch.bfloat16)
    export.tensors[name] = export[name].to(stored)
    seen = str(stored).removeprefix("torch.")
    with pytest.raises(
        CheckpointError, match=rf"p\.{name} holds {seen} .* must hold {allowed}: .*check-model"
    ):
        fill(made, export)


def test_input_scales_that_differ_between_parts_are_an_error():
    kinds = {"mlp.gate_proj": "W8A8", "mlp.up_proj": "W8A8"}
    made = build(MergedColumnParallelLinear, IN, [32, 32], kinds=kinds, prefix="mlp.gate_up_proj")
    export = Exported.make("W8A8", 32, IN, torch.float32)
    fill(made, export, 0)
    export.tensors["input_scale"] = export["input_scale"] * 2
    fill(made, export, 1)
    with pytest.raises(CheckpointError, match="input_scale differs between its parts"):
        prepare(made)


@pytest.mark.parametrize(
    ("types", "told"), [({"a.p.weight": "FLOAT"}, "is FLOAT"), ({}, "has no entry")]
)
def test_a_tensor_without_a_place_is_named_with_its_layers_entry(types: dict[str, str], told: str):
    error = KeyError("p.weight_scale")
    text = describe_failure("hub/model", QuantDescription.parse(types), error)
    assert text is not None
    assert f"has p.weight_scale, for which the model has no place: p.weight {told}" in text
    assert describe_failure("hub/model", QuantDescription(types), ValueError("other")) is None


def test_asymmetric_weights_are_refused():
    made = single("W8A8_DYNAMIC", torch.bfloat16)
    export = Exported.make("W8A8_DYNAMIC", OUT, IN, torch.bfloat16)
    export.tensors["weight_offset"][3] = 4
    fill(made, export)
    with pytest.raises(UnsupportedFeatureError, match=r"p\.weight_offset is not zero"):
        prepare(made)


def test_a_quantized_lm_head_is_refused():
    with pytest.raises(UnsupportedFeatureError, match=r"lm_head\.weight.*FLOAT"):
        ParallelLMHead(64, 32, quant_config=config_of({"lm_head": "W8A8"}), prefix="lm_head")


def test_the_nz_layout_is_asked_for_and_its_failure_explained(vllm_config: VllmConfig):
    vllm_config.additional_config = {"enable_weight_nz_layout": True}
    made = single("W8A8_DYNAMIC", torch.bfloat16)
    fill(made, Exported.make("W8A8_DYNAMIC", OUT, IN, torch.bfloat16))
    with pytest.raises(DeviceError, match=r"enable_weight_nz_layout.*Remove the key"):
        prepare(made)
