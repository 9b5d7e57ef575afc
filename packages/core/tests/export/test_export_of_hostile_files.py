"""A malicious checkpoint is quantized unchanged, or refused naming a file."""

from collections import Counter
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from vllm_davinci.core.checkpoint.check import check_checkpoint
from vllm_davinci.core.errors import CoreError
from vllm_davinci.core.export.exporter import Exporter
from vllm_davinci_testing.engines.hostile_checkpoints import (
    PARTS,
    config_mutations,
    copies,
    counted_outcomes,
    files_of,
    limited,
    mutations,
    names_a_file_of,
)


@pytest.fixture(scope="module")
def told() -> Iterator[Counter[str]]:
    yield from counted_outcomes("others")


def export(directory: Path, destination: Path) -> dict[str, torch.Tensor]:
    Exporter(directory, destination, "W8A8_DYNAMIC", torch.bfloat16, {}).run(lambda count: None)
    written = files_of(destination)
    return {name: each for file in written for name, each in load_file(file).items()}


def outcome_of_check(directory: Path) -> str:
    with limited():
        report = check_checkpoint(directory)
    if report.can_load:
        return "can be loaded"
    assert all(report.problems())
    return "refused by name"


def outcome_of_export(
    directory: Path, destination: Path, right: dict[str, torch.Tensor], *, is_same: bool
) -> str:
    made, refusal = {}, ""
    try:
        with limited():
            made = export(directory, destination)
    except CoreError as error:
        refusal = str(error)
    if refusal:
        assert names_a_file_of(directory, refusal), f"names no file: {refusal}"
        assert not destination.exists(), "left something behind"
        return "refused by name"
    if is_same:
        assert made.keys() == right.keys()
        assert all(torch.equal(made[name], right[name]) for name in right), "wrote other weights"
        return "written equal"
    return "written"


@pytest.mark.parametrize(
    "part", [0, *(pytest.param(part, marks=pytest.mark.thorough) for part in range(1, PARTS))]
)
def test_a_hostile_checkpoint_is_checked_and_written_equal_or_refused_by_name(
    part: int, whole: Path, told: Counter[str], tmp_path: Path
):
    right = export(whole, tmp_path / "right")
    assert check_checkpoint(whole).can_load
    changed = chain(mutations(whole), config_mutations(whole))
    wrong = []
    for kind, directory in copies(whole, changed, part, tmp_path):
        # The configuration defines what weights mean, so other values may be valid.
        is_same = kind != "configuration"
        made = tmp_path / f"made{directory.name}"
        try:
            told[f"check-model, {kind}: {outcome_of_check(directory)}"] += 1
            how = outcome_of_export(directory, made, right, is_same=is_same)
            told[f"quantize, {kind}: {how}"] += 1
        except Exception as error:
            wrong.append(f"{directory.name} {kind}: {type(error).__name__} {error}"[:900])
    assert not wrong, "\n".join(wrong)
