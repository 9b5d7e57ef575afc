"""The environment: the doctor's report, the device's properties, its number of streams."""

from collections.abc import Iterator
from pathlib import Path

from vllm_davinci.meta import doctor
from vllm_davinci.meta.report import Status
from vllm_davinci.verify.case import Case
from vllm_davinci.verify.device import Device
from vllm_davinci.verify.finding import Finding, Kind
from vllm_davinci.verify.settings import Settings

# Maximum number of streams to create; CANN's documents state 1984 for an Ascend910B.
MOST_STREAMS = 2048
# Facts of the host and paths, which differ between identical machines.
_NOTES = ("machine", "variables", "libraries")


def cases(settings: Settings, directory: Path) -> Iterator[Case]:
    yield Case("environment/doctor", _doctor)
    yield Case("environment/chip", _device)
    yield Case("environment/streams", _streams)


def _doctor() -> Iterator[Finding]:
    seen: dict[str, int] = {}
    for check in doctor.run_checks().checks:
        name = f"environment/{check.area}/{check.subject}"
        seen[name] = seen.get(name, 0) + 1
        name += f" {seen[name]}" if seen[name] > 1 else ""
        kind = Kind.NOTE if check.area in _NOTES else Kind.EXACT
        passed = False if check.status is Status.PROBLEM else None
        details = {"remedy": check.remedy} if check.remedy else {}
        yield Finding(name, check.seen, kind, passed=passed, details=details)


def _device() -> Iterator[Finding]:
    device = Device()
    for name, value in device.facts().items():
        yield Finding(f"environment/chip/{name}", value)
    yield Finding("environment/chip/clock", device.clock, Kind.NOTE)


def _streams() -> Iterator[Finding]:
    """Number of streams that the runtime creates, and its message for one more."""
    device = Device()
    made, message = device.count_streams(MOST_STREAMS)
    details = {"message": message} if message else {}
    yield Finding("environment/chip/streams", made, details=details)
