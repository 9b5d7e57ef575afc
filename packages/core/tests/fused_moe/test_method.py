"""Routed experts: the method's options, and experts without gates."""

import re
from pathlib import Path

import pytest
import torch
from vllm.config import DeviceConfig, ModelConfig, VllmConfig

from vllm_davinci.core.device.soc import soc_of
from vllm_davinci.core.errors import ConfigurationError
from vllm_davinci.core.fused_moe import dispatcher_selector as selector
from vllm_davinci.core.fused_moe.communication import (
    CommunicationMethod,
    CommunicationRule,
    RoutedSizes,
    unfused_reason,
    window_mib,
)
from vllm_davinci.core.fused_moe.dispatcher.row_counts import CountsWait
from vllm_davinci.core.fused_moe.expert_layout import ExpertLayout
from vllm_davinci.core.fused_moe.method import UngatedExperts

# Dispatch methods: the requested and the chosen method, and the reason.

FUSED_VARIABLE = "VLLM_ENABLE_MC2"


REASON = "fused launches take none of this"


def rule(
    tp_size: int,
    dp_size: int,
    etp_size: int,
    forced: CommunicationMethod | None = None,
    no_fusion: str | None = REASON,
    overlapped: bool = False,
) -> CommunicationRule:
    layout = ExpertLayout(tp_size * dp_size, etp_size)
    return CommunicationRule(forced, layout, dp_size, tp_size, 8, no_fusion, overlapped)


@pytest.mark.parametrize(
    ("tp_size", "dp_size", "etp_size", "max_tokens", "method", "reason"),
    [
        (4, 1, 4, 100, CommunicationMethod.ALL_GATHER, "one DP rank"),
        (16, 1, 1, 8, CommunicationMethod.ALL_GATHER, "one DP rank"),
        (
            2,
            2,
            4,
            9,
            CommunicationMethod.MULTICAST,
            "share all experts, and the step has a prefill",
        ),
        (2, 2, 4, 8, CommunicationMethod.ALL_GATHER, "share all experts, and the step decodes"),
        (
            1,
            4,
            2,
            9,
            CommunicationMethod.ALL_GATHER,
            "2 ranks that share an expert belong to several DP ranks",
        ),
        (2, 2, 2, 8, CommunicationMethod.ALL_GATHER, f"the host should not wait, and {REASON}"),
        (2, 2, 1, 9, CommunicationMethod.ALL_TO_ALL, "among 4 ranks, and the step has a prefill"),
        (1, 16, 1, 8, CommunicationMethod.ALL_GATHER, f"the step decodes, .*{REASON}"),
        (
            1,
            32,
            1,
            8,
            CommunicationMethod.ALL_TO_ALL,
            f"among 32 ranks, too many for an all-gather, and {REASON}",
        ),
    ],
)
def test_a_steps_method_follows_from_ranks_and_tokens(
    tp_size, dp_size, etp_size, max_tokens, method, reason
):
    choice = rule(tp_size, dp_size, etp_size).choose(max_tokens)
    assert choice.method is method
    assert re.search(reason, choice.reason)


@pytest.mark.parametrize(
    ("overlapped", "max_tokens", "method", "reason"),
    [
        (False, 8, CommunicationMethod.FUSED, "the step decodes, and fused launches"),
        (False, 9, CommunicationMethod.ALL_TO_ALL, "has a prefill"),
        (True, 8, CommunicationMethod.FUSED, "ubatches overlap, and fused launches"),
        (True, 9, CommunicationMethod.FUSED, "ubatches overlap, and fused launches"),
    ],
)
def test_fused_launches_serve_steps_that_a_waiting_host_would_hurt(
    overlapped: bool, max_tokens: int, method: CommunicationMethod, reason: str
):
    possible = rule(2, 2, 1, no_fusion=None, overlapped=overlapped)
    choice = possible.choose(max_tokens)
    assert choice.method is method
    assert reason in choice.reason
    assert possible.may_fuse


@pytest.mark.parametrize(
    ("elsewhere", "may_fuse"),
    [
        (rule(4, 1, 1, no_fusion=None), False),
        (rule(2, 2, 4, no_fusion=None), False),
        (rule(1, 4, 2, no_fusion=None), False),
        (rule(2, 2, 1), False),
        (rule(2, 2, 1, CommunicationMethod.ALL_TO_ALL, None), False),
        (rule(4, 1, 1, CommunicationMethod.FUSED, None), True),
    ],
)
def test_fused_launches_need_a_group_only_where_a_step_may_use_them(elsewhere, may_fuse):
    assert elsewhere.may_fuse is may_fuse


A2, A3, BF16 = "Ascend910B3", "Ascend910_9391", torch.bfloat16


@pytest.mark.parametrize(
    ("soc", "dtype", "hidden_size", "ranks", "experts", "top_k", "named"),
    [
        (A3, BF16, 7168, 2, 256, 8, None),
        (A3, BF16, 512, 2, 256, 8, "take hidden sizes 1024 to 8192, .* is 512"),
        (A3, torch.float32, 7168, 2, 256, 8, "the model computes in float32"),
        (A3, BF16, 7168, 2, 256, 17, "up to 16 experts per token, and there are 17"),
        (A3, BF16, 7168, 2, 1026, 8, "up to 1024 experts, and there are 1026"),
        (A3, BF16, 7168, 768, 1024, 8, None),
        (A2, torch.float16, 7168, 16, 256, 8, None),
        (A2, torch.float16, 7168, 8, 64, 8, "take 16, 32, 64, 128, 256 ranks, .* among 8"),
        (A2, torch.float16, 72, 16, 64, 8, "32 to 7168 in steps of 32, .* is 72"),
        (A2, torch.float16, 7168, 16, 512, 8, "up to 24 experts per rank, and there are 32"),
        (A2, torch.float16, 7168, 64, 576, 8, "up to 512 experts, and there are 576"),
        ("Ascend310P3", torch.float16, 4096, 2, 64, 8, "Ascend310P has no fused launches"),
    ],
)
def test_obstacles_to_fused_launches_are_named(
    soc, dtype, hidden_size, ranks, experts, top_k, named
):
    reason = unfused_reason(
        soc_of(soc), dtype, RoutedSizes(hidden_size, experts, top_k), ExpertLayout(ranks, 1)
    )
    if named is None:
        assert reason is None
    else:
        assert reason is not None
        assert re.search(named, reason)


