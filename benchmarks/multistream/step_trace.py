"""Figures of one step, from the trace of one rank."""

from __future__ import annotations

from dataclasses import dataclass

from multistream.intervals import Interval, common, length
from vllm_davinci.vnpu.timeline import Task, Timeline


@dataclass(frozen=True)
class StepTrace:
    """What one rank's streams did during one step. Times in microseconds.

    begin, end: of the step on the host's clock, from request to answer
    tasks:      of that rank, in the order in which they began
    """

    begin: float
    end: float
    tasks: list[Task]

    def computing(self, label: str | None = None) -> list[Interval]:
        """When operators ran; of one micro-batch where a label is given."""
        return [
            task.busy
            for task in self.tasks
            if task.category in ("operator", "copy") and label in (None, task.label)
        ]

    def communicating(self, label: str | None = None) -> list[Interval]:
        """When collectives ran, without what they waited for the other rank."""
        return [
            task.busy
            for task in self.tasks
            if task.category == "collective" and label in (None, task.label)
        ]

    def layers(self) -> Interval:
        """From the first to the last collective's end: what is split, if anything is.

        The first part ends with the embedding's collective, before which there is one lookup.
        """
        stretches = self.communicating()
        return min(begin for begin, _ in stretches), max(end for _, end in stretches)

    def unsplit(self) -> float:
        """The step's time before and behind that: scheduling, inputs, sampling, answer."""
        begin, end = self.layers()
        return (begin - self.begin) + (self.end - end)

    def bound(self) -> float:
        """The shortest time of a step with these totals."""
        part = [self.layers()]
        computing = length(common(self.computing(), part))
        return max(computing, length(common(self.communicating(), part))) + self.unsplit()

    def hidden_share(self) -> float:
        """Of the first micro-batch's communication under the second one's computation, as a share
        of the smaller of the two."""
        communicating = self.communicating("micro-batch 0")
        computing = self.computing("micro-batch 1")
        smaller = min(length(communicating), length(computing))
        return length(common(communicating, computing)) / smaller if smaller else 0.0


def steps_of(timeline: Timeline, windows: list[Interval]) -> list[StepTrace]:
    """For each window, the step of the rank whose trace begins first."""
    rank = min({task.process for task in timeline.tasks if task.category == "collective"})
    steps = []
    for begin, end in windows:
        tasks = [
            task
            for task in timeline.tasks
            if task.process == rank and begin <= task.launched <= end
        ]
        steps.append(StepTrace(begin, end, tasks))
    return steps
