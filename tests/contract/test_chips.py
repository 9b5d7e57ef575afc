"""A chip is one file of vnpu's `chips/`; the device's table and core's rows agree with it."""

import re
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

from vllm_davinci.core.device.soc import SOCS, soc_of
from vllm_davinci.vnpu.timing import chip_files

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "ci"))
CHIPS = {path.stem: chip_files.read_chip(path) for path in sorted(chip_files.FOLDER.glob("*.toml"))}


def test_core_has_every_chip_as_its_file_states_it() -> None:
    """If this fails after a chip file was changed, run `nox -s docs`."""
    rows = import_module("chip_rows")
    text = (ROOT / rows.ROWS).read_text(encoding="utf-8")
    assert text == rows.chip_rows(chip_files)
    known = {soc.name for soc in SOCS} | {"Ascend"}  # UNKNOWN
    assert known == {chip["soc_prefix"] for chip in CHIPS.values()}


@pytest.mark.parametrize("name", CHIPS)
def test_core_finds_a_chip_by_the_name_that_the_runtime_reports(name: str) -> None:
    chip, row = CHIPS[name], soc_of(CHIPS[name]["soc"])
    assert row.memory_bytes == chip_files.amount(chip["memory"])
    assert (torch.bfloat16 in row.dtypes) == chip["has_bfloat16"]
    assert (row.fused_experts is None) == ("fused_experts" not in chip)


@pytest.mark.parametrize("name", CHIPS)
def test_the_names_of_a_chip_are_its_own(name: str) -> None:
    chip = CHIPS[name]
    fitting = [each for each in CHIPS.values() if chip["soc"].startswith(each["soc_prefix"])]
    assert max(fitting, key=lambda each: len(each["soc_prefix"])) is chip


def test_sources_query_properties_of_chips_and_never_compare_their_names() -> None:
    """`chip_of` and `soc_of` find a chip's row by the prefix in its file."""
    serving = ("core", "kernels", "models", "multistream", "vnpu")
    sources = [
        path
        for name in serving
        for pattern in ("csrc/**/*.cpp", "src/**/*.py")
        for path in (ROOT / "packages" / name).glob(pattern)
    ]
    compared = re.compile(r"(starts_?with|rfind|find|==|removeprefix)\W{0,4}(Ascend\d|soc_name)")
    naming = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in sources
        for line in path.read_text(encoding="utf-8").splitlines()
        if compared.search(line) or ("soc_name." in line and "with" in line)
    ]
    assert not naming