@pytest.mark.parametrize(
    ("soc", "sizes", "ranks", "tokens", "mib"),
    [
        # DeepSeek-V3: the default allows at most 26 tokens.
        (A3, RoutedSizes(7168, 256, 8), 16, 26, 200),
        (A3, RoutedSizes(7168, 256, 8), 16, 512, 3840),
        (A2, RoutedSizes(7168, 256, 8), 16, 56, 200),
        (A2, RoutedSizes(7168, 256, 8), 16, 256, 900),
    ],
)
def test_the_buffer_of_fused_launches_holds_the_largest_one(soc, sizes, ranks, tokens, mib):
    limits = soc_of(soc).fused_experts
    assert limits is not None
    assert window_mib(limits, tokens, sizes, ExpertLayout(ranks, 1)) == pytest.approx(mib, rel=0.05)


def test_the_buffer_of_fused_launches_is_at_least_as_large_as_other_groups(monkeypatch):
    limits = soc_of(A3).fused_experts
    assert limits is not None
    sizes = RoutedSizes(2048, 64, 8)
    found = []
    for mib in ("1", "500"):
        monkeypatch.setenv("HCCL_BUFFSIZE", mib)
        found.append(window_mib(limits, 8, sizes, ExpertLayout(2, 1)))
    assert 1 < found[0] < 200
    assert found[1] == 500


@pytest.mark.parametrize(
    "forced",
    [CommunicationMethod.ALL_GATHER, CommunicationMethod.MULTICAST, CommunicationMethod.ALL_TO_ALL],
)
def test_a_method_that_is_asked_for_is_followed(forced: CommunicationMethod):
    asked = rule(2, 2, 1, forced)
    asked.check()
    for max_tokens in (1, 100):
        assert asked.choose(max_tokens).method is forced


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        (
            rule(2, 2, 4, CommunicationMethod.ALL_TO_ALL),
            r"'all_to_all' .*Add --enable-expert-parallel",
        ),
        (
            rule(1, 4, 2, CommunicationMethod.ALL_TO_ALL),
            r"the 2 ranks of an expert within the 1 TP ranks",
        ),
        (rule(2, 2, 4, CommunicationMethod.FUSED), r"'fused' .*Add --enable-expert-parallel"),
        (
            rule(1, 4, 1, CommunicationMethod.FUSED),
            rf"'fused' is not possible: {REASON}\. Use 'all_to_all'",
        ),
    ],
)
def test_a_method_that_the_ranks_cannot_follow_is_an_error(asked: CommunicationRule, named: str):
    with pytest.raises(ConfigurationError, match=named):
        asked.check()


def test_a_variable_that_asks_for_the_impossible_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(FUSED_VARIABLE, "1")
    checkpoint = Path(__file__).parents[4] / "checkpoints" / "tiny_deepseek"
    with pytest.raises(ValueError, match=f"'fused' sends .* {FUSED_VARIABLE}=1 requests it"):
        VllmConfig(
            model_config=ModelConfig(str(checkpoint)), device_config=DeviceConfig(device="npu")
        )


@pytest.mark.parametrize("forced", [CommunicationMethod.ALL_GATHER, CommunicationMethod.MULTICAST])
def test_a_method_asked_for_on_one_dp_rank_is_said_to_have_no_effect(forced, caplog):
    selector.logger.addHandler(caplog.handler)
    try:
        assert (
            selector.dispatcher_selector(rule(2, 1, 1, forced), False, 0, CountsWait("layer"))
            is None
        )
    finally:
        selector.logger.removeHandler(caplog.handler)
    (message,) = {record.getMessage() for record in caplog.records}
    assert (
        f"'moe_communication' = {forced.value!r} has no effect: all ranks of one DP rank" in message
    )


# Experts without gates equal their definition, row by row.

COUNTS, HIDDEN, INNER = [3, 0, 2], 32, 64


def test_every_row_goes_through_its_expert(device: torch.device):
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(sum(COUNTS), HIDDEN, generator=generator)
    up = torch.randn(len(COUNTS), HIDDEN, INNER, generator=generator)
    down = torch.randn(len(COUNTS), INNER, HIDDEN, generator=generator)
    experts = UngatedExperts(
        up=up.to(device), down=down.to(device), first=0, num_local=3, num_experts=3
    )
    found = experts(rows.to(device), torch.tensor(COUNTS, device=device)).cpu()
    expert = torch.repeat_interleave(torch.arange(3), torch.tensor(COUNTS))
    for row, number, result in zip(rows, expert, found, strict=True):
        expected = (row @ up[number]).relu().square() @ down[number]
        torch.testing.assert_close(result, expected, atol=1e-3, rtol=1e-4)
    assert (
        experts(rows[:0].to(device), torch.zeros(3, dtype=torch.int64, device=device)).shape[0] == 0
    )
