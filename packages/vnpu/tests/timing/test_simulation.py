"""The model's resource sharing equals an independent solution in exact fractions."""

import math
import random
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

import pytest

from vllm_davinci.vnpu import _C

RESOURCES = ["cube", "vector", "hbm", "ai_cpu", "copy_in", "copy_out", "links_0", "links_1"]
TURNS = (1, 2)
CHANGE = 700_000  # picoseconds to move a hardware queue to another stream


class Phase(NamedTuple):
    """Takes `fixed` picoseconds, then uses each resource for `busy[resource]` picoseconds."""

    fixed: int
    busy: dict[str, int]


class Task(NamedTuple):
    """A task of a plan. `after`: positions of earlier tasks that must have ended. Tasks with the
    same nonzero `turn` run in order and wait for all ranks: one task after a meeting, the last rank
    is `lateness` late.
    """

    stream: int
    launched: int
    phases: list[Phase]
    after: list[int]
    turn: int
    lateness: int


def fair_speeds(claims: Sequence[dict[str, Fraction]]) -> list[Fraction]:
    """Computes max-min fair speeds; at speed 1, a task uses these shares of each resource."""
    speeds = [Fraction(0)] * len(claims)
    frozen: set[int] = set()
    while len(frozen) < len(claims):
        rising = [i for i in range(len(claims)) if i not in frozen]
        # The speed at which each resource is exhausted if all rising tasks speed up together.
        levels = {}
        for resource in {r for i in rising for r, share in claims[i].items() if share}:
            taken = sum(speeds[i] * claims[i].get(resource, 0) for i in frozen)
            slope = sum(claims[i].get(resource, 0) for i in rising)
            levels[resource] = (1 - taken) / slope
        level = min([Fraction(1), *levels.values()])
        for i in rising:
            speeds[i] = level
        if level == 1:
            break
        full = {r for r, at in levels.items() if at == level}
        frozen |= {i for i in rising if any(claims[i].get(r) for r in full)}
    return speeds


class Way(NamedTuple):
    """State after a chain of tasks: when the newest ended, and by turn the number of tasks since
    its ranks met.
    """

    ready: Fraction = Fraction(0)
    tasks: dict[int, int] = {}  # noqa: RUF012  never written to

    def joined(self, other: "Way") -> "Way":
        return other if other.ready > self.ready else self

    def after_task(self, end: Fraction) -> "Way":
        return Way(end, {turn: self.tasks.get(turn, 0) + 1 for turn in TURNS})

    def after_meeting(self, end: Fraction, turn: int) -> "Way":
        return Way(end, self.tasks | {turn: 0})


class Ways:
    """The state of each stream, updated as its tasks begin and end."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self.tasks = tasks
        self.of_stream = {task.stream: Way() for task in tasks}
        self.after_task: dict[int, Way] = {}

    def wait_for_ranks(self, i: int, now: Fraction) -> Fraction:
        """Returns the time that task `i`, which begins now, waits for the last rank."""
        task = self.tasks[i]
        way = self.of_stream[task.stream]
        for earlier in task.after:
            way = way.joined(self.after_task[earlier])
        self.of_stream[task.stream] = way
        since = now - max(way.ready, Fraction(task.launched))
        apart = math.isqrt(task.lateness**2 * way.tasks.get(task.turn, 0)) if task.turn else 0
        return max(Fraction(0), apart - since)

    def leave(self, i: int, now: Fraction) -> None:
        """Updates the stream's state at the end of task `i`."""
        task = self.tasks[i]
        way = self.of_stream[task.stream]
        way = way.after_meeting(now, task.turn) if task.turn else way.after_task(now)
        self.of_stream[task.stream] = self.after_task[i] = way


