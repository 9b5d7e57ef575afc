"""A chip is one file of vnpu's `chips/`: the device's table and core's rows say what it says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_davinci.core.device.soc import SOCS, FusedExperts, soc_of
from vllm_davinci.vnpu.timing.chip_files import FOLDER, amount, read_chip

CHIPS = {path.stem: read_chip(path) for path in sorted(FOLDER.glob("*.toml"))}


def numbers(allowed: Any) -> set[int]:
    if isinstance(allowed, dict):
        return set(range(allowed["least"], allowed["most"] + 1, allowed["step"]))
    return set(allowed)


def stated(limits: dict[str, Any] | None) -> tuple[Any, ...] | None:
    if not limits:
        return None
    names = ("max_tokens", "max_experts", "max_local_experts", "weights_at_dispatch")
    return (
        numbers(limits["ranks"]),
        numbers(limits["hidden_sizes"]),
        *(limits[name] for name in names),
    )


def known(limits: FusedExperts | None) -> tuple[Any, ...] | None:
    if limits is None:
        return None
    return (
        set(limits.ranks),
        set(limits.hidden_sizes),
        limits.max_tokens,
        limits.max_experts,
        limits.max_local_experts,
        limits.weights_at_dispatch,
    )


@pytest.mark.parametrize("name", CHIPS)
def test_core_knows_a_chip_as_its_file_states_it(name: str) -> None:
    """Where this fails after a file was added: add the chip's row to `core/device/soc.py`.

    A chip whose figures are those of `UNKNOWN` needs no row.
    """
    chip = CHIPS[name]
    row = soc_of(chip["soc"])
    limits = chip["limits"]
    assert row.cube_cores == amount(chip["figures"]["cube_cores"])
    assert row.memory_bytes == amount(chip["memory"])
    assert row.graphs.streams == amount(limits["streams"])
    assert row.graphs.events == amount(limits["events"])
    assert (torch.bfloat16 in row.dtypes) == chip["has_bfloat16"]
    assert known(row.fused_experts) == stated(chip.get("fused_experts"))


def test_every_chip_that_core_knows_has_a_file() -> None:
    assert {soc.name for soc in SOCS} <= {chip["soc_prefix"] for chip in CHIPS.values()}


@pytest.mark.parametrize("name", CHIPS)
def test_the_names_of_a_chip_are_its_own(name: str) -> None:
    chip = CHIPS[name]
    fitting = [each for each in CHIPS.values() if chip["soc"].startswith(each["soc_prefix"])]
    assert max(fitting, key=lambda each: len(each["soc_prefix"])) is chip


def test_chips_are_named_by_nobody_else() -> None:
    """C++ asks a chip for what it has, and compares no SoC name."""
    sources = Path(__file__).parents[2] / "packages" / "vnpu" / "csrc"
    naming = [
        str(path.relative_to(sources))
        for path in sources.rglob("*.cpp")
        if "soc_name.rfind" in path.read_text() or "soc_name.starts_with" in path.read_text()
    ]
    assert not naming
