"""Variants of the modelled machine: one assumed figure at its low or high end, all of them drawn at
random, or one mechanism turned off.

A program runs once, and is modelled on all of them (`VNPU_TIMING_VARIANTS`).
"""

import hashlib
from collections.abc import Mapping

from vllm_davinci.vnpu import _C
from vllm_davinci.vnpu.timing.machine import Machine
from vllm_davinci.vnpu.timing.report import Report

DRAWS = 24
"""Number of variants in which every figure with a range is drawn from it."""

LOW, HIGH, DRAWN = "low", "high", "drawn"
WITHOUT = "without"
# A number that no device exceeds.
_PLENTY = 1 << 30
MECHANISMS: Mapping[str, Mapping[str, int]] = {
    "the wait for the last rank": {"task_jitter": 0},
    "steps of collectives": {"latency": 0},
    "hardware queues": {"hardware_queues": _PLENTY, "queue_change": 0},
    "queues of bounded length": {"queue_depth": _PLENTY},
    "vLLM's own Python": {"host_step": 0, "host_step_request": 0},
    "calls of the host": {
        "host_operator_launch": 0,
        "host_collective_launch": 0,
        "host_copy_launch": 0,
        "host_graph_launch": 0,
        "host_event_call": 0,
        "host_synchronize": 0,
    },
    "fixed times of tasks": {
        "vector_static": 0,
        "matmul_static": 0,
        "attention_static": 0,
        "collective_static": 0,
        "copy_static": 0,
        "graph_node": 0,
    },
}
"""Mechanisms of the model that figures can turn off, with these figures; "latency" is each tier's.
Sharing of memory and cores, and the cache, depend on no figure and cannot be turned off."""

_MOST = 2**48 - 1


def variants_of(machine: Machine) -> dict[str, dict[str, int]]:
    """Variant's name -> the figures that differ from the machine's.

    "FIGURE low" and "FIGURE high" differ in one figure; "drawn N" in all figures with a range,
    drawn uniformly. Draws depend only on number and figure, so that two programs can be compared
    variant by variant.
    """
    variants: dict[str, dict[str, int]] = {}
    for figure, (low, high) in machine.ranges.items():
        for name, value in ((LOW, low), (HIGH, high)):
            if value != machine.figures[figure]:
                variants[f"{figure} {name}"] = {figure: value}
    for number in range(DRAWS):
        variants[f"{DRAWN} {number}"] = {
            figure: low + (high - low) * _drawn(number, figure) // _MOST
            for figure, (low, high) in machine.ranges.items()
        }
    return variants


def without_mechanisms(machine: Machine) -> dict[str, dict[str, int]]:
    """ "without MECHANISM" -> the figures that turn it off on this machine."""

    def of(name: str) -> list[str]:
        return [figure for figure in machine.figures if figure == name or _tier(figure) == name]

    return {
        f"{WITHOUT} {mechanism}": {
            figure: value for name, value in figures.items() for figure in of(name)
        }
        for mechanism, figures in MECHANISMS.items()
    }


def _tier(figure: str) -> str | None:
    """The name of a tier's figure without the tier's prefix; None for other figures."""
    tier, _, name = figure.partition("_")
    return name if tier.startswith("tier") else None


def encode(variants: Mapping[str, Mapping[str, int]]) -> str:
    """The variants encoded for VNPU_TIMING_VARIANTS."""
    return "|".join(
        f"{name}:" + ";".join(f"{figure}={value}" for figure, value in figures.items())
        for name, figures in variants.items()
    )


def read_variants() -> dict[str, Report]:
    """Waits as `read_report` does; returns each variant's report by name, empty if there are
    none.
    """
    return {name: Report(**fields) for name, fields in _C.variant_reports().items()}


def _drawn(number: int, figure: str) -> int:
    """A number from 0 to _MOST that depends only on the draw and the figure's name."""
    digest = hashlib.sha256(f"{number} {figure}".encode()).digest()
    return int.from_bytes(digest[:6], "big")
