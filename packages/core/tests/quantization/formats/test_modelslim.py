"""Layers by the description file, and messages about a bad file."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from vllm_davinci.core.errors import CheckpointError, UnsupportedFeatureError
from vllm_davinci.core.quantization.config import DESCRIPTION
from vllm_davinci.core.quantization.formats.modelslim import QuantDescription, find_description

ATTENTION = "model.layers.0.self_attn"
EXPERTS = "model.layers.1.mlp.experts"


def described(**types: str) -> QuantDescription:
    return QuantDescription.parse({f"{ATTENTION}.{name}.weight": v for name, v in types.items()})


def test_a_layer_has_the_type_of_its_weight():
    description = described(o_proj="W8A8_DYNAMIC", rotary="FLOAT")
    assert description.of_layer(f"{ATTENTION}.o_proj").name == "W8A8_DYNAMIC"
    assert description.of_layer(f"{ATTENTION}.rotary").name == "FLOAT"
    assert description.of_layer("lm_head") is None


def test_a_fused_layer_has_the_type_its_parts_agree_on():
    description = described(q_proj="W8A8", k_proj="W8A8", v_proj="W8A8")
    assert description.of_layer(f"{ATTENTION}.qkv_proj").name == "W8A8"


def test_the_models_own_table_of_fused_layers_goes_first():
    description = described(a="W8A8", b="W8A8")
    fused = {"ab": ["a", "b"]}
    assert description.of_layer(f"{ATTENTION}.ab", fused).name == "W8A8"
    assert described(ab="FLOAT", a="W8A8").of_layer(f"{ATTENTION}.ab", fused).name == "FLOAT"


@pytest.mark.parametrize(
    ("types", "told"),
    [
        ({"q_proj": "W8A8", "k_proj": "W8A8", "v_proj": "FLOAT"}, ["v_proj FLOAT", "k_proj W8A8"]),
        ({"q_proj": "W8A8", "k_proj": "W8A8_DYNAMIC", "v_proj": "W8A8"}, ["k_proj W8A8_DYNAMIC"]),
        ({"q_proj": "W8A8", "k_proj": "W8A8"}, [f"{ATTENTION}.v_proj no entry"]),
    ],
)
def test_parts_that_disagree_are_an_error_with_their_names(types: dict[str, str], told: list[str]):
    with pytest.raises(CheckpointError, match="one product") as error:
        described(**types).of_layer(f"{ATTENTION}.qkv_proj")
    assert all(text in str(error.value) for text in told)
    assert "Export the model again" in str(error.value)


def test_all_experts_have_one_type():
    names = [
        f"{EXPERTS}.{n}.{part}.weight"
        for n in range(3)
        for part in ("gate_proj", "up_proj", "down_proj")
    ]
    description = QuantDescription.parse(dict.fromkeys(names, "W8A8_DYNAMIC"))
    assert description.of_experts(EXPERTS).name == "W8A8_DYNAMIC"
    assert description.of_experts("model.layers.9.mlp.experts") is None
    # vLLM's name for MiniMax-M2's experts differs from the checkpoint's.
    other = QuantDescription.parse(
        {
            "model.layers.1.block_sparse_moe.experts.0.w1.weight": "W8A8_DYNAMIC",
            "model.layers.11.block_sparse_moe.experts.0.w1.weight": "W8A8",
        }
    )
    assert other.of_experts("model.layers.1.mlp.experts").name == "W8A8_DYNAMIC"
    assert other.of_experts("model.layers.2.mlp.experts") is None
    odd = QuantDescription.parse({**dict.fromkeys(names, "W8A8_DYNAMIC"), names[4]: "FLOAT"})
    with pytest.raises(CheckpointError, match=r"experts\.1\.up_proj FLOAT"):
        odd.of_experts(EXPERTS)


@pytest.mark.parametrize(
    ("lost", "told"),
    [
        (["2.up_proj"], r"experts\.2\.up_proj no entry"),
        (["1.gate_proj", "1.up_proj", "1.down_proj"], r"experts\.1\.gate_proj, .* no entry"),
    ],
)
def test_an_expert_without_all_its_entries_is_named(lost: list[str], told: str):
    names = [f"{n}.{part}" for n in range(3) for part in ("gate_proj", "up_proj", "down_proj")]
    types = {f"{EXPERTS}.{name}.weight": "W8A8" for name in names if name not in lost}
    with pytest.raises(CheckpointError, match=told):
        QuantDescription.parse(types).of_experts(EXPERTS)


def test_an_unknown_type_is_an_error_with_the_nearest_known_one():
    with pytest.raises(UnsupportedFeatureError, match=r"W8A8_DYNAMC.*Did the export mean") as error:
        described(o_proj="W8A8_DYNAMC").of_layer(f"{ATTENTION}.o_proj")
    assert f"{ATTENTION}.o_proj.weight" in str(error.value)


def test_an_unknown_type_of_a_layer_that_is_not_loaded_does_no_harm():
    description = described(o_proj="W8A8", other="W4A8_DYNAMIC")
    assert description.of_layer(f"{ATTENTION}.o_proj").name == "W8A8"


@pytest.mark.parametrize("key", ["kv_quant_type", "kv_cache_type", "fa_quant_type"])
def test_a_quantized_cache_or_attention_is_refused(key: str):
    with pytest.raises(UnsupportedFeatureError, match=key):
        QuantDescription.parse({key: "C8"}).refuse_unsupported_options()
    QuantDescription.parse({key: "FLOAT", "version": "1.0.0"}).refuse_unsupported_options()


def test_norm_biases_are_seen():
    assert not described(o_proj="W8A8").has_norm_biases
    name = "model.layers.0.input_layernorm.bias"
    assert QuantDescription.parse({name: "W8A8"}).has_norm_biases


def test_names_follow_the_models_prefixes():
    description = described(o_proj="W8A8").renamed(
        lambda types: {f"language_model.{name}": value for name, value in types.items()}
    )
    assert description.of_layer(f"language_model.{ATTENTION}.o_proj").name == "W8A8"


@pytest.mark.parametrize("content", ["[1, 2]", "{", '{"a.weight": 8}'])
def test_an_invalid_description_is_named(content: str, tmp_path: Path):
    path = tmp_path / DESCRIPTION
    path.write_text(content)
    with pytest.raises(CheckpointError, match=str(path)):
        QuantDescription.load(path)


def test_a_description_with_a_type_in_its_name_is_found(tmp_path: Path):
    assert find_description(tmp_path) is None
    named = tmp_path / "quant_model_description_w8a8.json"
    named.write_text(json.dumps({}))
    assert find_description(tmp_path) == named
    other = tmp_path / "quant_model_description_w8a8_dynamic.json"
    other.write_text(json.dumps({}))
    with pytest.raises(CheckpointError, match="from two exports"):
        find_description(tmp_path)
    other.unlink()
    (tmp_path / DESCRIPTION).write_text(json.dumps({}))
    with pytest.raises(CheckpointError, match=f"{DESCRIPTION} and {named.name}, from two exports"):
        find_description(tmp_path)
    named.unlink()
    assert find_description(tmp_path) == tmp_path / DESCRIPTION


@pytest.mark.parametrize(("groups", "told", "expected"), [(1, 64, 0), (4, 0, 32), (4, 32, 32)])
def test_groups_equal_those_of_the_scales(tmp_path: Path, groups: int, told: int, expected: int):
    tensors = {
        "p.weight": torch.zeros(8, 128, dtype=torch.int8),
        "p.weight_scale": torch.ones(8, groups),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    path = tmp_path / DESCRIPTION
    path.write_text(json.dumps({**dict.fromkeys(tensors, "W8A16"), "group_size": told}))
    assert QuantDescription.load(path).layout.group_size == expected
