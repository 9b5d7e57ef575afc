"""Compares every operator that we launch with its definition, in released models' sizes."""

from collections.abc import Iterator
from pathlib import Path

from vllm_davinci.operators.calls.call import (
    OperatorCall,
    compare,
    described,
    generator_of,
    on_device,
)
from vllm_davinci.verify.case import Case
from vllm_davinci.verify.device import Device
from vllm_davinci.verify.finding import Finding, Kind
from vllm_davinci.verify.models import MODELS, calls_of
from vllm_davinci.verify.settings import Settings


def cases(settings: Settings, directory: Path) -> Iterator[Case]:
    """Yields one case per call."""
    Device()
    for name, call in calls_of(settings.models or tuple(MODELS)):

        def run(name: str = name, call: OperatorCall = call) -> list[Finding]:
            return [_compared(name, call, settings.seed)]

        yield Case(name, run)


def _compared(name: str, call: OperatorCall, seed: int) -> Finding:
    arguments = call.make(generator_of(name, seed))
    told = {"launches": call.launches, "arguments": described(arguments), "seed": seed}
    moved = {key: on_device(value) for key, value in arguments.items()}
    try:
        results = call.call(**moved)
        outcome = compare(results, call.definition(**arguments), call.exact)
    except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
        details = {**told, "message": str(error).strip()}
        return Finding(name, "failed", Kind.ERROR, passed=False, details=details)
    passed = not outcome.wrong and outcome.error <= outcome.bound
    if not passed:
        told |= {"worst": outcome.worst, **({"wrong": outcome.wrong} if outcome.wrong else {})}
    distance = float(f"{outcome.error:.4g}")
    return Finding(name, distance, Kind.ERROR, bound=outcome.bound, passed=passed, details=told)
