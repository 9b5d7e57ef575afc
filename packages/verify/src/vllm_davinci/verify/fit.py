"""`vllm-davinci verify --fit REPORT --chip NAME --output FILE`: fits a chip's figures to a report.

The file is based on a chip of the virtual NPU and states the report's measurements. A rate follows
from the difference of two sizes, so that it excludes the cost of a launch. It becomes a share of
the base's peak, or a new peak if it is higher.
"""

import decimal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from vllm_davinci.verify.errors import VerificationError
from vllm_davinci.verify.measured_sizes import ATTENTION_TOKENS, COPY_MIB, MEMORY_MIB, PRODUCT_SIZES
from vllm_davinci.verify.report import Findings, Report, findings_of

_DIGITS = 4


@dataclass(frozen=True)
class Figure:
    """A line of the file."""

    name: str
    value: float
    unit: str
    finding: str


def fit(report: Report, chip: str) -> str:
    """The text of a chip's file. Raises VerificationError if the report has no times."""
    findings = findings_of(report)
    if "costs/launches/element-wise operator" not in findings:
        raise VerificationError(
            "the report has no times: the part `costs` did not run, or ran on a virtual NPU "
            "without a timing model. Run `vllm-davinci verify --only costs` on a chip, or `vnpu "
            "run --chip NAME --` before it."
        )
    chip, base = _base(chip)
    soc = findings.get("environment/chip/SoC", {}).get("value") or base["soc"]
    source = f"measured by verify on {soc}, {report['written'][:10]}"
    lines = [
        f"# Figures of a report of `vllm-davinci verify`; the others are those of {chip}.",
        f'based_on = "{chip}"',
        f'soc = "{soc}"',
    ]
    memory = findings.get("environment/chip/memory bytes", {}).get("value")
    if memory:
        lines.append(f'memory = {{ value = {memory >> 20}, unit = "MiB", source = "{source}" }}')
    lines += ["", "[figures]"]
    for figure in _figures(findings, base["figures"]):
        value = _number(figure.value)
        lines.append(
            f'{figure.name} = {{ value = {value}, unit = "{figure.unit}", '
            f'source = "{source}: {figure.finding}" }}'
        )
    return "\n".join(lines) + "\n"


def write_chip(text: str, path: Path) -> None:
    """Writes the file and reads it back as the virtual NPU does. Raises VerificationError."""
    if path.suffix != ".toml":
        raise VerificationError(f"--output {path}: expected a name that ends in .toml.")
    path.write_text(text, encoding="utf-8")
    machine = import_module("vllm_davinci.vnpu.timing.machine")
    try:
        machine.load_machine(str(path), "node-of-8")
    except import_module("vllm_davinci.vnpu.errors").MachineError as error:
        raise VerificationError(
            f"--output {path} is not valid for the virtual NPU: {error}"
        ) from error


def _base(chip: str) -> tuple[str, dict[str, Any]]:
    """Name and table of the virtual NPU's chip to base the file on."""
    try:
        files = import_module("vllm_davinci.vnpu.timing.chip_files")
    except ModuleNotFoundError as error:
        raise VerificationError(
            "--fit needs the virtual NPU's chip files: pip install vllm-davinci-vnpu."
        ) from error
    names = files.chip_and_soc(chip)
    if names is None:
        known = sorted(path.stem for path in files.FOLDER.glob("*.toml"))
        raise VerificationError(f"--chip {chip}: the virtual NPU knows {', '.join(known)}.")
    table: dict[str, Any] = files.read_chip(files.FOLDER / f"{names[0]}.toml")
    if "matmul_share" not in table["figures"]:
        raise VerificationError(f"--chip {chip}: its figures are not known; name another chip.")
    return names[0], table


def _figures(findings: Findings, base: dict[str, Any]) -> Iterator[Figure]:
    yield from _products(findings, base)
    yield from _shared(
        findings, base, "attention", "attention_share", "cube_bfloat16",
        _sizes("costs/attention/prefill of {} tokens", ATTENTION_TOKENS),
    )  # fmt: skip
    copies = _sizes("costs/memory/copy of {} MiB", MEMORY_MIB)
    yield from _shared(findings, base, "memory", "hbm_share", "hbm_bandwidth", copies)
    for name, way in (("copy_in_bandwidth", "device"), ("copy_out_bandwidth", "host")):
        names = _sizes(f"costs/copies/to the {way}, {{}} MiB", COPY_MIB)
        if (rate := _slope(findings, names)) is not None:
            yield Figure(name, rate / 1e9, "GB/s", names[-1])
    yield from _times(findings, base)


