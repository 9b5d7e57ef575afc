"""A malicious checkpoint loads unchanged, or is refused naming a file."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from vllm_davinci.core.checkpoint.load_errors import explained
from vllm_davinci.core.errors import CheckpointError
from vllm_davinci_testing.engines.hostile_checkpoints import (
    PARTS,
    copies,
    counted_outcomes,
    limited,
    mutations,
    names_a_file_of,
)
from vllm_davinci_testing.engines.loaded_model import LoadedModel


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
