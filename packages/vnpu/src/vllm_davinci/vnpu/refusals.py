"""How many calls of operators were held against CANN's documents, and which were refused."""

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from vllm_davinci.vnpu.errors import VirtualDeviceError

_CALLS = ".calls"
_REFUSED = "refused.jsonl"


@dataclass(frozen=True)
class Refusals:
    """Of all processes that named one directory in VNPU_REFUSALS.

    calls:   SoC name to calls of operators that have constraints
    refused: SoC name and message of each refused call, in their order
    """

    calls: dict[str, int]
    refused: list[tuple[str, str]]


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
    refused = []
    if (path := directory / _REFUSED).exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            refusal = json.loads(line)
            refused.append((refusal["soc"], refusal["message"]))
    return Refusals(calls, refused)


def report(directory: Path) -> int:
    """Prints what `directory` holds; returns 1 where a call was refused."""
    found = read(directory)
    for soc, calls in found.calls.items():
        refused = sum(name == soc for name, _ in found.refused)
        print(f"{soc}: {calls} calls held against CANN's documents, {refused} refused")
    if not found.calls:
        print("no call was held against CANN's documents")
    for (soc, message), times in Counter(found.refused).most_common():
        print(f"{times} x on {soc}: {message}")
    return 1 if found.refused else 0