class Queues:
    """Hardware queues. A stream without a queue takes a free one; if none is free, it takes, at a
    cost, the queue of the stream whose newest task ended first.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.ended: dict[int, Fraction] = {}  # end of the newest task, by stream with a queue
        self.at_work: set[int] = set()

    def price(self, stream: int) -> Fraction | None:
        """Returns the cost of beginning a task on this stream; None if all queues are busy."""
        if self.most == 0 or stream in self.ended or len(self.ended) < self.most:
            return Fraction(0)
        return Fraction(CHANGE) if self.ended.keys() - self.at_work else None

    def take(self, stream: int) -> Fraction:
        price = self.price(stream) or Fraction(0)
        if price:
            del self.ended[min(self.ended.keys() - self.at_work, key=lambda s: (self.ended[s], s))]
        self.ended[stream] = Fraction(0)
        self.at_work.add(stream)
        return price

    def leave(self, stream: int, now: Fraction) -> None:
        self.ended[stream] = now
        self.at_work.discard(stream)


class Solution:
    """Begin and end of each task in exact picoseconds; None while unknown."""

    def __init__(self, tasks: Sequence[Task], num_queues: int) -> None:
        self.tasks = tasks
        self.begin: list[Fraction | None] = [None] * len(tasks)
        self.end: list[Fraction | None] = [None] * len(tasks)
        self.phase = [0] * len(tasks)
        self.fixed = [Fraction(0)] * len(tasks)
        self.work = [Fraction(0)] * len(tasks)  # remaining share of the phase's work
        self.now = Fraction(0)
        self.ways, self.queues = Ways(tasks), Queues(num_queues)
        self.in_order_of_streams = sorted(range(len(tasks)), key=lambda i: tasks[i].stream)
        while self.is_unfinished():
            self.settle()
            if self.is_unfinished():
                self.go_on()

    def is_unfinished(self) -> bool:
        return any(end is None for end in self.end)

    def is_under_way(self, i: int) -> bool:
        return self.begin[i] is not None and self.end[i] is None

    def enter(self, i: int) -> None:
        """Task `i` enters its phase."""
        fixed, busy = self.tasks[i].phases[self.phase[i]]
        self.fixed[i] = Fraction(fixed)
        self.work[i] = Fraction(1 if any(busy.values()) else 0)

    def may_begin(self, i: int) -> bool:
        task = self.tasks[i]
        ahead = [
            j
            for j, other in enumerate(self.tasks[:i])
            if other.stream == task.stream or (task.turn and other.turn == task.turn)
        ]
        waits = [*ahead, *task.after]
        may_run = task.launched <= self.now and all(self.end[j] is not None for j in waits)
        return self.begin[i] is None and may_run and self.queues.price(task.stream) is not None

    def start(self, i: int) -> None:
        self.begin[i] = self.now
        price = self.queues.take(self.tasks[i].stream)
        late = self.ways.wait_for_ranks(i, self.now + price)
        if self.tasks[i].phases:
            self.enter(i)
        self.fixed[i] += price + late

    def leave_phase(self, i: int) -> None:
        self.phase[i] += 1
        if self.phase[i] < len(self.tasks[i].phases):
            self.enter(i)
            return
        self.end[i] = self.now
        self.ways.leave(i, self.now)
        self.queues.leave(self.tasks[i].stream, self.now)

    def settle(self) -> None:
        """Begins and ends all tasks that can begin or end now."""
        changed = True
        while changed:
            changed = False
            for i in self.in_order_of_streams:
                if self.may_begin(i):
                    changed = True
                    self.start(i)
                while self.is_under_way(i) and not self.fixed[i] and not self.work[i]:
                    changed = True
                    self.leave_phase(i)

    def go_on(self) -> None:
        """Advances to the next time at which something changes."""
        running = [i for i in range(len(self.tasks)) if self.is_under_way(i)]
        working = [i for i in running if not self.fixed[i]]
        busy = {i: self.tasks[i].phases[self.phase[i]].busy for i in working}
        longest = {i: max(busy[i].values()) for i in working}
        claims = [{r: Fraction(b, longest[i]) for r, b in busy[i].items()} for i in working]
        speeds = dict(zip(working, fair_speeds(claims), strict=True))
        changes = [self.now + self.fixed[i] for i in running if self.fixed[i]]
        changes += [self.now + self.work[i] * longest[i] / speeds[i] for i in working]
        changes += [Fraction(t.launched) for t in self.tasks if t.launched > self.now]
        next_change = min(changes)
        for i in running:
            if self.fixed[i]:
                self.fixed[i] -= next_change - self.now
            else:
                self.work[i] -= (next_change - self.now) * speeds[i] / longest[i]
        self.now = next_change


def solve(tasks: Sequence[Task], num_queues: int = 0) -> list[tuple[Fraction, Fraction]]:
    """Returns begin and end of each task in exact picoseconds."""
    solution = Solution(tasks, num_queues)
    spans = zip(solution.begin, solution.end, strict=True)
    return [(b, e) for b, e in spans if b is not None and e is not None]


def random_plan(rng: random.Random) -> list[Task]:
    """Makes up to 12 tasks on 4 streams, which wait for each other and take turns."""
    tasks: list[Task] = []
    launched = 0
    for i in range(rng.randint(1, 12)):
        phases = [
            Phase(
                rng.choice([0, rng.randint(1, 10**6)]),
                {
                    resource: rng.choice([0, rng.randint(1, 10**8)])
                    for resource in rng.sample(RESOURCES, rng.randint(0, 4))
                },
            )
            for _ in range(rng.randint(0, 3))
        ]
        launched += rng.choice([0, rng.randint(0, 10**7)])
        after = rng.sample(range(i), rng.randint(0, min(i, 2)))
        tasks.append(Task(rng.randint(0, 3), launched, phases, after, rng.choice([0, 0, 1, 2]), 0))
    lateness = rng.choice([0, 10**6, 10**8])
    return [task._replace(lateness=lateness) for task in tasks]


@pytest.mark.parametrize("seed", range(40))
def test_plans_of_up_to_twelve_tasks_equal_the_exact_solution(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(5):
        plan = random_plan(rng)
        modelled = _C.simulate(plan)
        # Changes occur at whole picoseconds, so each is at most one picosecond late.
        tolerance = 1 + sum(len(task.phases) for task in plan)
        for (begin, end), (exact_begin, exact_end) in zip(modelled, solve(plan), strict=True):
            assert abs(begin - exact_begin) <= tolerance
            assert abs(end - exact_end) <= tolerance


@pytest.mark.parametrize("seed", range(20))
def test_plans_on_fewer_hardware_queues_equal_the_exact_solution(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(5):
        plan = random_plan(rng)
        for num_queues in (1, 2, 3):
            modelled = _C.simulate(plan, num_queues, CHANGE)
            tolerance = 1 + sum(len(task.phases) for task in plan)
            exact = solve(plan, num_queues)
            for (begin, end), (exact_begin, exact_end) in zip(modelled, exact, strict=True):
                assert abs(begin - exact_begin) <= tolerance
                assert abs(end - exact_end) <= tolerance


def test_streams_by_turns_cost_where_they_are_more_than_the_queues() -> None:
    def duration(num_streams: int) -> int:
        tasks = [Task(i % num_streams, 0, [Phase(10**6, {})], [i - 1] if i else [], 0, 0)
                 for i in range(100)]  # fmt: skip
        return max(end for _, end in _C.simulate(tasks, 32, 5 * 10**6))

    assert duration(1) == duration(32) == 100 * 10**6
    # The first 32 streams get unused queues; all others take over a queue.
    assert duration(62) == 100 * 10**6 + 68 * 5 * 10**6


def test_two_runs_are_equal() -> None:
    plan = random_plan(random.Random(7))
    assert _C.simulate(plan) == _C.simulate(plan)
