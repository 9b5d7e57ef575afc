"""Whether a step is split, and why."""

import pytest

from vllm_davinci.multistream import Reason, SplitPolicy, StepFacts

PREFILL = StepFacts([128, 128, 128, 128])

CASES = [
    (SplitPolicy(), PREFILL, Reason.SPLIT),
    (SplitPolicy(enabled=False), PREFILL, Reason.DISABLED),
    (SplitPolicy(), StepFacts([512], is_real=False), Reason.NOT_A_STEP),
    (SplitPolicy(has_communication=False), PREFILL, Reason.NO_COMMUNICATION),
    (SplitPolicy(), StepFacts([256, 256], is_graph_replay=True), Reason.GRAPH_REPLAY),
    (SplitPolicy(), StepFacts([256, 256], is_supported=False), Reason.UNSUPPORTED),
    (SplitPolicy(), StepFacts([1] * 400), Reason.NO_PREFILL),
    (SplitPolicy(decode=True), StepFacts([1] * 400), Reason.SPLIT),
    (SplitPolicy(decode=True), StepFacts([1] * 31), Reason.FEW_TOKENS),
    (SplitPolicy(), StepFacts([128, 127]), Reason.FEW_TOKENS),
    (SplitPolicy(), StepFacts([128, 128]), Reason.SPLIT),
    (SplitPolicy(), StepFacts([1] * 250 + [63]), Reason.FEW_PREFILL_TOKENS),
    (SplitPolicy(), StepFacts([1] * 250 + [64]), Reason.SPLIT),
    (SplitPolicy(decode=True), StepFacts([3] * 400, decode_query_len=3), Reason.SPLIT),
    (SplitPolicy(), StepFacts([1] * 150 + [63] + [1] * 150), Reason.FEW_PREFILL_TOKENS),
    (SplitPolicy(), StepFacts([512]), Reason.NO_CUT),
    (SplitPolicy(is_ordered=lambda split: False), PREFILL, Reason.PREFIX_DEPENDENCY),
    (SplitPolicy(mode="token", alignment=256), StepFacts([512]), Reason.SPLIT),
    (SplitPolicy(mode="token", alignment=384), StepFacts([300]), Reason.NO_CUT),
]


@pytest.mark.parametrize(("policy", "step", "reason"), CASES)
def test_each_rule_gives_its_reason_and_counts_it(
    policy: SplitPolicy, step: StepFacts, reason: Reason
) -> None:
    policy.counters.clear()
    decision = policy.decide(step)
    assert decision.reason is reason
    assert (decision.split is not None) == (reason is Reason.SPLIT)
    assert policy.counters == {reason: 1}


def test_a_veto_takes_the_split_back_and_recounts_it() -> None:
    policy = SplitPolicy()
    decision = policy.veto(policy.decide(PREFILL))
    assert decision.split is None
    assert decision.reason is Reason.VETOED
    assert +policy.counters == {Reason.VETOED: 1}
    whole = policy.decide(StepFacts([4]))
    assert policy.veto(whole) is whole
