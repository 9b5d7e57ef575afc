"""A step of a dry-run's engine, with modelled times."""

import dataclasses
from collections.abc import Mapping, Sequence

from vllm_davinci.planner.dry_run.stack import StepTime
from vllm_davinci.vnpu.timing import Report

OWN = ""
"""Name of the machine with the stated figures, among its variants."""


@dataclasses.dataclass(frozen=True)
class Step:
    """One step of the engine.

    tokens:       new tokens of each request
    modelled:     report of the device and the modelled host clock
    wall_seconds: real time on this host, not the machine's
    variants:     `modelled` on machines with other assumed figures, by name
    """

    tokens: tuple[int, ...]
    modelled: Report
    wall_seconds: float
    variants: Mapping[str, Report] = dataclasses.field(default_factory=dict)

    @property
    def time(self) -> StepTime:
        """The step's time, which excludes vLLM's own Python."""
        return self.times[OWN]

    @property
    def times(self) -> dict[str, StepTime]:
        """The step's time on every machine, by name."""
        return {
            name: StepTime(len(self.tokens), report.host_ps, report.host_ps - report.waited_ps)
            for name, report in ((OWN, self.modelled), *self.variants.items())
        }

    @property
    def kind(self) -> str:
        """Kind of the step: its numbers of tokens, ordered."""
        if not self.tokens:
            return "no tokens"
        each = sorted(set(self.tokens))
        shape = str(each[0]) if len(each) == 1 else f"{each[0]} to {each[-1]}"
        return f"{len(self.tokens)} x {shape} tokens"


def median_step(steps: Sequence[Step]) -> Step:
    """The step with the median time."""
    return sorted(steps, key=lambda step: step.modelled.host_ps)[len(steps) // 2]
