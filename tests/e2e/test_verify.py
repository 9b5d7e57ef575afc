"""`vllm-davinci verify` on virtual NPUs: a whole run; ten planted differences are named.

A chip file, settings of the virtual NPU and a fault plan produce the differences. They cannot
produce a wrong operator result or wrong tokens, so the test edits these into the second report.
"""

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from vllm_davinci.verify.comparison import Difference, differences
from vllm_davinci.verify.fit import fit, write_chip
from vllm_davinci.verify.report import findings_of, read_report
from vllm_davinci.vnpu.timing.machine import load_machine
from vllm_davinci_testing.processes.programs import run_to_end

LIMIT_S = 1800.0
MODEL = "qwen3-30b-a3b"
# The planted chip's figures; all others are the ascend910b3's.
PLANTED_FIGURES = """
based_on = "ascend910b3"
soc = "Ascend910B3"

[figures]
hbm_bandwidth = { value = 1.2, unit = "TB/s", source = "planted" }
host_operator_launch = { value = 30, unit = "us", source = "planted" }
cube_float16 = { value = 200, unit = "TOP/s", source = "planted" }
"""
# SwiGLU appears to be missing, and the runtime has fewer streams.
PLANTED_FAULTS = "launch:aclnnSwiGlu@1+=561003;stream@300+=207000"


def verify(directory: Path, *options: str, virtual: tuple[str, ...] = ()) -> Path:
    """Runs `vllm-davinci verify` on a virtual NPU; returns the directory, whatever the findings."""
    command = Path(sys.executable).parent
    # Drop the tests' own settings: SoC `reference`, and a directory for refusals.
    own = {name: value for name, value in os.environ.items() if not name.startswith("VNPU_")}
    done = run_to_end(
        [
            *(str(command / "vnpu"), "run", *virtual, "--", str(command / "vllm-davinci")),
            *("verify", "--directory", str(directory), *options),
        ],
        LIMIT_S,
        env=own,
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return directory


@pytest.mark.thorough
def test_a_virtual_npu_is_as_we_believe(tmp_path: Path, repository: Path) -> None:
    models = (repository / "checkpoints" / name for name in ("tiny_llama", "tiny_deepseek"))
    checkpoints = ("--checkpoints", *map(str, models))
    virtual = ("--chip", "ascend910b3", "--devices", "2")
    directory = verify(tmp_path, *checkpoints, virtual=virtual)
    report = read_report(directory)
    assert not [
        (name, each["value"], each.get("details"))
        for name, each in findings_of(report).items()
        if each.get("passed") is False
    ]
    assert len(report["parts"]) == 7 and all(part["findings"] for part in report["parts"])
    page = (directory / "report.html").read_text(encoding="utf-8")
    assert page.count("<svg") >= 6 and "findings are as expected" in page
    before = (directory / "report.json").read_text(encoding="utf-8")
    verify(directory, *checkpoints, virtual=virtual)
    again = json.loads((directory / "report.json").read_text(encoding="utf-8"))
    assert again["parts"] == json.loads(before)["parts"], "a second run has measured again"


@pytest.mark.thorough
def test_ten_planted_differences_are_found_and_named(tmp_path: Path) -> None:
    parts = ("--only", "environment,operators,constraints,costs", "--models", MODEL)
    one = read_report(verify(tmp_path / "one", *parts, virtual=("--chip", "ascend910b3")))
    chip = tmp_path / "planted.toml"
    chip.write_text(PLANTED_FIGURES, encoding="utf-8")
    settings = ("--chip", str(chip), "--memory", "32GiB", "--cann", "9.0", "--devices", "4")
    other = read_report(
        verify(tmp_path / "other", *parts, virtual=(*settings, "--faults", PLANTED_FAULTS))
    )
    older = ("--only", "constraints")
    strict = read_report(
        verify(tmp_path / "strict", *older, virtual=("--soc", "Ascend910B3", "--cann", "8.3"))
    )
    found = _found(one, other)
    planted = {
        "a wrong result": _named(found, f"operators/npu_rms_norm/{MODEL}/16 tokens, bfloat16"),
        "an operator that is not there": {
            *_named(found, f"operators/npu_swiglu/{MODEL}"),
            *_named(found, f"operators/compiled experts/{MODEL}"),  # launches SwiGLU
        },
        "a looser constraint": {
            name
            for name in _named(found, "constraints/")
            if found[name].one.isdigit() and found[name].other == "taken"
        },
        "another bandwidth": _named(found, "costs/memory/copy of 1024 MiB"),
        "slower launches": _named(found, "costs/launches/element-wise operator"),
        "slower products": _named(found, "costs/products/float16"),
        "wrong tokens": _named(found, "tokens/tiny_llama"),
        "fewer streams": _named(found, "environment/chip/streams"),
        "other memory": _named(found, "environment/chip/memory bytes"),
        "fewer devices": _named(found, "environment/chip/devices"),
        "another release": _named(found, "environment/chip/CANN"),
        "a stricter constraint": {
            each.name
            for each in differences({**one, "parts": _constraints_of(one)}, strict)
            if each.one == "taken" and each.other.isdigit()
        },
    }
    assert not [name for name, names in planted.items() if not names], sorted(found)
    assert found["environment/chip/streams"].other < 300
    assert found["tokens/tiny_llama"].why == "from entry 1 on"
    others = set(found) - set().union(*planted.values())
    assert not [name for name in others if name.startswith("operators/")], "more than was planted"
    _fitted_is_planted(other, chip, tmp_path / "fitted.toml")


def _found(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Difference]:
    """Edits a wrong result and wrong tokens into the reports; returns their differences by name."""
    wrong = findings_of(other)[f"operators/npu_rms_norm/{MODEL}/16 tokens, bfloat16"]
    wrong.update(value=0.31, passed=False)
    for report, tokens in ((one, [[5, 6], [7, 8]]), (other, [[5, 6], [7, 9]])):
        told = {"name": "tokens/tiny_llama", "value": tokens, "kind": "exact", "passed": True}
        report["parts"].append({"name": "tokens", "findings": [told]})
    return {each.name: each for each in differences(one, other)}


def _named(found: dict[str, Difference], beginning: str) -> set[str]:
    return {name for name in found if name.startswith(beginning)}


def _constraints_of(report: dict[str, Any]) -> list[dict[str, Any]]:
    return [part for part in report["parts"] if part["name"] == "constraints"]


def _fitted_is_planted(report: dict[str, Any], planted: Path, fitted: Path) -> None:
    """Asserts that fitting a chip file to the second report yields the planted chip's figures."""
    write_chip(fit(report, "ascend910b3"), fitted)
    one, other = (load_machine(str(path), "node-of-8").figures for path in (planted, fitted))

    def rate(figures: Mapping[str, int], peak: str, share: str) -> float:
        return figures[peak] * figures[share] / 1e6

    for peak, share in (
        ("hbm_bandwidth", "hbm_share"),
        ("cube_bfloat16", "matmul_share"),
        ("cube_float16", "matmul_share"),
        ("cube_int8", "matmul_share"),
        ("cube_bfloat16", "attention_share"),
    ):
        assert rate(other, peak, share) == pytest.approx(rate(one, peak, share), rel=0.1), peak
    for name in ("host_operator_launch", "host_event_call", "vector_static", "matmul_static"):
        assert other[name] == pytest.approx(one[name], rel=0.15), name
