"""The report on a good or bad checkpoint directory, from its headers alone."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from vllm_davinci.core.checkpoint.check import check_checkpoint
from vllm_davinci.core.quantization.config import DESCRIPTION
from vllm_davinci.core.weight_files.files import INDEX_NAME
from vllm_davinci.core.weight_files.issues import CheckReport

HIDDEN, INTER, VOCABULARY = 8, 12, 16
ATTENTION = "model.layers.{}.self_attn.{}_proj"


@dataclass
class Checkpoint:
    """A small checkpoint that a test may damage before it is written."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    types: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)

    def floats(self, name: str, *shape: int) -> None:
        self.tensors[name] = torch.ones(shape, dtype=torch.bfloat16)
        self.types[name] = "FLOAT"

    def quantized(self, prefix: str, out: int, columns: int, kind: str = "W8A8_DYNAMIC") -> None:
        parts = {"weight": torch.ones(out, columns, dtype=torch.int8)}
        if kind == "W8A8":
            parts |= {
                "quant_bias": torch.zeros(out, dtype=torch.int32),
                "input_scale": torch.ones(1),
                "input_offset": torch.zeros(1),
                "deq_scale": torch.ones(out),
            }
        else:
            parts |= {"weight_scale": torch.ones(out, 1), "weight_offset": torch.zeros(out, 1)}
        for name, tensor in parts.items():
            self.tensors[f"{prefix}.{name}"] = tensor
            self.types[f"{prefix}.{name}"] = kind

    def write(self, directory: Path) -> Path:
        save_file(self.tensors, directory / "model.safetensors")
        (directory / DESCRIPTION).write_text(json.dumps(self.types))
        (directory / "config.json").write_text(json.dumps(self.config))
        return directory


@pytest.fixture
def checkpoint() -> Checkpoint:
    made = Checkpoint(
        config={
            "num_hidden_layers": 2,
            "hidden_size": HIDDEN,
            "vocab_size": VOCABULARY,
            "n_routed_experts": 2,
        }
    )
    made.floats("model.embed_tokens.weight", VOCABULARY, HIDDEN)
    for layer in range(2):
        for part in "qkvo":
            made.quantized(ATTENTION.format(layer, part), HIDDEN, HIDDEN, "W8A8")
        made.floats(f"model.layers.{layer}.input_layernorm.weight", HIDDEN)
        for expert in range(2):
            experts = f"model.layers.{layer}.mlp.experts.{expert}"
            made.quantized(f"{experts}.gate_proj", INTER, HIDDEN)
            made.quantized(f"{experts}.up_proj", INTER, HIDDEN)
            made.quantized(f"{experts}.down_proj", HIDDEN, INTER)
    return made


def problems(report: CheckReport) -> str:
    return "\n".join(f"{one.subject}: {one.what}" for one in report.issues)


def test_a_whole_checkpoint_can_be_loaded_and_its_layers_are_listed_by_kind(checkpoint, tmp_path):
    found = check_checkpoint(checkpoint.write(tmp_path))
    assert found.can_load
    assert not found.issues
    kinds = {kind.name: (kind.loads, kind.count, kind.dtype) for kind in found.kinds}
    assert kinds["model.layers.*.mlp.experts.*.gate_proj"] == ("W8A8_DYNAMIC", 4, "int8")
    assert kinds["model.layers.*.self_attn.q_proj"] == ("W8A8", 2, "int8")
    assert kinds["model.embed_tokens"] == ("FLOAT", 1, "bfloat16")
    assert found.num_tensors == len(checkpoint.tensors)


def test_a_float_checkpoint_needs_no_description(checkpoint: Checkpoint, tmp_path: Path):
    checkpoint.tensors = {
        name: tensor.bfloat16()
        for name, tensor in checkpoint.tensors.items()
        if name.endswith(".weight")
    }
    checkpoint.write(tmp_path)
    (tmp_path / DESCRIPTION).unlink()
    found = check_checkpoint(tmp_path)
    assert found.can_load
    assert {kind.loads for kind in found.kinds} == {"FLOAT"}


