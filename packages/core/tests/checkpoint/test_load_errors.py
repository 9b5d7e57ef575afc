"""If a checkpoint does not load, the message names the damaged file."""

from pathlib import Path

import torch
from safetensors.torch import save_file

from vllm_davinci.core.checkpoint.load_errors import damaged_files, describe_damage


def checkpoint(directory: Path) -> tuple[Path, Path]:
    paths = directory / "model-1.safetensors", directory / "model-2.safetensors"
    for path in paths:
        save_file({"weight": torch.zeros(64)}, path)
    return paths


def test_intact_files_are_not_reported(tmp_path: Path):
    checkpoint(tmp_path)
    assert list(damaged_files(tmp_path)) == []


def test_a_truncated_file_is_named_with_its_size(tmp_path: Path):
    whole, truncated = checkpoint(tmp_path)
    truncated.write_bytes(truncated.read_bytes()[:-100])
    message = describe_damage(str(tmp_path), ValueError("incomplete"))
    assert f"{truncated} ({truncated.stat().st_size} bytes)" in message
    assert str(whole) not in message


def test_a_file_of_garbage_is_named(tmp_path: Path):
    _, garbage = checkpoint(tmp_path)
    garbage.write_bytes(b"\xff" * 1000)
    assert [path for path, _ in damaged_files(tmp_path)] == [garbage]


def test_an_unreadable_model_that_is_no_directory_keeps_the_cause():
    message = describe_damage("some/model", ValueError("header too large"))
    assert "some/model" in message
    assert "header too large" in message
    assert "again" in message