def _products(findings: Findings, base: dict[str, Any]) -> Iterator[Figure]:
    """Fits bfloat16's share of the peak, and the peaks of other dtypes from their rates over it."""
    names = _sizes("costs/products/bfloat16, {0} x {0} x {0}", PRODUCT_SIZES)
    share = _peak(base, "matmul_share")
    for figure in _shared(findings, base, "product", "matmul_share", "cube_bfloat16", names):
        share = figure.value if figure.name == "matmul_share" else share
        yield figure
    for dtype in ("float16", "float32", "int8"):
        names = _sizes(f"costs/products/{dtype}, {{0}} x {{0}} x {{0}}", PRODUCT_SIZES)
        if (rate := _slope(findings, names)) is not None:
            yield Figure(f"cube_{dtype}", rate / share / 1e12, "TOP/s", names[-1])


def _shared(
    findings: Findings, base: dict[str, Any], what: str, share: str, peak: str, names: list[str]
) -> Iterator[Figure]:
    """States a rate as a share of the base's peak, or as a new peak if it is higher."""
    if (rate := _slope(findings, names)) is None:
        return
    stated = _peak(base, peak)
    if rate > stated:
        unit = "TB/s" if peak == "hbm_bandwidth" else "TOP/s"
        yield Figure(peak, rate / 1e12, unit, f"{names[-1]}, above the {what}'s stated peak")
        yield Figure(share, 1.0, "share", names[-1])
    else:
        yield Figure(share, rate / stated, "share", names[-1])


def _times(findings: Findings, base: dict[str, Any]) -> Iterator[Figure]:
    """Fits launch times; the gap between a graph's nodes stays the base's."""
    node = _peak(base, "graph_node") * 1e6
    statics = {
        "vector_static": "costs/launches/element-wise operator in a graph",
        "matmul_static": "costs/launches/product in a graph",
    }
    for name, finding in statics.items():
        if (period := _value(findings, finding)) is not None and period > node:
            yield Figure(name, period - node, "us", f"{finding}, less the node's gap")
    for name, finding in (
        ("host_operator_launch", "costs/launches/element-wise operator"),
        ("host_graph_launch", "costs/launches/graph of one operator"),
        ("host_event_call", "costs/events/record"),
        ("host_synchronize", "costs/events/synchronize"),
        ("host_copy_launch", "costs/copies/of 64 bytes to the device"),
    ):
        if (period := _value(findings, finding)) is not None:
            yield Figure(name, period, "us", finding)


def _sizes(pattern: str, sizes: tuple[int, ...]) -> list[str]:
    """Names of the findings for the two largest sizes."""
    return [pattern.format(size) for size in sizes[-2:]]


def _slope(findings: Findings, names: list[str]) -> float | None:
    """Amount per second between two sizes; None unless both were measured."""
    found = [findings.get(name, {}).get("details") for name in names]
    if not all(found):
        return None
    small, large = (each for each in found if each)
    seconds = large["seconds"] - small["seconds"]
    amount = large["amount"] - small["amount"]
    return float(amount / seconds) if seconds > 0 else None


def _value(findings: Findings, name: str) -> float | None:
    value = findings.get(name, {}).get("value")
    return float(value) if isinstance(value, (int, float)) else None


def _peak(base: dict[str, Any], name: str) -> float:
    """A peak of the base, in base units."""
    entry = base[name]
    amount: Callable[[Any], int] = import_module("vllm_davinci.vnpu.timing.chip_files").amount
    dimension = import_module("vllm_davinci.vnpu.timing.chip_files").UNITS[entry["unit"]][0]
    return amount(entry) / {"time": 1e12, "share": 1e6}.get(dimension, 1.0)


def _number(value: float) -> str:
    """Formats a number with few digits: figures are accurate to one in a thousand at best."""
    exact = decimal.Decimal(f"{value:.{_DIGITS}g}")
    return f"{exact:f}"
