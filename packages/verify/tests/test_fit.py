"""A chip file is fitted to a report's figures: rates without fixed costs; refused without
figures.
"""

from pathlib import Path
from typing import Any

import pytest

from vllm_davinci.verify.errors import VerificationError
from vllm_davinci.verify.finding import Finding, Kind
from vllm_davinci.verify.fit import fit, write_chip
from vllm_davinci.verify.measured_sizes import MEMORY_MIB, PRODUCT_SIZES
from vllm_davinci.vnpu.timing.machine import load_machine

STATIC_S = 7e-6  # of every launch, not part of a rate


def rated(name: str, amount: float, rate: float) -> Finding:
    details = {"amount": amount, "seconds": STATIC_S + amount / rate}
    return Finding(name, 1.0, Kind.FIGURE, "any", details=details)


def report_of(bfloat16: float = 200e12, bandwidth: float = 0.9e12) -> dict[str, Any]:
    findings = [
        Finding("environment/chip/SoC", "Ascend910B3"),
        Finding("environment/chip/memory bytes", 61 << 30),
        Finding("costs/launches/element-wise operator", 12.5, Kind.FIGURE, "us"),
        Finding("costs/launches/element-wise operator in a graph", 3.25, Kind.FIGURE, "us"),
        Finding("costs/events/record", 1.75, Kind.FIGURE, "us"),
    ]
    for size in PRODUCT_SIZES:
        shape = f"{size} x {size} x {size}"
        findings.append(rated(f"costs/products/bfloat16, {shape}", 2 * size**3, bfloat16))
        findings.append(rated(f"costs/products/int8, {shape}", 2 * size**3, 2 * bfloat16))
    for mib in MEMORY_MIB:
        findings.append(rated(f"costs/memory/copy of {mib} MiB", 2 * (mib << 20), bandwidth))
    told = [finding.fields() for finding in findings]
    return {"format": 1, "written": "2026-11-25T01:02:03", "parts": [{"findings": told}]}


def test_figures_of_a_report_are_taken_by_the_virtual_npu(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    text = fit(report_of(), "ascend910b3")
    write_chip(text, path)
    machine = load_machine(str(path), "node-of-8")
    stated = load_machine("ascend910b3", "node-of-8")
    rate = machine.figures["matmul_share"] / 1e6 * machine.figures["cube_bfloat16"]
    assert rate == pytest.approx(200e12, rel=2e-3)
    share = machine.figures["matmul_share"] / 1e6
    assert machine.figures["cube_int8"] * share == pytest.approx(400e12, rel=2e-3)
    memory = machine.figures["hbm_share"] / 1e6 * machine.figures["hbm_bandwidth"]
    assert memory == pytest.approx(0.9e12, rel=2e-3)
    assert machine.figures["host_operator_launch"] == 12_500_000
    assert machine.figures["host_event_call"] == 1_750_000
    assert machine.figures["vector_static"] == 3_250_000 - stated.figures["graph_node"]
    assert machine.figures["l2_bandwidth"] == stated.figures["l2_bandwidth"]
    assert machine.memory_bytes == 61 << 30
    assert "measured by verify on Ascend910B3, 2026-11-25: costs/events/record" in text
    measured = {each.figure.split(": ")[1] for each in machine.assumptions}
    assert not measured & {"matmul_share", "host_operator_launch", "vector_static"}


def test_a_rate_above_the_stated_peak_becomes_the_peak(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    write_chip(fit(report_of(bfloat16=400e12), "ascend910b3"), path)
    machine = load_machine(str(path), "node-of-8")
    assert machine.figures["matmul_share"] == 1_000_000
    assert machine.figures["cube_bfloat16"] == pytest.approx(400e12, rel=2e-3)


@pytest.mark.parametrize(
    ("report", "chip", "said"),
    [
        ({"format": 1, "written": "", "parts": []}, "ascend910b3", "the report has no times"),
        (report_of(), "ascend910b9", "the virtual NPU knows ascend"),
        (report_of(), "ascend910", "its figures are not known"),
    ],
)
def test_missing_figures_are_refused(report: dict[str, Any], chip: str, said: str) -> None:
    with pytest.raises(VerificationError, match=said):
        fit(report, chip)


def test_a_file_of_another_ending_is_refused(tmp_path: Path) -> None:
    with pytest.raises(VerificationError, match=r"ends in \.toml"):
        write_chip(fit(report_of(), "ascend910b3"), tmp_path / "mine.txt")
