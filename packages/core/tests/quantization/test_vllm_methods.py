"""An engine's quantization follows from the option and the checkpoint."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from vllm.config import VllmConfig
from vllm.model_executor.layers.linear import QKVParallelLinear, ReplicatedLinear
from vllm.model_executor.layers.quantization import get_quantization_config
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsConfig,
)

from vllm_davinci.core.errors import CheckpointError, UnsupportedFeatureError
from vllm_davinci.core.layers.linear import NPUUnquantizedLinearMethod
from vllm_davinci.core.out_of_tree import register
from vllm_davinci.core.quantization.compressed_schemes import refusal
from vllm_davinci.core.quantization.config import DESCRIPTION, NAME, AscendQuantizationConfig
from vllm_davinci.core.quantization.scaled_mm import NPUInt8ScaledMMLinearKernel
from vllm_davinci.core.quantization.vllm_methods import choose_quantization
from vllm_davinci.operators.quantization import dynamic_quant, static_quant
from vllm_davinci_testing.engines.int8_checkpoint import compressed_int8


@pytest.fixture(autouse=True)
def registered(vllm_config: VllmConfig) -> None:
    register()


def engine(model: Path, quantization: str | None = None) -> Any:
    """Makes the parts of an engine's configuration that this choice reads and writes."""
    model_config = SimpleNamespace(
        model=str(model),
        revision=None,
        quantization=quantization,
        quantization_config=None,
        dtype=torch.bfloat16,
        hf_config=SimpleNamespace(),
        hf_overrides={},
    )
    return SimpleNamespace(
        model_config=model_config,
        load_config=SimpleNamespace(download_dir=None),
        quant_config=None,
        get_quantization_config=VllmConfig.get_quantization_config,
    )


def describe(directory: Path, **types: str) -> None:
    (directory / DESCRIPTION).write_text(json.dumps(types))


def test_vllm_knows_the_method_by_name():
    assert get_quantization_config(NAME) is AscendQuantizationConfig


def test_a_checkpoint_with_a_description_is_loaded_by_it(tmp_path: Path):
    describe(tmp_path, **{"lm_head.weight": "FLOAT"})
    config = engine(tmp_path)
    choose_quantization(config)
    assert config.model_config.quantization == NAME
    assert isinstance(config.quant_config, AscendQuantizationConfig)
    assert config.quant_config.description.types == {"lm_head.weight": "FLOAT"}


def test_a_checkpoint_without_one_stays_as_it_is(tmp_path: Path):
    config = engine(tmp_path)
    choose_quantization(config)
    assert config.model_config.quantization is None
    assert config.quant_config is None


def test_an_option_of_the_user_is_unchanged(tmp_path: Path):
    describe(tmp_path)
    config = engine(tmp_path, "compressed-tensors")
    choose_quantization(config)
    assert config.model_config.quantization == "compressed-tensors"


def test_the_option_without_a_description_says_where_one_comes_from(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"needs quant_model_description\.json.*quantize"):
        AscendQuantizationConfig().maybe_update_config(str(tmp_path))


def test_a_quantized_cache_is_refused_when_the_description_is_read(tmp_path: Path):
    describe(tmp_path, kv_quant_type="C8")
    with pytest.raises(UnsupportedFeatureError, match="kv_quant_type"):
        AscendQuantizationConfig().maybe_update_config(str(tmp_path))


def test_the_description_overrides_the_sources_configuration(tmp_path: Path):
    left_over = {"quant_method": "fp8"}
    override = AscendQuantizationConfig.override_quantization_method
    hf_config = SimpleNamespace(_name_or_path=str(tmp_path))
    assert override(left_over, None, hf_config) is None
    assert override(left_over, NAME, hf_config) == NAME
    describe(tmp_path)
    assert override(left_over, None, hf_config) == NAME
    assert override(left_over, "fp8", hf_config) is None