def spoil(checkpoint: Checkpoint, how: str) -> None:
    query = ATTENTION.format(0, "q")
    expert = "model.layers.1.mlp.experts.1"
    if how == "missing scale":
        del checkpoint.tensors[f"{query}.deq_scale"]
        del checkpoint.types[f"{query}.deq_scale"]
    elif how == "wrong shape":
        checkpoint.tensors[f"{query}.deq_scale"] = torch.ones(HIDDEN, 2)
    elif how == "wrong dtype":
        checkpoint.tensors[f"{query}.quant_bias"] = torch.zeros(HIDDEN)
    elif how == "disagreeing parts":
        checkpoint.quantized(query, HIDDEN, HIDDEN)
        for name in ("input_scale", "input_offset", "deq_scale", "quant_bias"):
            del checkpoint.tensors[f"{query}.{name}"], checkpoint.types[f"{query}.{name}"]
    elif how == "disagreeing experts":
        checkpoint.quantized(f"{expert}.gate_proj", INTER, HIDDEN, "W8A8")
    elif how == "unknown type":
        checkpoint.types[f"{expert}.down_proj.weight"] = "W4A4_DYNAMIC"
    elif how == "integers without a type":
        del checkpoint.types[f"{query}.weight"]
    elif how == "entry without a tensor":
        checkpoint.types["model.norm.weight"] = "FLOAT"
    elif how == "missing layer":
        checkpoint.config["num_hidden_layers"] = 3
    elif how == "missing expert":
        checkpoint.config["n_routed_experts"] = 3
    elif how == "vocabulary":
        checkpoint.config["vocab_size"] = 99
    elif how == "quantized cache":
        checkpoint.types["kv_quant_type"] = "C8"
    elif how == "quantized head":
        checkpoint.quantized("lm_head", VOCABULARY, HIDDEN)


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("missing scale", "q_proj.deq_scale: is missing: W8A8 needs it"),
        ("wrong shape", "q_proj.deq_scale: has shape [8, 2] and must have [8]"),
        ("wrong dtype", "q_proj.quant_bias: holds float32 and must hold int32"),
        ("disagreeing parts", "self_attn.q_proj W8A8_DYNAMIC, model.layers.0.self_attn.k_proj"),
        ("disagreeing experts", "model.layers.1.mlp.experts is one product"),
        ("unknown type", "experts.1.down_proj.weight has quantization type 'W4A4_DYNAMIC'"),
        ("integers without a type", "q_proj.weight: holds int8 and would be loaded as FLOAT"),
        ("entry without a tensor", "model.norm.weight: 1 tensors have an entry"),
        ("missing layer", "config.json says 3, and 2 have no tensors"),
        ("missing expert", "config.json says 3 experts, 2 are there; missing: 2"),
        ("vocabulary", "has shape [16, 8]; config.json says [99, 8]"),
        ("quantized cache", "kv_quant_type 'C8'"),
        ("quantized head", "lm_head.weight: is W8A8_DYNAMIC; embeddings and LM heads"),
    ],
)
def test_a_problem_names_its_tensor_or_file(how, told, checkpoint, tmp_path):
    spoil(checkpoint, how)
    found = check_checkpoint(checkpoint.write(tmp_path))
    assert not found.can_load
    assert told in problems(found)


def test_layers_without_an_entry_are_noted_once(checkpoint: Checkpoint, tmp_path: Path):
    checkpoint.floats("lm_head.weight", VOCABULARY, HIDDEN)
    del checkpoint.types["lm_head.weight"]
    for layer in range(2):
        checkpoint.floats(f"model.layers.{layer}.mlp.gate.weight", 2, HIDDEN)
        del checkpoint.types[f"model.layers.{layer}.mlp.gate.weight"]
    found = check_checkpoint(checkpoint.write(tmp_path))
    assert found.can_load
    assert problems(found) == (
        "lm_head, model.layers.0.mlp.gate, model.layers.1.mlp.gate: no entry in the description: "
        "loaded as FLOAT"
    )


def test_a_truncated_file_is_reported_with_both_sizes(checkpoint: Checkpoint, tmp_path: Path):
    path = checkpoint.write(tmp_path) / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])
    found = check_checkpoint(tmp_path)
    assert f"has {len(whole) - 5} bytes and its header describes {len(whole)}" in problems(found)
    path.write_bytes(b"not a tensor file")
    assert "is not a safetensors file" in problems(check_checkpoint(tmp_path))


def test_the_index_is_compared_with_the_files(checkpoint: Checkpoint, tmp_path: Path):
    checkpoint.write(tmp_path)
    places = dict.fromkeys(checkpoint.tensors, "model.safetensors")
    index = tmp_path / INDEX_NAME
    index.write_text(json.dumps({"weight_map": {**places, "lost.weight": "model.safetensors"}}))
    assert "lost.weight: the index puts it into a file" in problems(check_checkpoint(tmp_path))
    index.write_text(json.dumps({"weight_map": {**places, "lost.weight": "part2.safetensors"}}))
    assert "names part2.safetensors, 1 of 2 files, which are missing" in problems(
        check_checkpoint(tmp_path)
    )


def test_a_directory_without_a_checkpoint_lists_what_is_missing(tmp_path: Path):
    assert "has no config.json" in problems(check_checkpoint(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert "holds no *.safetensors file" in problems(check_checkpoint(tmp_path))


def test_another_quantization_is_named(checkpoint: Checkpoint, tmp_path: Path):
    checkpoint.config["quantization_config"] = {"quant_method": "quark"}
    checkpoint.write(tmp_path)
    (tmp_path / DESCRIPTION).unlink()
    found = check_checkpoint(tmp_path)
    assert not found.can_load
    assert "quantization method 'quark' is not available" in problems(found)


def test_settings_that_lack_the_number_of_bits_are_named(checkpoint: Checkpoint, tmp_path: Path):
    checkpoint.config["quantization_config"] = {"quant_method": "gptq"}
    checkpoint.write(tmp_path)
    (tmp_path / DESCRIPTION).unlink()
    assert "config.json says gptq and has no bits" in problems(check_checkpoint(tmp_path))
