"""Sizes of the steps whose durations decide: more of them where two schedules come close."""

import itertools
from collections.abc import Callable
from enum import Enum
from typing import Any

import pytest

from vllm_davinci.meta.dry_run import step_costs


class Method(Enum):
    """Ways to the experts."""

    ONE = "one"
    OTHER = "other"


class Explored:
    """An engine whose steps take what a function of way, ubatches and tokens says."""

    can_split = True

    def __init__(self, duration: Callable[[str, bool, int], int]) -> None:
        self.duration = duration
        self.first_sharded: int | None = None

    def shard_from(self, num_tokens: int | None) -> None:
        self.first_sharded = num_tokens

    def methods(self, steps: str) -> list[Method]:
        return list(Method)

    def prefill_ps(self, num_tokens: int, schedule: Any) -> int:
        return self.duration(schedule.method.value, schedule.is_split, num_tokens)


class Sharded(Explored):
    """One whose sequence parallel steps take longer by `lost`, less a quarter of their tokens."""

    can_split = False

    def __init__(self, lost: int) -> None:
        super().__init__(lambda way, is_split, tokens: tokens)
        self.lost = lost

    def prefill_ps(self, num_tokens: int, schedule: Any) -> int:
        is_sharded = self.first_sharded is not None and num_tokens >= self.first_sharded
        return num_tokens + is_sharded * (self.lost - num_tokens // 4)


def sizes_between(duration: Callable[[str, bool, int], int]) -> list[int]:
    """Sizes that are modelled between 256 and 1024 tokens."""
    explored = Explored(duration)
    steps = [step_costs._step(explored, size) for size in (256, 1024)]
    found = list(step_costs._with_sizes_between(explored, steps))
    assert [step["tokens"] for step in found] == sorted({step["tokens"] for step in found})
    return [step["tokens"] for step in found][1:-1]


@pytest.mark.parametrize("slower", [2, 10])
def test_far_schedules_need_no_sizes_between(slower: int):
    assert not sizes_between(
        lambda way, is_split, tokens: tokens * (1 if way == "one" and is_split else slower)
    )


def test_where_the_fastest_changes_the_sizes_are_near():
    # Whole steps rise, split ones stay: they cross at 600 tokens.
    found = sizes_between(
        lambda way, is_split, tokens: (600 if is_split else tokens) * (1 if way == "one" else 3)
    )
    around = [256, *found, 1024]
    after = next(place for place, size in enumerate(around) if size > 600)
    assert around[after] < 1.5 * around[after - 1]


def test_schedules_that_take_the_same_have_sizes_between_everywhere():
    found = sizes_between(lambda way, is_split, tokens: tokens)
    around = [256, *found, 1024]
    assert all(b <= 1.5 * a for a, b in itertools.pairwise(around))


@pytest.mark.parametrize(("lost", "first"), [(0, 128), (100, 512), (256, None), (9999, None)])
def test_sequence_parallel_begins_where_all_larger_steps_gain(lost: int, first: int | None):
    explored = Sharded(lost)
    options, steps = step_costs._sharded(explored, [128, 256, 512, 1024])
    assert options["sequence_parallel.enabled"] is (first is not None)
    assert options.get("sequence_parallel.min_tokens") == first
    assert explored.first_sharded == first  # what is modelled next follows it
    assert steps == [step_costs._step(explored, size) for size in (128, 256, 512, 1024)]


def test_steps_that_cannot_be_split_are_one_schedule_of_each_way():
    step = step_costs._step(Sharded(0), 256)
    assert len(step_costs._schedules(step)) == len(Method)
