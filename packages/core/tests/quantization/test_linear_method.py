"""Quantized linear layers equal an integer definition in plain torch, bit for bit."""

import pytest
import torch
import torch_npu
from vllm.config import VllmConfig
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
from vllm_davinci.core.errors import CheckpointError, DeviceError, UnsupportedFeatureError
from vllm_davinci.core.layers.linear import NPUUnquantizedLinearMethod
from vllm_davinci.core.quantization.config import AscendQuantizationConfig
from vllm_davinci.core.quantization.formats.modelslim import QuantDescription
from vllm_davinci.core.quantization.quant_matmul import FRACTAL_NZ, arrange_weight
from vllm_davinci.core.quantization.tensors import bits_from_float, float_from_bits
from vllm_davinci_testing.layers.quantized_linear import (
    DTYPES,
    IN,
    OUT,
    TYPES,
    Exported,
    build,
    config_of,
    fill,
    inputs,
    prepare,
    single,
)

pytestmark = pytest.mark.usefixtures("registered")


def loaded(
    kind: str, dtype: torch.dtype, layer: type[LinearBase] = ReplicatedLinear
) -> tuple[LinearBase, Exported]:
    """Makes a layer that is ready to run; returns it with its exported tensors."""
    made, export = single(kind, dtype, layer), Exported.make(kind, OUT, IN, dtype)
    fill(made, export)
    return prepare(made), export


LAYERS = pytest.mark.parametrize(
    "layer", [ReplicatedLinear, ColumnParallelLinear, RowParallelLinear]
)


@DTYPES
@LAYERS
def test_static_layers_equal_the_integer_definition(layer: type[LinearBase], dtype: torch.dtype):
    made, export = loaded("W8A8", dtype, layer)
    x = inputs(dtype) * 3  # some values exceed the range
    assert torch.equal(made(x.npu()).cpu(), export.static(x))


@DTYPES
@LAYERS
def test_dynamic_layers_equal_the_integer_definition(layer: type[LinearBase], dtype: torch.dtype):
    made, export = loaded("W8A8_DYNAMIC", dtype, layer)
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
def test_tokens_do_not_depend_on_other_requests(kind: str):
    dtype = torch.bfloat16
    made, _ = loaded(kind, dtype)
    x = inputs(dtype)
    sane = made(x.npu()).cpu()
    x[3, 7], x[5] = float("nan"), float("inf")
    disturbed = made(x.npu()).cpu()
    others = [0, 1, 2, 4, 6, 7, 8]
    assert torch.equal(disturbed[others], sane[others])
    if kind == "W8A8_DYNAMIC":  # the token's own scale propagates it
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
def test_a_norm_adds_the_bias_that_the_checkpoint_has(with_residual, vllm_config, device):
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


def test_a_norm_without_its_described_bias_is_named(vllm_config, device):
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


def test_the_nz_layout_gives_the_same_products(vllm_config: VllmConfig):
    vllm_config.additional_config = {"enable_weight_nz_layout": True}
    made, export = loaded("W8A8_DYNAMIC", torch.bfloat16)
    x = inputs(torch.bfloat16)
    assert torch.equal(made(x.npu()).cpu(), export.dynamic(x))


def test_the_nz_layout_takes_the_place_of_the_plain_weight():
    parameter = torch.nn.Parameter(torch.zeros(512, 1024, dtype=torch.int8).npu(), False)
    held = torch.npu.memory_allocated()
    tiles = arrange_weight(parameter, use_nz=True)
    assert torch_npu.get_npu_format(tiles) == FRACTAL_NZ
    assert tiles.shape == (1024, 512)
    assert (parameter.shape, parameter.data_ptr()) == ((512, 1024), tiles.data_ptr())
    assert torch.npu.memory_allocated() == held


def test_a_failure_to_arrange_weights_in_nz_is_explained():
    with pytest.raises(DeviceError, match=r"enable_weight_nz_layout.*Remove the key"):
        arrange_weight(torch.ones(OUT, IN, dtype=torch.int8), use_nz=True)  # not on the device


# Missing, misshapen or refused tensors of quantized layers are named when loading.

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
    assert f"has p.weight_scale, which the model does not have: p.weight {told}" in text
    assert describe_failure("hub/model", QuantDescription.parse(types), ValueError("other")) is None


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
