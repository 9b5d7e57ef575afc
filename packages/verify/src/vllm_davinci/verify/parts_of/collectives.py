"""Collectives of several devices, by size: results and times."""

from collections.abc import Iterator
from pathlib import Path

from vllm_davinci.verify.case import Case
from vllm_davinci.verify.device import Device
from vllm_davinci.verify.finding import Finding, Kind
from vllm_davinci.verify.ranks import answer_of_ranks
from vllm_davinci.verify.settings import Settings

LIMIT_S = 240.0
PROCESS = "vllm_davinci.verify.collective_process"
# A virtual NPU's ranks are processes of this host.
MOST_VIRTUAL_RANKS = 2


def cases(settings: Settings, directory: Path) -> Iterator[Case]:
    device = Device()
    ranks = min(device.torch.npu.device_count(), settings.ranks)
    if device.is_virtual:
        ranks = min(ranks, MOST_VIRTUAL_RANKS)
    if ranks < 2:
        told = f"{ranks} device: collectives need two"
        yield Case("collectives", lambda: [Finding("collectives", told, Kind.NOTE)])
        return
    yield Case("collectives", lambda: _of_ranks(ranks, device.has_times))


def _of_ranks(ranks: int, has_times: bool) -> Iterator[Finding]:
    answers = answer_of_ranks([PROCESS], ranks, LIMIT_S)
    yield Finding("collectives/ranks", ranks, Kind.NOTE)
    for name, found in answers.items():
        full = f"collectives/{name}"
        details = {"wrong on ranks": found["wrong"]} if found["wrong"] else {}
        right = "right" if not found["wrong"] else "wrong"
        yield Finding(f"{full}/result", right, passed=not found["wrong"], details=details)
        if has_times:
            microseconds = round(found["seconds"] * 1e6, 3)
            yield Finding(f"{full}/time of {ranks} ranks", microseconds, Kind.FIGURE, "us")
