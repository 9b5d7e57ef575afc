"""Every supported load format is checked; only parts that options omit may be absent."""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import LoadFormats

from vllm_davinci.core.checkpoint.load_errors import explained
from vllm_davinci.core.errors import CheckpointError
from vllm_davinci.core.quantization.config import DESCRIPTION
from vllm_davinci_testing.engines.hostile_checkpoints import (
    PARTS,
    copies,
    counted_outcomes,
    limited,
    mutations,
    names_a_file_of,
)
from vllm_davinci_testing.engines.loaded_model import LoadedModel
from vllm_davinci_testing.engines.vision_zoo import write_vision_checkpoint

DOWN = "model.layers.0.mlp.down_proj.weight"


def save_safetensors(tensors: dict[str, Tensor], path: Path) -> None:
    save_file(tensors, path, metadata={"format": "pt"})


FORMATS: dict[str, tuple[str, Callable[[dict[str, Tensor], Path], None]]] = {
    "auto": ("model.safetensors", save_safetensors),
    "safetensors": ("model.safetensors", save_safetensors),
    "hf": ("model.safetensors", save_safetensors),
    "pt": ("model.pt", torch.save),
    "npcache": ("pytorch_model.bin", torch.save),
    "mistral": ("consolidated.safetensors", save_safetensors),
}


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = transformers.Qwen2Config(
        num_hidden_layers=1, num_key_value_heads=1, vocab_size=64, hidden_size=64,
        intermediate_size=96, num_attention_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    directory = tmp_path_factory.mktemp("qwen2")
    network = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float16)
    network.save_pretrained(directory)
    return directory


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("load_format", FORMATS)
def test_every_load_format_is_checked(load_format: str, qwen2: Path, tmp_path: Path):
    tensors = load_file(qwen2 / "model.safetensors")
    name, save = FORMATS[load_format]
    model = LoadedModel(qwen2, torch.float16, load_format=load_format)
    assert model.config.load_config.load_format == f"davinci_{load_format}"
    for directory, content in (
        (tmp_path / "whole", tensors),
        (tmp_path / "cut", {key: value for key, value in tensors.items() if key != DOWN}),
    ):
        directory.mkdir()
        (directory / "config.json").write_bytes((qwen2 / "config.json").read_bytes())
        save(content, directory / name)
    model.load(tmp_path / "whole")
    loaded = model.parameters()[DOWN]
    assert torch.equal(loaded, tensors[DOWN])
    with pytest.raises(CheckpointError, match=f"lacks {DOWN}"):
        model.load(tmp_path / "cut")


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("load_format", FORMATS)
def test_a_quantized_checkpoint_is_converted_or_refused(load_format, qwen2, tmp_path):
    """Compares descriptions with safetensors headers, which other formats lack."""
    tensors = load_file(qwen2 / "model.safetensors")
    integers = torch.arange(64 * 96).reshape(64, 96) % 16 - 8
    del tensors[DOWN]
    prefix = DOWN.removesuffix(".weight")
    quantized = {
        DOWN: ((integers[0::2] & 15) | (integers[1::2] << 4)).to(torch.int8),
        f"{prefix}.weight_scale": torch.ones(64, 1),
        f"{prefix}.weight_offset": torch.zeros(64, 1),
        f"{prefix}.scale_bias": torch.ones(64, 1),
    }
    types = {**dict.fromkeys(tensors, "FLOAT"), **dict.fromkeys(quantized, "W4A8_DYNAMIC")}
    (tmp_path / DESCRIPTION).write_text(json.dumps(types))
    (tmp_path / "config.json").write_bytes((qwen2 / "config.json").read_bytes())
    name, save = FORMATS[load_format]
    save({**tensors, **quantized}, tmp_path / name)
    model = LoadedModel(tmp_path, torch.float16, load_format=load_format, quantization="ascend")
    if name != "model.safetensors":
        with pytest.raises(CheckpointError, match=r"holds no \*\.safetensors file"):
            model.load(tmp_path)
        return
    model.load(tmp_path)
    assert torch.equal(model.parameters()[DOWN], integers.to(torch.int8))


@pytest.mark.parametrize("load_format", sorted({*get_args(LoadFormats)} - {*FORMATS, "dummy"}))
def test_other_load_formats_of_vllm_are_refused_by_name(load_format: str, qwen2: Path):
    arguments = EngineArgs(str(qwen2), skip_tokenizer_init=True, load_format=load_format)
    told = f"--load-format {load_format} .*not supported in .*Use one of auto, hf, .*dummy"
    with pytest.raises(ValueError, match=told):
        arguments.create_engine_config()


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize(
    "options",
    [{"limit_mm_per_prompt": {"image": 0, "video": 0}}, {"language_model_only": True}],
    ids=lambda options: next(iter(options)),
)
def test_a_model_of_images_that_serves_text_alone_loads(options: dict[str, Any], tmp_path: Path):
    checkpoint = write_vision_checkpoint("qwen2_5_vl", tmp_path / "vision")
    tensors = load_file(checkpoint / "model.safetensors")
    model = LoadedModel(checkpoint, torch.float32, **options)
    model.load(checkpoint)
    assert not any("visual" in name for name in model.parameters())
    # A tensor outside the omitted parts still needs a parameter.
    tensors["model.language_model.layers.0.other.weight"] = torch.ones(2, 2)
    save_safetensors(tensors, checkpoint / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"layers\.0\.other\.weight"):
        model.load(checkpoint)


# A malicious checkpoint loads unchanged, or is refused naming a file.


@pytest.fixture(scope="module")
def told() -> Iterator[Counter[str]]:
    yield from counted_outcomes("loading")


def outcome(model: LoadedModel, directory: Path, right: dict[str, torch.Tensor]) -> str:
    for value in model.network.parameters():
        value.data.fill_(float("nan"))
    refusal = ""
    try:
        with limited(), explained(str(directory), None):
            model.load(directory)
    except CheckpointError as error:
        refusal = str(error)
    if refusal:
        assert names_a_file_of(directory, refusal), f"names no file: {refusal}"
        return "refused by name"
    loaded = model.parameters()
    assert loaded.keys() == right.keys()
    assert all(torch.equal(loaded[name], right[name]) for name in right), "loaded other weights"
    return "loaded equal"


@pytest.mark.usefixtures("registered")
@pytest.mark.thorough
@pytest.mark.parametrize("part", range(PARTS))
def test_a_hostile_checkpoint_loads_equal_or_is_refused_by_name(part, whole, told, tmp_path):
    model = LoadedModel(whole, torch.float16)
    model.load(whole)
    right = model.parameters()
    wrong = []
    for kind, directory in copies(whole, mutations(whole), part, tmp_path):
        try:
            told[f"{kind}: {outcome(model, directory, right)}"] += 1
        except Exception as error:
            wrong.append(f"{directory.name} {kind}: {type(error).__name__} {error}"[:900])
    assert not wrong, "\n".join(wrong)
