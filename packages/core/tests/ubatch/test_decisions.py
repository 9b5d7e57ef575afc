"""Reasons why a step was split or not are counted, published, and logged."""

import numpy as np
import pytest

from vllm_davinci.core import components
from vllm_davinci.core.config.options import DualBatchConfig
from vllm_davinci.core.ubatch import decisions
from vllm_davinci.core.ubatch.decisions import Counts, Decisions
from vllm_davinci.core.ubatch.prefix_order import BlockIds, CachedPrefixes


def made(
    publish: list[Counts] | None = None, interval_s: float | None = None, **options: object
) -> Decisions:
    scheduler = components.stream_scheduler()
    assert scheduler is not None
    return Decisions(
        scheduler,
        DualBatchConfig.model_validate({"enabled": True, **options}),
        has_communication=True,
        interval_s=interval_s,
        publish=None if publish is None else publish.append,
    )


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    written: list[str] = []
    monkeypatch.setattr(
        decisions.logger, "info", lambda text, *values: written.append(text % values)
    )
    return written


@pytest.mark.parametrize(
    ("query_lens", "reason"),
    [
        ([128, 128], "split"),
        ([128, 127], "few_tokens"),
        ([300, 50], "no_cut"),
        ([1] * 300, "no_prefill"),
        ([1] * 250 + [63], "few_prefill_tokens"),
    ],
)
def test_the_options_decide(query_lens: list[int], reason: str):
    chosen = made()
    step = chosen.facts(query_lens)
    decision = chosen.decide(step)
    assert chosen.counts() == {}
    chosen.count(step, decision)
    assert chosen.counts() == {reason: 1}
    assert (decision.split is not None) == (reason == "split")


@pytest.mark.parametrize(
    ("query_lens", "cuts"),
    [([100] * 4, [200]), ([8] * 41, [168]), ([10, 150, 140], [160]), ([*[1] * 200, 220], [200])],
)
def test_the_cut_is_at_a_request_near_the_middle(query_lens: list[int], cuts: list[int]):
    chosen = made()
    decision = chosen.decide(chosen.facts(query_lens))
    assert decision.split is not None
    assert list(decision.split.cuts) == cuts


def test_a_first_ubatch_may_be_larger():
    chosen = made(split="token", first_share=0.625)
    decision = chosen.decide(chosen.facts([300, 100]))
    assert decision.split is not None
    assert list(decision.split.cuts) == [250]


def test_a_cut_that_breaks_a_prefix_is_not_made():
    chosen = made()
    step = chosen.facts([128, 128])
    # The first request reads block 1, which the second request fills, or its own block.
    for block, reason in ((1, "prefix_dependency"), (3, "split")):
        table = np.array([[block, 2], [1, 1]])
        prefixes = CachedPrefixes([BlockIds(table, 128)], np.array([128, 0]))
        chosen.count(step, chosen.decide(step, prefixes))
        assert chosen.counts()[reason] == 1


def test_a_veto_of_another_rank_counts_instead():
    chosen = made()
    step = chosen.facts([128, 128])
    vetoed = chosen.decide(step).withdrawn("VETOED")
    assert vetoed.split is None
    chosen.count(step, vetoed)
    assert chosen.counts() == {"vetoed": 1}


def test_the_log_says_how_often_and_gives_the_newest_example(lines: list[str]):
    published: list[Counts] = []
    chosen = made(published)
    for query_lens in ([100], [128, 128], [100, 20]):
        step = chosen.facts(query_lens)
        chosen.count(step, chosen.decide(step))
    assert published[-1] == {"few_tokens": 2, "split": 1}
    assert len(published) == 3
    assert lines == []
    chosen.log()
    (line,) = lines
    assert "2 x fewer tokens than min_total_tokens_to_split (the newest: 2 requests, 120" in line
    assert "1 x split (the newest: 2 requests, 256 tokens, 256 of them prefill, cut at 128)" in line
    chosen.log()
    assert len(lines) == 1, "nothing new was decided"


def test_the_log_is_written_when_it_is_due(lines: list[str]):
    chosen = made(interval_s=0.0)
    step = chosen.facts([100])
    for _ in range(2):
        chosen.count(step, chosen.decide(step))
    assert [line.split(": ")[1][:4] for line in lines] == ["1 x ", "1 x "]
