"""Compares the device's answers to allowed and refused calls with the expected ones.

`calls.json.xz` has calls that CANN's documents allow, including edge cases, and calls that each
break one rule, with the expected answer for each chip generation and CANN release. Only aclnn's
first phase runs; nothing is launched.
"""

import json
import lzma
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from vllm_davinci.verify.case import Case
from vllm_davinci.verify.device import Device
from vllm_davinci.verify.finding import Finding, Kind
from vllm_davinci.verify.first_phase import ABSENT, TAKEN, FirstPhase
from vllm_davinci.verify.settings import Settings

CALLS = Path(__file__).parent.parent / "calls.json.xz"
RELEASES = ("8.3", "8.5", "9.0")
MEMORY_BYTES = 1 << 30
"""Memory behind the operands: a virtual NPU checks that they lie in allocated memory."""


def cases(settings: Settings, directory: Path) -> Iterator[Case]:
    """Yields one case per call, so that a call that kills the process is identified."""
    data = json.loads(lzma.decompress(CALLS.read_bytes()))
    device = Device()
    place = place_of(device)
    yield Case("constraints/believed of", lambda: [_told_place(device, place)])
    memory = device.torch.empty(MEMORY_BYTES, dtype=device.torch.uint8, device="npu")
    phase = FirstPhase(memory.data_ptr())
    for call in data["calls"]:
        name = f"constraints/{call['operator']}/{call['asks']}"
        arguments = {**data["legal"][call["operator"]], **call["changes"]}
        yield Case(name, lambda n=name, c=call, a=arguments: [_asked(phase, n, c, a, place)])  # type: ignore[misc]


def place_of(device: Device) -> str:
    """The generation and release whose documents apply: "A2 8.5".

    Other generations are compared with A2, other releases with the newest before them.
    """
    release = device.cann_release()
    known = [each for each in RELEASES if _numbers(each) <= _numbers(release)] if release else []
    return f"{device.generation or 'A2'} {known[-1] if known else RELEASES[0]}"


def expected_of(call: Mapping[str, Any], place: str) -> str:
    """The expected answer: TAKEN, or the status of the refusal."""
    expected = call["expected"]
    return str(expected[place] if isinstance(expected, dict) else expected)


def _told_place(device: Device, place: str) -> Finding:
    told = f"{place}, for {device.soc} with CANN {device.cann_release() or 'of an unknown release'}"
    return Finding("constraints/believed of", told, Kind.NOTE)


def _asked(
    phase: FirstPhase, name: str, call: Mapping[str, Any], arguments: Mapping[str, Any], place: str
) -> Finding:
    """Any refusal passes if one is expected; another status is only reported, as codes change."""
    said, message = phase.answer(call["operator"], arguments)
    expected = expected_of(call, place)
    passed = said != ABSENT and (said == TAKEN) == (expected == TAKEN)
    details: dict[str, Any] = {}
    if not passed or said != expected:
        details = {"believed": expected, "message": message, "arguments": dict(arguments)}
    return Finding(name, said, passed=passed, details=details)


def _numbers(release: str) -> tuple[int, ...]:
    return tuple(int(number) for number in release.split(".") if number.isdigit())
