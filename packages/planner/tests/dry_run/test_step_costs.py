"""Step sizes in a step-time table, denser where two schedules take similar times."""

import itertools
import json
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

from vllm_davinci.planner.dry_run import step_costs
from vllm_davinci.planner.dry_run.step import OWN


class Method(Enum):
    """Dispatch methods."""

    ONE = "one"
    OTHER = "other"


class Explored:
    """An engine whose step times are a function of method, split and number of tokens."""

    can_split = True
    can_shard = can_prefetch = False

    def __init__(self, duration: Callable[[str, bool, int], int]) -> None:
        self.duration = duration
        self.first_sharded: int | None = None

    def shard_from(self, num_tokens: int | None) -> None:
        self.first_sharded = num_tokens

    def methods(self, steps: str) -> list[Method]:
        return list(Method)

    def prefill_ps(self, num_tokens: int, schedule: Any) -> int:
        return self.duration(schedule.method.value, schedule.is_split, num_tokens)

    def prefill_on_each(self, num_tokens: int, schedule: Any) -> dict[str, int]:
        return {OWN: self.prefill_ps(num_tokens, schedule)}


class Sharded(Explored):
    """Sequence parallel steps take `lost - tokens / 4` longer, and `more` on top with figures at
    the unfavourable ends of their ranges.
    """

    can_split = False

    def __init__(self, lost: int, more: int = 0) -> None:
        super().__init__(lambda way, is_split, tokens: tokens)
        self.lost, self.more = lost, more

    def prefill_on_each(self, num_tokens: int, schedule: Any) -> dict[str, int]:
        is_sharded = self.first_sharded is not None and num_tokens >= self.first_sharded
        own = num_tokens + is_sharded * (self.lost - num_tokens // 4)
        return {OWN: own, "against it": own + is_sharded * self.more}


def sizes_between(duration: Callable[[str, bool, int], int]) -> list[int]:
    """Returns the modelled sizes between 256 and 1024 tokens."""
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


def test_sizes_are_denser_where_the_fastest_schedule_changes():
    # Whole steps take longer with more tokens, split ones do not: they are equal at 600 tokens.
    found = sizes_between(
        lambda way, is_split, tokens: (600 if is_split else tokens) * (1 if way == "one" else 3)
    )
    around = [256, *found, 1024]
    after = next(place for place, size in enumerate(around) if size > 600)
    assert around[after] < 1.5 * around[after - 1]


def test_schedules_with_equal_times_have_sizes_between_everywhere():
    found = sizes_between(lambda way, is_split, tokens: tokens)
    around = [256, *found, 1024]
    assert all(b <= 1.5 * a for a, b in itertools.pairwise(around))


@pytest.mark.parametrize(
    ("lost", "more", "first"),
    [
        (0, 0, 128),
        (100, 0, 512),
        (256, 0, None),
        (9999, 0, None),
        (0, 100, 512),  # from 128 on with the stated figures, from 512 on over their ranges
        (0, 256, None),
    ],
)
def test_sequence_parallel_begins_where_all_larger_steps_gain_over_the_ranges(lost, more, first):
    explored = Sharded(lost, more)
    options, steps = step_costs._sharded(explored, [128, 256, 512, 1024])
    assert options["sequence_parallel.enabled"] is (first is not None)
    assert options.get("sequence_parallel.min_tokens") == first
    assert explored.first_sharded == first  # modelled from this size on
    assert steps == [step_costs._step(explored, size) for size in (128, 256, 512, 1024)]


def test_indivisible_steps_are_one_schedule_per_method():
    step = step_costs._step(Sharded(0), 256)
    assert len(step_costs._schedules(step)) == len(Method)


class Tuned(Explored):
    """Split steps gain from a larger first ubatch and from few cores. Decodes of one request gain
    from up to 36 MiB of prefetched weights; decodes of many requests lose.
    """

    can_prefetch = True

    def __init__(self) -> None:
        super().__init__(lambda way, is_split, tokens: tokens * (90 if is_split else 100))
        self.fetched = 0

    def prefill_sizes(self, asked: Any) -> list[int]:
        return [256, 4096]

    def prefill_ps(self, num_tokens: int, schedule: Any) -> int:
        gain = (schedule.first_share == 0.57) + 2 * (schedule.norm_vector_cores == 8)
        return super().prefill_ps(num_tokens, schedule) - gain * num_tokens

    def decode_sizes(self, asked: Any) -> list[int]:
        return [1, 64]

    def prefetch(self, max_bytes: int) -> None:
        self.fetched = max_bytes

    def decodes_ps(self, method: Method, sizes: list[int]) -> dict[int, int]:
        slower = 1 if method is Method.ONE else 2
        gain = min(self.fetched, 36 << 20) >> 20
        return {size: slower * 1000 - (gain if size == 1 else -gain) for size in sizes}


def test_each_size_has_its_own_share_cores_and_fetched_bytes():
    found = step_costs.explore(Tuned(), step_costs.SIZES)
    small, *_, large = found["steps"]
    assert (small["first_share"], small["norm_vector_cores"]) == (None, None)
    assert (large["first_share"], large["norm_vector_cores"]) == (0.57, 8)
    assert large["split"] == 4096 * (90 - 3) == large["by_method"]["split"]["other"]
    one, many = found["decodes"]
    assert one["by_method"] == {"one": 964, "other": 2000}
    assert many["by_method"] == {"one": 1000, "other": 2000}
    assert (one["prefetch_bytes"], many["prefetch_bytes"]) == (36 << 20, 0)
    assert found["options"] == {
        "dbo.enabled": True, "dbo.split": "token", "weight_prefetch_config.enabled": True
    }  # fmt: skip


def test_a_negligible_gain_is_not_chosen():
    explored = Tuned()
    explored.prefill_ps = lambda tokens, schedule: 10**6 - (schedule.first_share is not None)
    found = step_costs.explore(explored, step_costs.SIZES)
    assert all(step["first_share"] is None for step in found["steps"])
    assert found["options"]["dbo.enabled"] is False


@pytest.mark.parametrize(
    ("described", "fetches"),
    [
        ({"model_type": "deepseek_v3", "kv_lora_rank": 512}, True),
        ({"text_config": {"model_type": "kimi_k2", "kv_lora_rank": 512}}, True),
        ({"model_type": "deepseek_v3", "kv_lora_rank": 512, "index_topk": 2048}, False),
        ({"model_type": "qwen3_moe"}, False),
    ],
)
def test_models_with_mla_may_prefetch(described: dict[str, Any], fetches: bool, tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(described))
    given = ["--max-num-seqs=8", "--enable-prefix-caching"]
    kept, caching, option = step_costs.with_schedules(str(tmp_path), given)
    assert (kept, caching) == (given[0], "--no-enable-prefix-caching")
    config = json.loads(option.removeprefix("--additional-config="))
    assert ("weight_prefetch_config" in config) is fetches
