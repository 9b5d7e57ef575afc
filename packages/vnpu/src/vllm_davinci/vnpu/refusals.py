"""Reads the counts of operator calls checked against CANN's documents, and the refused calls."""

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from vllm_davinci.vnpu.errors import VirtualDeviceError

_CALLS = ".calls"
_REFUSED = "refused.jsonl"
_WITHOUT_RULES = "without_rules.jsonl"


# Name of core's function that probes what an operator accepts; its calls may be refused.
_QUESTION = " in refusal_of"


@dataclass(frozen=True)
class Refusal:
    """site: the innermost lines of Python, "FILE:LINE in FUNCTION" each"""

    soc: str
    message: str
    site: str

    @property
    def is_question(self) -> bool:
        """True if the call probed what the operator accepts, so that a refusal is an answer."""
        return _QUESTION in self.site


@dataclass(frozen=True)
class FreeCall:
    """A call of an operator whose arguments no rule checks.

    site: the innermost lines of Python, "FILE:LINE in FUNCTION" each
    """

    operator: str
    site: str


@dataclass(frozen=True)
class Refusals:
    """Calls of all processes with one VNPU_REFUSALS directory.

    calls:   number of calls of operators with constraints, by SoC
    refused: refused calls in order, without probes
    asked:   number of probes that were refused
    free:    places that call operators without rules, once per process
    """

    calls: dict[str, int]
    refused: list[Refusal]
    asked: list[Refusal]
    free: list[FreeCall]


def read(directory: Path) -> Refusals:
    """Reads a directory. Raises VirtualDeviceError if it does not exist."""
    if not directory.is_dir():
        raise VirtualDeviceError(
            f"{directory} is not a directory. Run `vnpu run --refusals {directory} -- COMMAND`."
        )
    calls = {
        path.name.removesuffix(_CALLS): int.from_bytes(path.read_bytes(), "little")
        for path in sorted(directory.glob(f"*{_CALLS}"))
    }
    found = [
        Refusal(fields["soc"], fields["message"], fields["site"])
        for fields in _lines(directory / _REFUSED)
    ]
    return Refusals(
        calls,
        refused=[each for each in found if not each.is_question],
        asked=[each for each in found if each.is_question],
        free=[FreeCall(**fields) for fields in _lines(directory / _WITHOUT_RULES)],
    )


def _lines(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def report(directory: Path) -> int:
    """Prints the directory's counts; returns 1 if a call was refused."""
    found = read(directory)
    for soc, calls in found.calls.items():
        refused, asked = (
            sum(each.soc == soc for each in kind) for kind in (found.refused, found.asked)
        )
        questions = f"; {asked} probes of what an operator accepts were refused" if asked else ""
        print(
            f"{soc}: {calls} calls checked against CANN's documents, {refused} refused{questions}"
        )
    if not found.calls:
        print("no call was checked against CANN's documents")
    if free := sorted({each.operator for each in found.free}):
        print(f"{len(free)} operators have no rules: {' '.join(free)}")
    for refusal, times in Counter(found.refused).most_common():
        print(f"{times} x on {refusal.soc}: {refusal.message}\n    {refusal.site}")
    return 1 if found.refused else 0
