"""Why a step was split or not: counted, published, and written to the log."""

import pytest

from vllm_davinci.core import components
from vllm_davinci.core.config.options import DualBatchConfig
from vllm_davinci.core.ubatch import decisions
from vllm_davinci.core.ubatch.decisions import Counts, Decisions


def made(publish: list[Counts] | None = None, **options: object) -> Decisions:
    scheduler = components.stream_scheduler()
    assert scheduler is not None
    return Decisions(
        scheduler,
        DualBatchConfig.model_validate({"enabled": True, **options}),
        has_communication=True,
        interval_s=0.0,
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
    decision = chosen.decide(query_lens, lambda split: True)
    assert chosen.counts() == {reason: 1}
    assert (decision.split is not None) == (reason == "split")


@pytest.mark.parametrize(
    ("query_lens", "cuts"),
    [
        ([100] * 4, [200]),
        ([8] * 41, [168]),
        ([10, 150, 140], [160]),
        ([*[1] * 200, 220], [200]),
    ],
)
def test_the_cut_is_at_a_request_near_the_middle(query_lens: list[int], cuts: list[int]):
    decision = made().decide(query_lens, lambda split: True)
    assert decision.split is not None
    assert list(decision.split.cuts) == cuts


def test_a_first_ubatch_may_be_larger():
    decision = made(split="token", first_share=0.625).decide([300, 100], lambda split: True)
    assert decision.split is not None
    assert list(decision.split.cuts) == [250]


def test_a_cut_that_breaks_a_prefix_is_not_made():
    chosen = made()
    assert chosen.decide([128, 128], lambda split: list(split.cuts) != [128]).split is None
    assert chosen.counts() == {"prefix_dependency": 1}


def test_a_veto_of_another_rank_counts_instead():
    chosen = made()
    assert chosen.veto(chosen.decide([128, 128], lambda split: True)).split is None
    assert {reason: n for reason, n in chosen.counts().items() if n} == {"vetoed": 1}


def test_the_log_says_how_often_and_gives_the_newest_example(lines: list[str]):
    published: list[Counts] = []
    chosen = made(published)
    for query_lens in ([100], [128, 128], [100, 20]):
        chosen.decide(query_lens, lambda split: True)
    chosen.tell()
    (line,) = lines
    assert "2 x fewer tokens than min_total_tokens_to_split (the newest: 2 requests, 120" in line
    assert "1 x split (the newest: 2 requests, 256 tokens, 256 of them prefill, cut at 128)" in line
    assert published == [{"few_tokens": 2, "split": 1}]
    chosen.tell()
    assert len(lines) == 1, "nothing new was decided"
