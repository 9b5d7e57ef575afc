"""Prompts of default length fit into the context."""

import json
from pathlib import Path

import pytest

from vllm_davinci.planner.dry_run.default_prompt import fitting_prompt


@pytest.mark.parametrize(
    ("config", "given", "expected"),
    [
        ({"max_position_embeddings": 32768}, [], 1024),
        ({"max_position_embeddings": 1024}, [], 1020),
        ({"max_position_embeddings": 32768}, ["--max-model-len=512"], 508),
        ({"max_position_embeddings": 512}, ["--max_model_len", "2048"], 1024),
        ({"max_position_embeddings": 512}, ["--max-model-len=auto"], 508),
        ({"text_config": {"max_position_embeddings": 256}, "seq_length": 9}, [], 252),
        ({"n_positions": 3}, [], 1),
        ({}, [], 1024),
        ([], [], 1024),
    ],
)
def test_a_prompt_and_its_output_fit_into_the_context(tmp_path, config, given, expected):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert fitting_prompt(str(tmp_path), given, (2, 4)) == expected


def test_a_missing_model_is_left_to_other_checks(tmp_path: Path) -> None:
    assert fitting_prompt(str(tmp_path / "none"), [], (4,)) == 1024
    assert fitting_prompt(None, [], (4,)) == 1024
