"""How many calls of operators were held against CANN's documents, and which were refused."""

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from vllm_davinci.vnpu.errors import VirtualDeviceError

_CALLS = ".calls"
_REFUSED = "refused.jsonl"
_WITHOUT_RULES = "without_rules.jsonl"


# Of core's function that asks what an operator takes: its calls may be refused.
_QUESTION = " in refusal_of"


@dataclass(frozen=True)
class Refusal:
    """site: the innermost lines of Python, "FILE:LINE in FUNCTION" each"""

    soc: str
    message: str
    site: str

    @property
    def is_question(self) -> bool:
        """Whether the call asked what the operator takes, and a refusal is an answer."""
        return _QUESTION in self.site


@dataclass(frozen=True)
class FreeCall:
    """A place that called an operator of which no document's rules are written down.

    site: the innermost lines of Python, "FILE:LINE in FUNCTION" each
    """

    operator: str
    site: str


@dataclass(frozen=True)
class Refusals:
    """Calls of all processes that named one directory in VNPU_REFUSALS.

    calls:   SoC name to calls of operators that have constraints
    refused: calls in their order, those that were no questions
    asked:   questions that were answered with a refusal
    free:    places whose calls are held against nothing, once for each process
    """

    calls: dict[str, int]
    refused: list[Refusal]
    asked: list[Refusal]
    free: list[FreeCall]


def read(directory: Path) -> Refusals:
    """Raises VirtualDeviceError where there is no such directory."""
    if not directory.is_dir():
        raise VirtualDeviceError(
            f"{directory} is no directory: `vnpu run --refusals {directory} -- COMMAND` makes it."
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
    """Prints what `directory` holds; returns 1 where a call was refused."""
    found = read(directory)
    for soc, calls in found.calls.items():
        refused, asked = (
            sum(each.soc == soc for each in kind) for kind in (found.refused, found.asked)
        )
        questions = (
            f"; {asked} questions what an operator takes were answered with no" if asked else ""
        )
        print(f"{soc}: {calls} calls held against CANN's documents, {refused} refused{questions}")
    if not found.calls:
        print("no call was held against CANN's documents")
    if free := sorted({each.operator for each in found.free}):
        print(f"{len(free)} operators have no rules to be held against: {' '.join(free)}")
    for refusal, times in Counter(found.refused).most_common():
        print(f"{times} x on {refusal.soc}: {refusal.message}\n    {refusal.site}")
    return 1 if found.refused else 0
