"""fp8 weights with a scale per block become floats or int8, at load and offline."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from vllm_davinci.core.checkpoint.check import check_checkpoint
from vllm_davinci.core.components.fused_ops import choose_fused_ops
from vllm_davinci.core.errors import CheckpointError, CoreError, UnsupportedFeatureError
from vllm_davinci.core.export.exporter import Exporter
from vllm_davinci.core.export.source import require_calibratable
from vllm_davinci.core.quantization.formats.fp8_block import Fp8Weights
from vllm_davinci.core.quantization.fp8 import Block, as_floats
from vllm_davinci_testing.engines.fp8_checkpoint import (
    deepseek_of_blocks,
    dequantized,
    write_block_fp8,
)
from vllm_davinci_testing.engines.loaded_model import LoadedModel

DOWN = "model.layers.1.mlp.experts.2.down_proj.weight"


@pytest.fixture(scope="module")
def fp8(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("fp8")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = transformers.AutoModelForCausalLM.from_config(
            deepseek_of_blocks(), dtype=torch.bfloat16
        )
    network.save_pretrained(directory / "floats")
    return write_block_fp8(directory / "floats", directory / "blocks")


def quantized(source: Path, destination: Path, kind: str) -> Path:
    Exporter(source, destination, kind, torch.bfloat16, {}).run(lambda count: None)
    return destination


def test_every_fp8_number_keeps_its_value():
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    one = torch.ones(1, 1)
    finite = numbers[numbers.float().isfinite()].view(2, 127)
    made = as_floats(finite, one, Block(2, 127), torch.float32)
    assert torch.equal(made.view(torch.int32), finite.float().view(torch.int32))  # includes -0
    made = as_floats(numbers.view(2, 128), one, Block(2, 128), torch.bfloat16)
    assert int(made.isnan().sum()) == 2


@pytest.fixture
def compiled_operators() -> Iterator[None]:
    """Uses vllm-davinci-kernels' operators; without them torch allocates each result."""
    choose_fused_ops(True)
    yield
    choose_fused_ops(False)


@pytest.mark.usefixtures("compiled_operators")
@pytest.mark.parametrize("kind", ["FLOAT", "W8A8_DYNAMIC"])
def test_memory_of_one_weight_serves_the_next_but_not_while_it_is_read(kind: str):
    block, names = Block(128, 128), [f"{number}.weight" for number in range(6)]
    files = {name: torch.randn(128, 256).to(torch.float8_e4m3fn) for name in names}
    scales = {f"{name}_scale_inv": torch.rand(1, 2) + 0.5 for name in names}
    stored = [pair for pairs in zip(files.items(), scales.items(), strict=True) for pair in pairs]
    types = dict.fromkeys(names, kind)

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        made = Fp8Weights(types, "here", blocks=block).converted(stored, torch.bfloat16)
        return ((name, tensor) for name, tensor in made if name in files)

    kept = dict(weights())
    assert len({tensor.data_ptr() for tensor in kept.values()}) == len(names)
    addresses = set()
    for name, tensor in weights():
        assert torch.equal(tensor, kept[name])
        addresses.add(tensor.data_ptr())
    assert len(addresses) <= 3


def blocks_of(**config: Any) -> Block | None:
    found = Fp8Weights.of({"quant_method": "fp8", **config})
    assert found is not None
    return found.blocks


def test_blocks_equal_those_of_the_configuration():
    assert Fp8Weights.of({}) is None
    assert Fp8Weights.of({"quant_method": "gptq"}) is None
    assert blocks_of(weight_block_size=[64, 128]) == Block(64, 128)
    assert blocks_of() is None
    for size in ([64], [0, 128], ["a", "b"], 128):
        with pytest.raises(UnsupportedFeatureError, match="one size of two positive numbers"):
            blocks_of(weight_block_size=size)


def test_loaded_floats_equal_those_of_transformers_and_of_the_offline_conversion(
    fp8: Path, registered: None, tmp_path: Path
):
    model = LoadedModel(fp8)
    assert model.config.model_config.quantization == "fp8"
    model.load(fp8)
    loaded = model.parameters()
    expected = dequantized(fp8)[DOWN].bfloat16()
    assert torch.equal(loaded["model.layers.1.mlp.experts.routed_experts.w2_weight"][2], expected)
    offline = quantized(fp8, tmp_path / "floats", "FLOAT")
    assert check_checkpoint(offline).quantization == "none"
    other = LoadedModel(offline)
    other.load(offline)
    assert loaded.keys() == other.parameters().keys()
    assert all(torch.equal(loaded[name], value) for name, value in other.parameters().items())


def test_loaded_integers_equal_those_of_the_offline_conversion(fp8, registered, tmp_path):
    model = LoadedModel(fp8, quantization="ascend")
    model.load(fp8)
    loaded = model.parameters()
    assert loaded["model.layers.0.mlp.down_proj.weight"].dtype == torch.int8
    offline = quantized(fp8, tmp_path / "int8", "W8A8_DYNAMIC")
    described = {layer.name: layer.loads for layer in check_checkpoint(offline).kinds}
    assert described["model.layers.*.mlp.experts.*.down_proj"] == "W8A8_DYNAMIC"
    assert described["model.layers.*.self_attn.kv_b_proj"] == "FLOAT"
    other = LoadedModel(offline)
    other.load(offline)
    different = {
        name
        for name, value in other.parameters().items()
        if name not in loaded or not torch.equal(loaded[name], value)
    }
    # Weights with sizes not divisible by 128 are not fp8, and load unchanged.
    assert {name.rpartition(".")[0].rpartition(".")[2] for name in different} <= {
        "fused_qkv_a_proj"
    }


def test_weights_are_checked_with_their_scales(fp8: Path):
    report = check_checkpoint(fp8)
    assert report.can_load, report.problems()
    assert {kind.loads for kind in report.kinds if "experts" in kind.name} == {"fp8"}


def without(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[f"{DOWN}_scale_inv"]


def of_another_shape(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{DOWN}_scale_inv"] = torch.ones(3, 1)


def of_zero(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{DOWN}_scale_inv"].zero_()


def of_a_float_weight(tensors: dict[str, torch.Tensor]) -> None:
    tensors[DOWN] = tensors[DOWN].bfloat16()


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (without, f"{DOWN} holds fp8, and {DOWN}_scale_inv is in no file"),
        (of_another_shape, f"{DOWN}_scale_inv has shape [3, 1]"),
        (of_zero, f"{DOWN}_scale_inv holds 0.0"),
        (of_a_float_weight, f"{DOWN}_scale_inv exists without the fp8 tensor {DOWN}"),
    ],
)
def test_an_error_names_the_faulty_tensor_and_its_file(spoil, told, fp8, registered, tmp_path):
    directory = tmp_path / "spoilt"
    shutil.copytree(fp8, directory)
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        tensors |= load_file(path)
        path.unlink()
    (directory / "model.safetensors.index.json").unlink()
    spoil(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    model = LoadedModel(fp8)
    with pytest.raises(CoreError) as error:
        model.load(directory)
    assert f"model.safetensors: {told}" in str(error.value)
    if spoil is not of_zero:  # the check does not read values
        assert not check_checkpoint(directory).can_load


def test_calibration_and_float_sources_are_refused_with_the_alternative(fp8: Path, tmp_path: Path):
    config = json.loads((fp8 / "config.json").read_text())
    with pytest.raises(CheckpointError, match="--type FLOAT"):
        require_calibratable(fp8, config)
    with pytest.raises(CheckpointError, match="needs a source with fp8 weights"):
        quantized(fp8.with_name("floats"), tmp_path / "again", "FLOAT")
