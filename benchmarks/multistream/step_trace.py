"""Overlap, bound and other figures of one step, from one rank's trace."""

from dataclasses import dataclass

from vllm_davinci.vnpu import TraceError
from vllm_davinci.vnpu.intervals import Interval, common, length
from vllm_davinci.vnpu.timeline import Task, Timeline

# Core's labels for the launches of a step's two halves.
FIRST, SECOND = "ubatch 0", "ubatch 1"


@dataclass(frozen=True)
class StepTrace:
    """Tasks on one rank's streams during one step. Times in microseconds.

    begin, end: of the step on the host's clock, from request to answer
    tasks: of that rank, by begin
    """

    begin: float
    end: float
    tasks: list[Task]

    def computing(self, label: str | None = None) -> list[Interval]:
        """Returns the intervals in which operators ran; with a label, those of one ubatch."""
        return [
            task.busy
            for task in self.tasks
            if task.category in ("operator", "copy") and label in (None, task.label)
        ]

    def communicating(self, label: str | None = None) -> list[Interval]:
        """Returns the intervals in which collectives ran, without their wait for the other rank."""
        return [
            task.busy
            for task in self.tasks
            if task.category == "collective" and label in (None, task.label)
        ]

    def layers(self) -> Interval:
        """Returns the interval that a split divides: from the first to the last collective's end.

        The embedding's look-up and collective precede it.
        """
        intervals = self.communicating()
        return min(begin for begin, _ in intervals), max(end for _, end in intervals)

    def unsplit(self) -> float:
        """Returns the step's remaining time: scheduling, inputs, sampling, answer."""
        begin, end = self.layers()
        return (begin - self.begin) + (self.end - end)

    def bound(self) -> float:
        """Returns the shortest step time possible with this computation and communication."""
        part = [self.layers()]
        computing = length(common(self.computing(), part))
        return max(computing, length(common(self.communicating(), part))) + self.unsplit()

    def hidden_share(self) -> float:
        """Returns how much the first ubatch's communication and the second's computation overlap,
        as a fraction of the smaller.

        Raises TraceError if either is absent, as in a trace without labels.
        """
        communicating = self.communicating(FIRST)
        computing = self.computing(SECOND)
        if not communicating or not computing:
            labels = sorted({task.label for task in self.tasks})
            raise TraceError(
                f"The trace of a split step has {len(communicating)} collectives with the label "
                f"{FIRST!r} and {len(computing)} operators with {SECOND!r}; the labels of its "
                f"{len(self.tasks)} tasks are {labels}. Check that the step was split (its "
                "overlap decisions) and that vnpu.is_active() is True in the process that ran it."
            )
        smaller = min(length(communicating), length(computing))
        return length(common(communicating, computing)) / smaller


def steps_of(timeline: Timeline, windows: list[Interval]) -> list[StepTrace]:
    """Returns the step of each window, of the rank whose trace begins first."""
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
