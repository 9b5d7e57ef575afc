"""A layer prefetches as many bytes of the next layer as the step allows; the last layer waits."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_davinci.core.attention.mla.weight_prefetch import Prefetches
from vllm_davinci.core.config.sized_choices import SizedChoices
from vllm_davinci.core.layers import prefetch as module
from vllm_davinci.core.layers.prefetch import Ahead, PrefetchLimit, WeightPrefetch


class Scheduler:
    """Runs side work immediately, and records the calls."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def current_ubatch(self) -> None:
        return None

    def start(self, role: str, work: Callable[[], object]) -> None:
        self.asked.append("start")
        work()

    def finish(self, role: str) -> None:
        self.asked.append("finish")


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Records the bytes of each prefetch."""
    found: list[int] = []
    monkeypatch.setattr(module, "prefetch", lambda weight, num_bytes: found.append(num_bytes))
    return found


def decodes(monkeypatch: pytest.MonkeyPatch, num_tokens: int) -> None:
    step = SimpleNamespace(is_decode_everywhere=True, num_actual_tokens=num_tokens)
    context = SimpleNamespace(attn_metadata={"attention": step})
    monkeypatch.setattr(module, "get_forward_context", lambda: context)


def layer(scheduler: Any, limit: PrefetchLimit, is_last: bool = False) -> WeightPrefetch:
    weights = [Ahead(torch.empty(1), 30), Ahead(torch.empty(1), 10)]
    return WeightPrefetch(scheduler, weights, "attention", limit, is_last)


def test_a_step_prefetches_the_bytes_chosen_for_its_size(monkeypatch, fetched):
    scheduler = Scheduler()
    step = layer(scheduler, PrefetchLimit(18, SizedChoices([1, 8, 16], [20, 0, None])))
    for num_tokens in (4, 8, 16):
        decodes(monkeypatch, num_tokens)
        step.begin()
        scheduler.asked.append(f"{num_tokens}")
    assert fetched == [20, 10, 18, 10]
    # A step without prefetch must not use the other stream, as captured graphs require.
    assert scheduler.asked == ["start", "4", "8", "start", "16"]
    assert [step.fetches(num_tokens) for num_tokens in (4, 8, 16)] == [True, False, True]


def test_the_last_layer_that_runs_waits_and_fetches_nothing(monkeypatch, fetched):
    scheduler, limit = Scheduler(), PrefetchLimit(18)
    steps = [(number // 2, layer(scheduler, limit, number == 5)) for number in range(6)]
    of_model = Prefetches(steps, limit)
    decodes(monkeypatch, 1)

    def asked(num_layers: int | None, num_steps: int) -> list[str]:
        of_model.end_with(num_layers)
        scheduler.asked.clear()
        for _, step in steps[:num_steps]:
            step.begin()
        return list(scheduler.asked)

    assert asked(2, 4) == ["start"] * 3 + ["finish"]
    assert asked(None, 6) == ["start"] * 5 + ["finish"]


def test_a_fixed_limit_holds_for_all_steps(monkeypatch: pytest.MonkeyPatch, fetched: list[int]):
    limit = PrefetchLimit(18, SizedChoices([1], [20]))
    limit.fix(12)
    decodes(monkeypatch, 4)
    layer(Scheduler(), limit).begin()
    assert fetched == [12, 10]
