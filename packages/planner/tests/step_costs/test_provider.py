"""Step-time tables are found for their engine while the timing model that made them is
installed.
"""

import json
from itertools import pairwise
from pathlib import Path

import pytest

from vllm_davinci.planner.deployments.table import all_deployments
from vllm_davinci.planner.step_costs import provider
from vllm_davinci.planner.step_costs.provider import StepCostsFiles, cache_folder, file_name
from vllm_davinci.vnpu.timing import load_machine

ENGINE = {
    "architecture": "DeepseekV3ForCausalLM",
    "chip": "Ascend910_9391",
    "tensor_parallel_size": 8,
    "data_parallel_size": 2,
}


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns the path of this engine's table, which does not exist yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    file = cache_folder() / file_name(ENGINE)
    file.parent.mkdir(parents=True)
    return file


def write(file: Path, figures: str) -> None:
    content = {"chip": "ascend910c", "topology": "supernode", "figures": figures}
    file.write_text(json.dumps(content))


def test_a_file_of_the_installed_model_is_found(kept: Path):
    assert StepCostsFiles().find(ENGINE) is None
    write(kept, load_machine("ascend910c", "supernode").hash)
    assert StepCostsFiles().find(ENGINE) == kept
    assert StepCostsFiles().find({**ENGINE, "tensor_parallel_size": 16}) is None


@pytest.mark.parametrize("figures", ["0123456789abcdef", ""])
def test_a_file_of_another_state_of_the_model_is_not(kept: Path, figures: str):
    write(kept, figures)
    assert StepCostsFiles().find(ENGINE) is None


def test_a_file_that_came_with_the_package_is_found_where_none_was_made(
    kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(provider, "SHIPPED", tmp_path / "shipped")
    shipped = tmp_path / "shipped" / file_name(ENGINE)
    shipped.parent.mkdir()
    write(shipped, "0123456789abcdef")
    assert StepCostsFiles().find(ENGINE) is None  # made by another version of the timing model
    current = load_machine("ascend910c", "supernode").hash
    write(shipped, current)
    assert StepCostsFiles().find(ENGINE) == shipped
    write(kept, current)
    assert StepCostsFiles().find(ENGINE) == kept


def test_files_of_the_package_have_the_names_of_their_engines():
    files = sorted(provider.SHIPPED.glob("*.json"))
    assert files
    for file in files:
        content = json.loads(file.read_text(encoding="utf-8"))
        assert file.name == file_name(content["engine"])
        assert content["deployment"] in all_deployments()
        assert content["steps"] and content["decodes"]
        fastest = [min(row["by_method"].values()) for row in content["decodes"]]
        # More requests never take much less time, because they read all weights that fewer read.
        assert all(more > 0.95 * fewer for fewer, more in pairwise(fastest)), file.name


@pytest.mark.nightly("planning")
def test_tables_of_the_package_are_current():
    """Engines ignore stale tables: `nox -s step_costs` stamps or remakes them."""
    stale = [file.name for file in provider.SHIPPED.glob("*.json") if not provider.is_current(file)]
    assert not stale, f"{len(stale)} tables are from another timing model: {stale[:3]}"


def test_an_engine_with_more_chips_than_any_machine_is_reported(kept: Path):
    file, reason = StepCostsFiles().make({**ENGINE, "data_parallel_size": 999}, "model", [])
    assert file is None
    assert "no machine of the timing model has 7992 Ascend910_9391" in reason


def test_a_model_that_cannot_be_modelled_is_reported(kept: Path, tmp_path: Path):
    file, reason = StepCostsFiles().make(ENGINE, str(tmp_path), [])
    assert file is None
    assert "modelling the steps failed" in reason and "config.json" in reason
