"""Quantized linear layers equal an integer definition in plain torch, bit for bit."""

import pytest
import torch
import torch_npu
from vllm.config import VllmConfig
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)

from vllm_davinci.core.checkpoint.load_errors import require_norm_biases
from vllm_davinci.core.errors import CheckpointError, DeviceError
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
