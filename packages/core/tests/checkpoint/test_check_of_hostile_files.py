"""A check of malicious files ends with a report, an export with an error.

test_export_of_hostile_files.py changes every value of a header, an index and a configuration.
"""

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from vllm_davinci.core.checkpoint.check import check_checkpoint
from vllm_davinci.core.errors import CheckpointError
from vllm_davinci.core.export.exporter import Exporter
from vllm_davinci.core.quantization.config import DESCRIPTION
from vllm_davinci.core.quantization.formats.modelslim import QuantDescription
from vllm_davinci.core.weight_files.files import INDEX_NAME, read_header, tensor_files

FILE = "model.safetensors"
WEIGHT = "model.layers.0.mlp.down_proj.weight"
EXPERT = "model.layers.0.mlp.experts.{}.down_proj.weight"
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 1,
    "num_experts": 2,
    "hidden_size": 8,
    "vocab_size": 16,
    "num_attention_heads": 2,
    "tie_word_embeddings": False,
    "text_config": None,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [8, 8]},
}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    directory = tmp_path / "checkpoint"
    directory.mkdir()
    tensors = {
        "lm_head.weight": torch.ones(16, 8),
        WEIGHT: torch.ones(8, 8),
        **{EXPERT.format(number): torch.ones(8, 8) for number in range(2)},
    }
    save_file(tensors, directory / FILE)
    write(directory / "config.json", {**CONFIG, "quantization_config": None})
    write(directory / INDEX_NAME, {"metadata": {}, "weight_map": dict.fromkeys(tensors, FILE)})
    assert check_checkpoint(directory).can_load
    return directory


def write(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content))


@pytest.mark.parametrize("name", ["config.json", INDEX_NAME, FILE, DESCRIPTION])
def test_a_pipe_in_place_of_a_file_does_not_block(name: str, checkpoint: Path):
    (checkpoint / name).unlink(missing_ok=True)
    os.mkfifo(checkpoint / name)
    report = check_checkpoint(checkpoint)
    # Without an index, a checkpoint consists of all its files.
    assert report.can_load == (name == INDEX_NAME)


def test_huge_counts_are_reported_as_they_are(checkpoint: Path):
    huge = {"quantization_config": None, "num_hidden_layers": 10**12, "num_experts": 10**12}
    write(checkpoint / "config.json", {**CONFIG, **huge})
    told = check_checkpoint(checkpoint).problems()
    assert "layers: config.json says 1000000000000, and 1, 2, 3, 4, 5, 6, 7, 8 and 9999" in told[0]
    assert "missing: 2, 3, 4, 5, 6, 7, 8, 9 and 999999999990 more" in " ".join(told)
    names = {EXPERT.format(number): "W8A8" for number in (0, 20_000_000)}
    with pytest.raises(CheckpointError, match=r"experts\.1\.down_proj no entry"):
        QuantDescription.parse(names).of_experts("model.layers.0.mlp.experts")


def test_a_header_of_60_gib_is_not_read(checkpoint: Path):
    with (checkpoint / FILE).open("wb") as file:
        file.write(struct.pack("<Q", 60 << 30))
        file.truncate(61 << 30)  # takes no disk space
    with pytest.raises(CheckpointError, match="its header would have 64424509440 bytes"):
        read_header(checkpoint / FILE)


def test_json_nested_too_deeply_is_named(checkpoint: Path):
    (checkpoint / "config.json").write_text("[" * 100_000 + "]" * 100_000)
    with pytest.raises(CheckpointError, match="read"):
        Exporter(checkpoint, checkpoint / "out", "W8A8_DYNAMIC", torch.bfloat16, {}).run(print)
    assert not check_checkpoint(checkpoint).can_load


@pytest.mark.parametrize("name", ["../other.safetensors", "/etc/passwd", "sub/model.safetensors"])
def test_an_index_names_no_files_outside(name: str, checkpoint: Path):
    save_file({"a": torch.ones(1)}, checkpoint.parent / "other.safetensors")
    write(checkpoint / INDEX_NAME, {"weight_map": {WEIGHT: name}})
    with pytest.raises(CheckpointError, match="must be in its directory"):
        tensor_files(checkpoint)


def test_a_link_out_of_the_checkpoint_is_not_copied(checkpoint: Path, tmp_path: Path):
    secret = tmp_path / "id_rsa"
    secret.write_text("secret")
    (checkpoint / "notes.json").symlink_to(secret)
    out = tmp_path / "out"
    export = Exporter(checkpoint, out, "W8A8_DYNAMIC", torch.bfloat16, {})
    with pytest.raises(CheckpointError, match=r"notes\.json is a link to .*id_rsa"):
        export.run(lambda count: None)
    assert not out.exists()


def test_links_of_the_hubs_cache_are_files_of_the_checkpoint(checkpoint: Path, tmp_path: Path):
    snapshot, blobs = tmp_path / "hub" / "snapshots" / "abc", tmp_path / "hub" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (checkpoint / "notes.json").write_text("{}")
    for path in checkpoint.iterdir():
        path.rename(blobs / path.name)
        (snapshot / path.name).symlink_to(Path("../../blobs") / path.name)
    out = tmp_path / "out"
    Exporter(snapshot, out, "W8A8_DYNAMIC", torch.bfloat16, {}).run(lambda count: None)
    assert (out / "notes.json").is_file() and not (out / "notes.json").is_symlink()
