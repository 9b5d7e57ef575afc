"""One step of a dry-run's engine, every time of it modelled."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from vllm_davinci.planner.dry_run.stack import StepTime
from vllm_davinci.vnpu.timing import Report


@dataclasses.dataclass(frozen=True)
class Step:
    """One step of the engine.

    tokens:       new tokens of each request in it
    modelled:     what the device and the host's modelled clock did in it
    wall_seconds: what it took this host, which is no figure of the machine's
    variants:     the same as `modelled` on machines with other assumed figures, by name
    """

    tokens: tuple[int, ...]
    modelled: Report
    wall_seconds: float
    variants: Mapping[str, Report] = dataclasses.field(default_factory=dict)

    @property
    def time(self) -> StepTime:
        """The time that it took, of a step that ran without vLLM's own Python."""
        total_ps = self.modelled.host_ps
        return StepTime(len(self.tokens), total_ps, total_ps - self.modelled.waited_ps)

    @property
    def kind(self) -> str:
        """Steps of one kind have the same numbers of tokens."""
        if not self.tokens:
            return "no tokens"
        each = sorted(set(self.tokens))
        shape = str(each[0]) if len(each) == 1 else f"{each[0]} to {each[-1]}"
        return f"{len(self.tokens)} x {shape} tokens"


def median_step(steps: Sequence[Step]) -> Step:
    """The one whose time is the middle one."""
    return sorted(steps, key=lambda step: step.modelled.host_ps)[len(steps) // 2]
