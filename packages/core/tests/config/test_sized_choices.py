"""Step-time tables choose by a step's number of tokens."""

import json
from pathlib import Path
from typing import Any

import pytest

from vllm_davinci.core.config.sized_choices import PREFETCH_BYTES, SizedChoices
from vllm_davinci.core.errors import ConfigurationError


def written(directory: Path, *decodes: dict[str, Any]) -> Path:
    file = directory / "costs.json"
    file.write_text(json.dumps({"decodes": decodes}))
    return file


def test_a_step_takes_the_choice_of_the_nearest_size_below(tmp_path: Path):
    file = written(
        tmp_path,
        {"tokens": 4, PREFETCH_BYTES: 18},
        {"tokens": 8, PREFETCH_BYTES: 0},
        {"tokens": 16},
    )
    found = SizedChoices.read(file, "decodes", PREFETCH_BYTES)
    assert found is not None
    assert [found.at(tokens) for tokens in (1, 4, 7, 8, 15, 16, 99)] == [
        18, 18, 18, 0, 0, None, None,
    ]  # fmt: skip


def test_rows_that_choose_nothing_leave_the_option_as_it_is(tmp_path: Path):
    assert SizedChoices.read(written(tmp_path, {"tokens": 4}), "decodes", PREFETCH_BYTES) is None
    assert SizedChoices.read(None, "decodes", PREFETCH_BYTES) is None


@pytest.mark.parametrize("choice", [-1, 0.5, "18", True])
def test_an_invalid_number_of_bytes_is_refused(tmp_path: Path, choice: object):
    file = written(tmp_path, {"tokens": 4, PREFETCH_BYTES: choice})
    with pytest.raises(ConfigurationError, match="prefetch_bytes is"):
        SizedChoices.read(file, "decodes", PREFETCH_BYTES)


def test_a_file_without_decodes_is_refused(tmp_path: Path):
    (tmp_path / "costs.json").write_text("{}")
    with pytest.raises(ConfigurationError, match="has no decodes"):
        SizedChoices.read(tmp_path / "costs.json", "decodes", PREFETCH_BYTES)
