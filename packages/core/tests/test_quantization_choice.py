"""Which quantization an engine takes, from the option and from what the checkpoint carries."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.linear import QKVParallelLinear, ReplicatedLinear
from vllm.model_executor.layers.quantization import get_quantization_config
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsConfig,
)

from vllm_davinci.core.errors import CheckpointError, UnsupportedFeatureError
from vllm_davinci.core.quantization.config import NAME, AscendQuantizationConfig
from vllm_davinci.core.quantization.description import FILE_NAME
from vllm_davinci.core.quantization.scaled_mm import NPUInt8ScaledMMLinearKernel
from vllm_davinci.core.quantization.selection import choose_quantization
from vllm_davinci.core.registration import register


@pytest.fixture(autouse=True)
def registered(vllm_config: VllmConfig) -> None:
    register()


def engine(model: Path, quantization: str | None = None) -> Any:
    """The parts of an engine's configuration that the choice reads and writes."""
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
    (directory / FILE_NAME).write_text(json.dumps(types))


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


def test_an_option_of_the_user_is_left_alone(tmp_path: Path):
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


def test_the_description_goes_before_what_the_source_left_in_its_configuration(tmp_path: Path):
    left_over = {"quant_method": "fp8"}
    override = AscendQuantizationConfig.override_quantization_method
    hf_config = SimpleNamespace(_name_or_path=str(tmp_path))
    assert override(left_over, None, hf_config) is None
    assert override(left_over, NAME, hf_config) == NAME
    describe(tmp_path)
    assert override(left_over, None, hf_config) == NAME
    assert override(left_over, "fp8", hf_config) is None


# --- compressed-tensors --------------------------------------------------------------------------

COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 8,
                "type": "int",
                "symmetric": True,
                "strategy": "channel",
                "dynamic": False,
            },
            "input_activations": {
                "num_bits": 8,
                "type": "int",
                "symmetric": True,
                "strategy": "token",
                "dynamic": True,
            },
        }
    },
}


def compressed(**activations: Any) -> CompressedTensorsConfig:
    changed = json.loads(json.dumps(COMPRESSED))
    changed["config_groups"]["group_0"]["input_activations"] |= activations
    return CompressedTensorsConfig.from_config(changed)


def test_int8_layers_of_compressed_tensors_equal_the_integer_definition(one_rank: None):
    quantization = compressed()
    quantization.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    with torch.device("npu", 0):
        layer = QKVParallelLinear(
            64, 16, 4, 2, bias=False, params_dtype=torch.bfloat16, quant_config=quantization,
            prefix="attn.qkv_proj", return_bias=False,
        )  # fmt: skip
    g = torch.Generator().manual_seed(0)
    weight = torch.randint(-127, 128, (128, 64), generator=g, dtype=torch.int8)
    scale = torch.rand(128, 1, generator=g) * 1e-3
    start = 0
    for shard, rows in (("q", 64), ("k", 32), ("v", 32)):
        part = slice(start, start + rows)
        layer.weight.weight_loader(layer.weight, weight[part], shard)
        layer.weight_scale.weight_loader(layer.weight_scale, scale[part], shard)
        start += rows
    layer.quant_method.process_weights_after_loading(layer)
    assert isinstance(layer.scheme.kernel, NPUInt8ScaledMMLinearKernel)
    x = torch.randn(5, 64, generator=g).bfloat16()
    step = x.float().abs().amax(-1) / 127
    sums = (x.float() / step[:, None]).round().long() @ weight.long().t()
    expected = (sums.float() * scale.flatten() * step[:, None]).bfloat16()
    assert torch.equal(layer(x.npu()).cpu(), expected)


def test_static_activations_of_compressed_tensors_are_refused_with_a_way_out(one_rank: None):
    with pytest.raises(ValueError, match=r"scale from the checkpoint are not available.*quantize"):
        ReplicatedLinear(
            64, 64, quant_config=compressed(dynamic=False, strategy="tensor"), prefix="mlp.down"
        )