# --- compressed-tensors --------------------------------------------------------------------------


def integers_of(rows: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Makes an int8 weight of 64 columns and its scales."""
    weight = torch.randint(-127, 128, (rows, 64), generator=generator, dtype=torch.int8)
    return weight, torch.rand(rows, 1, generator=generator) * 1e-3


def load(layer: torch.nn.Module, **tensors: torch.Tensor) -> None:
    for name, tensor in tensors.items():
        parameter = layer.get_parameter(name)
        parameter.weight_loader(parameter, tensor)


def compressed(**activations: Any) -> CompressedTensorsConfig:
    changed = compressed_int8()
    changed["config_groups"]["group_0"]["input_activations"] |= activations
    made: CompressedTensorsConfig = get_quantization_config("compressed-tensors").from_config(
        changed
    )
    return made


def test_int8_layers_of_compressed_tensors_equal_the_integer_definition(one_rank: None):
    quantization = compressed()
    quantization.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    with torch.device("npu", 0):
        layer = QKVParallelLinear(
            64, 16, 4, 2, bias=False, params_dtype=torch.bfloat16, quant_config=quantization,
            prefix="attn.qkv_proj", return_bias=False,
        )  # fmt: skip
    g = torch.Generator().manual_seed(0)
    weight, scale = integers_of(128, g)
    start = 0
    for shard, rows in (("q", 64), ("k", 32), ("v", 32)):
        part = slice(start, start + rows)
        layer.weight.weight_loader(layer.weight, weight[part], shard)
        layer.weight_scale.weight_loader(layer.weight_scale, scale[part], shard)
        start += rows
    layer.quant_method.process_weights_after_loading(layer)
    assert isinstance(layer.scheme.kernel, NPUInt8ScaledMMLinearKernel)
    x = torch.randn(5, 64, generator=g).bfloat16()
    integers, step = dynamic_quant(x)
    sums = integers.long() @ weight.long().t()
    expected = (sums.float() * scale.flatten() * step[:, None]).bfloat16()
    assert torch.equal(layer(x.npu()).cpu(), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("zero_point", [None, -9])
@pytest.mark.parametrize("has_bias", [False, True])
def test_static_activations_of_compressed_tensors_equal_the_integer_definition(
    has_bias: bool, zero_point: int | None, dtype: torch.dtype, one_rank: None
):
    quantization = compressed(dynamic=False, strategy="tensor", symmetric=zero_point is None)
    with torch.device("npu", 0):
        layer = ReplicatedLinear(
            64, 48, bias=has_bias, params_dtype=dtype, quant_config=quantization,
            prefix="mlp.down_proj", return_bias=False,
        )  # fmt: skip
    g = torch.Generator().manual_seed(0)
    weight, scale = integers_of(48, g)
    tensors = {"weight": weight, "weight_scale": scale, "input_scale": torch.tensor([0.03])}
    if zero_point is not None:
        tensors["input_zero_point"] = torch.tensor([zero_point], dtype=torch.int8)
    bias = torch.randn(48, generator=g).to(dtype)
    if has_bias:
        tensors["bias"] = bias
    load(layer, **tensors)
    layer.quant_method.process_weights_after_loading(layer)
    x = torch.randn(5, 64, generator=g).to(dtype) * 3  # some values exceed the range
    offset = zero_point or 0
    integers = static_quant(x, torch.tensor(0.03), torch.tensor(offset))
    sums = integers.long() @ weight.long().t() - offset * weight.long().sum(1)
    expected = (sums.float() * (scale.flatten() * 0.03)).to(dtype)
    if has_bias:
        expected += bias
    assert torch.equal(layer(x.npu()).cpu(), expected)


@pytest.mark.parametrize("has_bias", [False, True])
def test_asymmetric_activations_of_compressed_tensors_are_as_close_as_their_step(
    has_bias: bool, one_rank: None
):
    with torch.device("npu", 0):
        layer = ReplicatedLinear(
            64, 48, bias=has_bias, params_dtype=torch.float16,
            quant_config=compressed(symmetric=False), prefix="mlp.down_proj", return_bias=False,
        )  # fmt: skip
    g = torch.Generator().manual_seed(0)
    weight, scale = integers_of(48, g)
    load(layer, weight=weight, weight_scale=scale)
    bias = torch.randn(48, generator=g).half()
    if has_bias:
        layer.bias.data.copy_(bias)
    layer.quant_method.process_weights_after_loading(layer)
    # All values have one sign, so that symmetric rounding would need twice the step.
    x = torch.rand(6, 64, generator=g).half() + 1
    step = (x.amax(1) - x.amin(1).clamp_max(0)).float() / 255
    exact = x.double() @ (weight.double() * scale.double()).t() + (bias if has_bias else 0)
    # Each input's error is at most half a step; in the sum, errors have both signs.
    allowed = 0.5 * step[:, None] * (weight.float() * scale).norm(dim=1) + exact.abs() * 2**-10
    error = (layer(x.npu()).cpu().double() - exact).abs()
    assert (error < allowed).float().mean() > 0.9
    assert (error < 2 * allowed).all()


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("dynamic", [True, False])
def test_the_projection_after_mla_becomes_floats_in_this_format_too(dynamic, symmetric, one_rank):
    strategy = "token" if dynamic else "tensor"
    quantization = compressed(dynamic=dynamic, strategy=strategy, symmetric=symmetric)
    with torch.device("npu", 0):
        layer = ReplicatedLinear(
            64, 48, bias=False, params_dtype=torch.bfloat16, quant_config=quantization,
            prefix="self_attn.kv_b_proj", return_bias=False,
        )  # fmt: skip
    g = torch.Generator().manual_seed(0)
    weight, scale = integers_of(48, g)
    load(layer, weight=weight, weight_scale=scale)
    layer.quant_method.process_weights_after_loading(layer)
    assert isinstance(layer.quant_method, NPUUnquantizedLinearMethod)
    assert [name for name, _ in layer.named_parameters()] == ["weight"]
    assert torch.equal(layer.weight.cpu(), (weight.float() * scale).bfloat16())


INT8 = QuantizationArgs(num_bits=8, type="int", symmetric=True, strategy="channel")
DYNAMIC = QuantizationArgs(num_bits=8, type="int", symmetric=True, strategy="token", dynamic=True)


@pytest.mark.parametrize(
    ("weights", "activations", "told"),
    [
        ({"num_bits": 4}, {}, "weights of 4 bits"),
        ({"type": "float"}, {}, r"weights of 8 bits \(.*float.*\)"),
        ({"symmetric": False}, {}, "asymmetric int8 weights"),
        ({"strategy": "group", "group_size": 32}, {}, "scale per .*group"),
        ({}, None, "float activations"),
        ({}, {"num_bits": 4}, "activations of 4 bits"),
        ({}, {"dynamic": False}, "static scale per .*token"),
    ],
)
def test_other_schemes_are_refused_with_the_supported_ones(weights, activations, told):
    made = INT8.model_copy(update=weights)
    of_inputs = None if activations is None else DYNAMIC.model_copy(update=activations)
    for is_expert in (False, True):
        reason = refusal(made, of_inputs, is_expert)
        assert reason is not None
        assert re.search(told, reason)


def test_experts_take_dynamic_symmetric_activations_alone():
    static = DYNAMIC.model_copy(update={"dynamic": False, "strategy": "tensor"})
    asymmetric = DYNAMIC.model_copy(update={"symmetric": False})
    assert refusal(INT8, DYNAMIC, is_expert=True) is None
    for activations in (static, asymmetric):
        assert refusal(INT8, activations) is None
        reason = refusal(INT8, activations, is_expert=True)
        assert reason is not None
        assert "static or asymmetric" in reason
