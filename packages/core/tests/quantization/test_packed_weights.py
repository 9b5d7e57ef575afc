"""Packed integers of AWQ, GPTQ and compressed-tensors become the layers' integers."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from vllm_davinci.core.errors import UnsupportedFeatureError
from vllm_davinci.core.quantization.format import Checkpoint, find_format
from vllm_davinci.core.quantization.formats.awq_gptq import AWQWeights, GPTQWeights
from vllm_davinci.core.quantization.formats.packed_compressed_tensors import PackedCompressedTensors
from vllm_davinci.core.quantization.packed_weights import PackedWeights
from vllm_davinci.core.quantization.weight_only import floats_of
from vllm_davinci_testing.engines.packed_checkpoint import Integers, settings_of, tensors_of

CASES = [
    ("awq", 4, 32, False),
    ("awq", 4, 0, False),
    ("gptq", 4, 32, True),
    ("gptq", 4, 0, True),
    ("gptq", 4, 32, False),
    ("gptq", 8, 32, True),
    ("compressed-tensors", 4, 32, True),
    ("compressed-tensors", 4, 32, False),
    ("compressed-tensors", 4, 0, True),
    ("compressed-tensors", 8, 0, True),
]


def packed_format(config: Mapping[str, Any]) -> PackedWeights | None:
    kinds = (AWQWeights, GPTQWeights, PackedCompressedTensors)
    return next((found for kind in kinds if (found := kind.of(config)) is not None), None)


@pytest.mark.parametrize(("method", "bits", "group_size", "is_symmetric"), CASES)
def test_integers_keep_their_values(method, bits, group_size, is_symmetric, tmp_path):
    weight = torch.randn(48, 96, generator=torch.Generator().manual_seed(0))
    made = Integers.of(weight, bits, group_size, is_symmetric)
    stored = tensors_of(method, made, "a.p") | {"a.norm.weight": torch.ones(3)}
    save_file(stored, tmp_path / "model.safetensors")
    settings = settings_of(method, bits, group_size, is_symmetric)
    packing = find_format(Checkpoint(str(tmp_path), None, settings), method)
    assert isinstance(packing, PackedWeights)
    assert packing.types == {"a.p.weight": f"W{bits}A16", "a.norm.weight": "FLOAT"}
    assert packing.layout.group_size == group_size
    found = dict(packing.converted(stored.items(), torch.float16))
    parts = ("weight", "weight_scale", "weight_offset")
    assert found.keys() == {*(f"a.p.{part}" for part in parts), "a.norm.weight"}
    values = floats_of(*(found[f"a.p.{part}"] for part in parts), bits)
    assert torch.equal(values.to(torch.float16), made.floats(torch.float16))
    shapes = {f"a.p.{part}": shape for part, shape in packing.tensors(48, 96).items()}
    assert all(stored[name].shape == shape for name, shape in shapes.items())
    assert packing.matrix(stored[f"a.p.{packing.weight}"].shape) == (48, 96)


@pytest.mark.parametrize(
    ("method", "changed", "told"),
    [
        ("awq", {"version": "gemv"}, "version 'gemv'"),
        ("awq", {"zero_point": False}, "zero_point false"),
        ("awq", {"bits": 8}, "weights of 8 bits"),
        ("awq", {"group_size": 16}, "a scale per 16 entries"),
        ("gptq", {"desc_act": True}, "desc_act"),
        ("gptq", {"bits": 3}, "weights of 3 bits"),
        ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
        ("gptq", {"dynamic": {r"+:.*mlp.*": {"bits": 8}}}, "separate settings"),
    ],
)
def test_formats_that_are_not_read_are_refused_in_one_line(method, changed, told):
    config = {**settings_of(method, 4, 32, method != "awq"), **changed}
    with pytest.raises(UnsupportedFeatureError, match=told) as error:
        packed_format(config)
    assert "Quantize the model again" in str(error.value)
    assert "\n" not in str(error.value)


def test_activation_order_with_one_group_is_no_order():
    assert packed_format({**settings_of("gptq", 4, 0, True), "desc_act": True}) is not None


def test_groups_that_are_not_contiguous_are_refused():
    made = Integers.of(torch.randn(16, 64), 4, 32, True)
    packing = packed_format(settings_of("gptq", 4, 32, True))
    stored = tensors_of("gptq", made, "a.p")
    stored["a.p.g_idx"] = stored["a.p.g_idx"].flip(0)
    assert packing is not None
    with pytest.raises(UnsupportedFeatureError, match=r"a\.p\.g_idx has groups that are not"):
        dict(packing.converted(stored.items(), torch.float16))


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"actorder": "group"}, "actorder 'group'"),
        ({"num_bits": 3}, "weights of 3 bits"),
        ({"group_size": 16}, "a scale per 16 entries"),
        ({"type": "float"}, "not static integers"),
    ],
)
def test_schemes_of_compressed_tensors_are_refused(changed: dict[str, Any], told: str):
    config = settings_of("compressed-tensors", 4, 32, True)
    config["config_groups"]["group_0"]["weights"] |= changed
    with pytest.raises(UnsupportedFeatureError, match=told):
        packed_format(config)


def test_quantized_activations_are_another_configuration():
    config = settings_of("compressed-tensors", 8, 0, True)
    config["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8}
    assert packed_format(config) is None
    assert packed_format({"quant_method": "fp8"}) is None
    assert packed_format({}) is None
