"""Every tensor of a checkpoint is loaded or reported, and every parameter is set.

One model is built per kind of checkpoint. Then each tensor in turn is removed, renamed, reshaped or
duplicated, and the result loaded into this model.
"""

import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from vllm_davinci.core.errors import CoreError
from vllm_davinci.core.export.exporter import Exporter
from vllm_davinci.core.quantization.config import DESCRIPTION
from vllm_davinci.core.weight_files.files import QUANTIZED_INDEX_NAME
from vllm_davinci_testing.engines.deepseek_zoo import small_deepseek
from vllm_davinci_testing.engines.int8_checkpoint import input_ranges
from vllm_davinci_testing.engines.loaded_model import LoadedModel
from vllm_davinci_testing.engines.packed_checkpoint import write_packed

pytestmark = pytest.mark.nightly("weights")

COMMON: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}
CONFIGS = {
    "qwen2": transformers.Qwen2Config(num_hidden_layers=1, num_key_value_heads=1, **COMMON),
    "qwen3": transformers.Qwen3Config(
        num_hidden_layers=1, num_key_value_heads=1, head_dim=64, tie_word_embeddings=True, **COMMON
    ),
    "deepseek": small_deepseek(
        moe_intermediate_size=32,
        n_routed_experts=2,
        num_experts_per_tok=1,
        n_group=1,
        q_lora_rank=32,
        qk_nope_head_dim=32,
        v_head_dim=32,
        **COMMON,
    ),
}
Weights = Iterable[tuple[str, Tensor]]
WINDOWS = [torch.arange(60).remainder(61)[None]]
PACKED = ("awq", "compressed-tensors")
WRITTEN = "quant_model_weights-00001-of-00001.safetensors"


class Stored:
    """A small checkpoint; damaged copies are loaded into its model."""

    def __init__(self, directory: Path, dtype: torch.dtype = torch.bfloat16) -> None:
        self.directory = directory
        files = (directory / WRITTEN, directory / "model.safetensors")
        self.file = next(path for path in files if path.is_file())
        (directory / QUANTIZED_INDEX_NAME).unlink(missing_ok=True)
        self.tensors = load_file(self.file)
        description = directory / DESCRIPTION
        self.types = json.loads(description.read_text()) if description.is_file() else None
        self.model = LoadedModel(directory, dtype)

    def load(
        self, tensors: dict[str, Tensor], types: dict[str, Any] | None, directory: Path
    ) -> None:
        if not directory.is_dir():
            shutil.copytree(self.directory, directory)
        save_file(tensors, directory / self.file.name, metadata={"format": "pt"})
        if types is not None:
            (directory / DESCRIPTION).write_text(json.dumps(types))
        self.model.load(directory)


@pytest.fixture(scope="module")
def write(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    def checkpoint(name: str, kind: str) -> Path:
        directory = tmp_path_factory.mktemp(name)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            network = transformers.AutoModelForCausalLM.from_config(
                CONFIGS[name], dtype=torch.bfloat16
            )
        for parameter in network.parameters():
            if parameter.dim() == 1:
                parameter.data.uniform_(0.5, 1.5)
        network.save_pretrained(directory)
        if kind == "FLOAT":
            return directory
        if kind in PACKED:
            made = tmp_path_factory.mktemp(f"{name}-{kind}")
            return write_packed(directory, made, kind, is_symmetric=False)[0]
        ranges = input_ranges(directory, WINDOWS) if kind == "W8A8" else {}
        made = directory.with_name(f"{directory.name}-{kind}")
        Exporter(directory, made, kind, torch.bfloat16, ranges).run(lambda count: None)
        return made

    return checkpoint


def spoilt(
    stored: Stored,
) -> Iterator[tuple[str, dict[str, Tensor], dict[str, Any] | None, set[str]]]:
    """Yields each change's name, its tensors and description, and names; the error must contain one
    of them.
    """
    for name, tensor in stored.tensors.items():

        def types(**changes: Any) -> dict[str, Any] | None:
            return None if stored.types is None else {**stored.types, **changes}

        others = {other: value for other, value in stored.tensors.items() if other != name}
        lacking = types()
        if lacking is not None:
            del lacking[name]
        prefix = name.rpartition(".")[0]
        is_folded = stored.types is not None and stored.types.get(f"{prefix}.weight") == "W8A8"
        if not (is_folded and name.endswith(".bias")):
            yield f"removed {name}", others, lacking, {name}
        new = name.replace("layers.0.", "layers.0.old_") if "layers.0." in name else f"old_{name}"
        yield f"renamed {name}", {**others, new: tensor}, types(), {name, new}
        yield f"longer {name}", {**others, name: torch.cat([tensor, tensor])}, types(), {name}
        if tensor.shape != (1, tensor.numel()):
            yield f"flat {name}", {**others, name: tensor.reshape(1, -1)}, types(), {name}
        added = f"{prefix}.bias" if f"{prefix}.bias" not in stored.tensors else f"{prefix}.rest"
        if added.endswith("bias") and is_folded:
            added = f"{prefix}.rest"
        yield f"added {added}", {**stored.tensors, added: torch.ones(3)}, types(), {added}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("qwen2", "FLOAT"),
        ("qwen3", "FLOAT"),
        ("deepseek", "FLOAT"),
        ("qwen2", "W8A8"),
        ("deepseek", "W8A8_DYNAMIC"),
        ("qwen2", "W8A16"),
        ("qwen2", "compressed-tensors"),
        ("deepseek", "awq"),
    ],
)
def test_a_tensor_that_differs_from_the_models_is_named(name, kind, write, registered, tmp_path):
    stored = Stored(write(name, kind))
    stored.load(stored.tensors, stored.types, tmp_path / "whole")
    wrong = []
    for what, tensors, types, named in spoilt(stored):
        try:
            stored.load(tensors, types, tmp_path / "spoilt")
        except CoreError as error:
            named |= {name.replace(".qweight", ".weight") for name in named}
            named |= {name.replace(".weight_packed", ".weight") for name in named}
            if not any(name in str(error) for name in named):
                wrong.append(f"{what}: {error}")
        else:
            wrong.append(f"{what}: no error")
    assert not wrong, f"{len(wrong)}:\n" + "\n".join(wrong)


