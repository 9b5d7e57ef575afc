"""When a step is split, and the reason."""

import json
from pathlib import Path

import pytest

from vllm_davinci.multistream import CostsError, Reason, SplitPolicy, StepCosts, StepFacts

PREFILL = StepFacts([128, 128, 128, 128])
# Splitting pays from 512 tokens on.
COSTS = StepCosts([256, 1024], whole={"only": [10.0, 20.0]}, split={"only": [14.0, 12.0]})

CASES = [
    (SplitPolicy(), PREFILL, Reason.SPLIT),
    (SplitPolicy(enabled=False), PREFILL, Reason.DISABLED),
    (SplitPolicy(), StepFacts([512], is_real=False), Reason.NOT_A_STEP),
    (SplitPolicy(has_communication=False), PREFILL, Reason.NO_COMMUNICATION),
    (SplitPolicy(), StepFacts([256, 256], is_graph_replay=True), Reason.GRAPH_REPLAY),
    (
        SplitPolicy(),
        StepFacts([1] * 64, is_graph_replay=True, is_split_in_graph=True),
        Reason.SPLIT_REPLAY,
    ),
    (SplitPolicy(), StepFacts([256, 256], is_supported=False), Reason.UNSUPPORTED),
    (SplitPolicy(), StepFacts([1] * 400), Reason.NO_PREFILL),
    (SplitPolicy(decode=True), StepFacts([1] * 400), Reason.SPLIT),
    (SplitPolicy(decode=True), StepFacts([1] * 31), Reason.FEW_DECODE_TOKENS),
    (SplitPolicy(), StepFacts([128, 127]), Reason.FEW_TOKENS),
    (SplitPolicy(), StepFacts([128, 128]), Reason.SPLIT),
    (SplitPolicy(), StepFacts([1] * 250 + [63]), Reason.FEW_PREFILL_TOKENS),
    (SplitPolicy(), StepFacts([1] * 250 + [64]), Reason.SPLIT),
    (SplitPolicy(decode=True), StepFacts([3] * 400, decode_query_len=3), Reason.SPLIT),
    (SplitPolicy(), StepFacts([1] * 150 + [63] + [1] * 150), Reason.FEW_PREFILL_TOKENS),
    (SplitPolicy(), StepFacts([512]), Reason.NO_CUT),
    (SplitPolicy(mode="token", alignment=256), StepFacts([512]), Reason.SPLIT),
    (SplitPolicy(mode="token", alignment=384), StepFacts([300]), Reason.NO_CUT),
    (SplitPolicy(costs=COSTS), PREFILL, Reason.NO_GAIN),
    (SplitPolicy(costs=COSTS, min_total_tokens=9999), StepFacts([512, 513]), Reason.SPLIT),
    (SplitPolicy(costs=COSTS, min_prefill_tokens=99), StepFacts([1] * 650 + [9]), Reason.SPLIT),
    (SplitPolicy(costs=COSTS), StepFacts([1] * 650), Reason.NO_PREFILL),
]


@pytest.mark.parametrize(("policy", "step", "reason"), CASES)
def test_each_rule_gives_its_reason(policy: SplitPolicy, step: StepFacts, reason: Reason) -> None:
    decision = policy.decide(step)
    assert decision.reason is reason
    assert (decision.split is not None) == (reason is Reason.SPLIT)


def test_a_split_is_withdrawn_for_a_reason_that_the_caller_found() -> None:
    decision = SplitPolicy().decide(PREFILL).withdrawn("VETOED")
    assert decision.split is None
    assert decision.reason is Reason.VETOED
    whole = SplitPolicy().decide(StepFacts([4]))
    assert whole.withdrawn("VETOED") is whole


@pytest.mark.parametrize(
    ("tokens", "gains"),
    [(1, False), (255, False), (256, False), (511, False), (513, True), (1024, True), (9999, True)],
)
def test_costs_are_interpolated_between_their_sizes(tokens: int, gains: bool) -> None:
    # Whole minus split is -4 at 256 and 8 at 1024 tokens, so 0 at 512.
    assert COSTS.gains(tokens) is gains


def test_methods_are_interpolated_before_the_fastest_is_found() -> None:
    # The fastest split method takes 6 at 512 and 7 at 1024 tokens; between them both methods take
    # longer.
    costs = StepCosts(
        [512, 1024], whole={"one": [5.0, 7.4]}, split={"one": [6.0, 9.0], "other": [7.0, 7.0]}
    )
    assert costs.durations(896)[1] == {"one": 8.25, "other": 7.0}
    assert not costs.gains(896)
    assert costs.gains(1000)


def test_each_step_has_the_first_share_of_its_size() -> None:
    costs = StepCosts([256, 1024], {"only": [9.0, 9.0]}, {"only": [8.0, 8.0]}, [None, 0.75])

    def cuts(policy: SplitPolicy, *query_lens: int, cached: int = 0) -> tuple[int, ...]:
        split = policy.decide(StepFacts(query_lens, num_cached_tokens=cached)).split
        assert split is not None
        return split.cuts

    policy = SplitPolicy(mode="token", costs=costs)
    assert cuts(policy, 1000) == (500,)
    assert cuts(policy, 1200, 800) == (1500,)
    assert cuts(policy, 2000, cached=500) == (1500,)
    assert cuts(policy, 2000, cached=501) == (1000,)  # all tokens attend to many cached tokens
    set_share = SplitPolicy(mode="token", costs=costs, first_share=0.25)
    assert cuts(set_share, 2000) == cuts(set_share, 2000, cached=4000) == (500,)


@pytest.mark.parametrize("shares", [[0.5], [0.5, 1.0]])
def test_invalid_first_shares_are_refused(shares: list[float]) -> None:
    with pytest.raises(CostsError, match="a first share per size, between 0 and 1"):
        StepCosts([256, 1024], {"only": [9.0, 9.0]}, {"only": [8.0, 8.0]}, shares)


def test_costs_cover_the_methods_that_the_engine_can_use(tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    by_method = {"whole": {"one": 4, "other": 9}, "split": {"one": 5, "other": 3}}
    file.write_text(
        json.dumps({"steps": [{"tokens": 8, "whole": 4, "split": 3, "by_method": by_method}]})
    )
    assert StepCosts.read(file).gains(8)
    assert not StepCosts.read(file, ["one"]).gains(8)
    assert StepCosts.read(file, ["third"]).gains(8)  # no times are known for it


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no step times"),
        ('{"steps": [{"tokens": 1}]}', "has no step times"),
        ('{"steps": []}', "need a value"),
        ('{"steps": [{"tokens": 0, "whole": 1, "split": 1}]}', "expected ascending numbers"),
        ('{"steps": [{"tokens": 1, "whole": 1, "split": 0}]}', "above 0"),
    ],
)
def test_a_file_without_costs_is_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "costs.json"
    file.write_text(text)
    with pytest.raises(CostsError, match=message):
        StepCosts.read(file)