def listed(weights: Weights) -> Weights:
    """Reads all tensors before copying the first."""
    return list(weights)


def put_together(weights: Weights) -> Weights:
    """Joins tensors before loading, as Falcon joins queries, keys and values."""
    return ((name, torch.cat([tensor[:1], tensor[1:]])) for name, tensor in weights)


@pytest.mark.parametrize("taken", [listed, put_together])
def test_a_model_that_does_not_copy_tensors_one_by_one_as_they_are_is_watched(
    taken, write, registered, tmp_path
):
    stored = Stored(write("qwen2", "FLOAT"))
    network = stored.model.network
    load = network.load_weights
    network.load_weights = lambda weights: load(taken(weights))
    stored.load(stored.tensors, None, tmp_path / "whole")
    name = "model.norm.weight"
    others = {other: tensor for other, tensor in stored.tensors.items() if other != name}
    with pytest.raises(CoreError, match=name):
        stored.load(others, None, tmp_path / "spoilt")


@pytest.fixture(scope="module")
def static(write: Callable[[str, str], Path]) -> Path:
    return write("qwen2", "W8A8")


@pytest.mark.parametrize(
    ("part", "value", "told"),
    [
        ("input_scale", 0.0, "holds 0.0 (1 of 1 entries are out of range) and must hold positive"),
        ("input_scale", -0.5, "holds -0.5"),
        ("deq_scale", float("nan"), "holds nan (1 of 96 entries"),
        ("deq_scale", float("inf"), "holds inf"),
        ("input_offset", 0.5, "holds 0.5 (1 of 1 entries are out of range) and must hold integers"),
        ("input_offset", 300.0, "holds 300.0"),
    ],
)
def test_an_unusable_value_is_named_with_its_file(part, value, told, static, registered, tmp_path):
    stored = Stored(static)
    name = f"model.layers.0.mlp.up_proj.{part}"
    tensors = {**stored.tensors, name: stored.tensors[name].clone()}
    tensors[name][0] = value
    with pytest.raises(CoreError, match="") as error:
        stored.load(tensors, stored.types, tmp_path / "spoilt")
    assert f"{WRITTEN}: {name} {told}" in str(error.value)


def test_a_shard_that_is_cut_short_is_named(static, registered, tmp_path):
    stored = Stored(static)
    directory = tmp_path / "cut"
    shutil.copytree(static, directory)
    whole = (directory / WRITTEN).read_bytes()
    (directory / WRITTEN).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CoreError, match=rf"{WRITTEN} has \d+ bytes .* it is cut short"):
        stored.model.load(directory)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_scales_as_bits_load_into_a_model_of_either_dtype(dtype, static, registered, tmp_path):
    """ModelSlim stores raw bits for models of unknown dtype."""
    stored = Stored(static, dtype)
    name = "model.layers.0.mlp.down_proj.deq_scale"
    floats = stored.tensors[name]
    bits = floats.view(torch.int32).to(torch.int64)
    stored.load({**stored.tensors, name: bits}, stored.types, tmp_path / "bits")
    found = stored.model.parameters()[name]
    assert torch.equal(found, floats if dtype == torch.bfloat16 else bits)
