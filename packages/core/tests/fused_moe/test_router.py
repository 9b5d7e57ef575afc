"""Routing rules and the expert stage equal their definitions in plain torch."""

import math

import pytest
import torch

from vllm_davinci.core.fused_moe.dispatcher.base import SelectedTokens
from vllm_davinci.core.fused_moe.dispatcher.local import LocalDispatcher
from vllm_davinci.core.fused_moe.local_experts import Experts, FloatExperts
from vllm_davinci.core.fused_moe.router import RoutingRule, select_experts

NUM_EXPERTS, HIDDEN_SIZE, INTERMEDIATE_SIZE = 16, 48, 24


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def defined_choice(logits: torch.Tensor, rule: RoutingRule) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and experts of each token, as the definition says."""
    scores = logits.float().softmax(-1) if rule.scoring == "softmax" else logits.float().sigmoid()
    bias = rule.correction_bias
    choice = scores if bias is None else scores + bias
    groups = choice.view(len(logits), rule.num_expert_group, -1)
    best = groups.amax(-1) if bias is None else groups.topk(2, -1).values.sum(-1)
    kept = torch.zeros_like(best, dtype=torch.bool)
    kept.scatter_(1, best.topk(rule.topk_group, -1).indices, True)
    choice = groups.masked_fill(~kept[..., None], -math.inf).flatten(1)
    ids = choice.topk(rule.top_k, -1).indices
    weights = scores.gather(1, ids)
    if rule.renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights * rule.scaling_factor, ids


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize(("groups", "chosen_groups"), [(1, 1), (4, 2)])
@pytest.mark.parametrize("scaling_factor", [1.0, 2.5])
def test_choice_of_experts_equals_its_definition(
    scoring: str,
    renormalize: bool,
    biased: bool,
    groups: int,
    chosen_groups: int,
    scaling_factor: float,
    device: torch.device,
):
    bias = torch.randn(NUM_EXPERTS, generator=generator(1)) / 4
    rule = RoutingRule(
        3, scoring, renormalize, groups, chosen_groups, scaling_factor, bias if biased else None
    )
    logits = torch.randn(9, NUM_EXPERTS, generator=generator())
    weights, ids = defined_choice(logits, rule)
    on_device = RoutingRule(
        *(3, scoring, renormalize, groups, chosen_groups, scaling_factor),
        bias.to(device) if biased else None,
    )
    x = torch.zeros(9, 2, device=device)
    actual_weights, actual_ids = select_experts(x, logits.to(device), on_device)
    assert torch.equal(actual_ids.cpu().long(), ids)
    assert actual_ids.dtype == torch.int32
    torch.testing.assert_close(actual_weights.cpu(), weights, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_weights_take_the_dtype_of_the_tokens(dtype: torch.dtype, device: torch.device):
    bias = torch.zeros(NUM_EXPERTS, device=device)
    logits = torch.randn(5, NUM_EXPERTS, generator=generator()).to(dtype)
    x = torch.zeros(5, 2, dtype=dtype, device=device)
    for rule in (RoutingRule(2), RoutingRule(2, "sigmoid", correction_bias=bias)):
        weights, ids = select_experts(x, logits.to(device), rule)
        expected, expected_ids = defined_choice(logits, RoutingRule(2, rule.scoring))
        assert weights.dtype == dtype
        assert torch.equal(ids.cpu().long(), expected_ids)
        torch.testing.assert_close(weights.cpu().float(), expected, atol=1e-2, rtol=1e-2)


def test_a_model_with_its_own_routing_function_is_asked(device: torch.device):
    def last_experts(
        hidden_states: torch.Tensor, gating_output: torch.Tensor, topk: int, renormalize: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.arange(NUM_EXPERTS - topk, NUM_EXPERTS, device=gating_output.device)
        ids = ids.expand(len(gating_output), topk)
        return gating_output.gather(1, ids), ids

    logits = torch.randn(4, NUM_EXPERTS, generator=generator())
    weights, ids = select_experts(
        torch.zeros(4, 2, device=device), logits.to(device), RoutingRule(2, custom=last_experts)
    )
    assert torch.equal(weights.cpu(), logits[:, -2:])
    assert ids.cpu().tolist() == [[14, 15]] * 4


def routed(
    experts: Experts, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor
) -> torch.Tensor:
    """The stage as a layer without communication runs it."""
    dispatcher = LocalDispatcher()
    tokens = dispatcher.dispatch(SelectedTokens(x, topk_weights, topk_ids), experts)
    results = experts(tokens.rows, tokens.tokens_per_expert, tokens.scales)
    return dispatcher.combine(results, tokens)


class Stage:
    """Experts with random weights, and what they compute by definition."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        def weight(*shape: int, seed: int) -> torch.Tensor:
            values = torch.randn(*shape, generator=generator(seed)) / math.sqrt(shape[1])
            return values.to(dtype)

        self.gate_up = weight(NUM_EXPERTS, HIDDEN_SIZE, 2 * INTERMEDIATE_SIZE, seed=2)
        self.down = weight(NUM_EXPERTS, INTERMEDIATE_SIZE, HIDDEN_SIZE, seed=3)

    def on_device(self, first: int, num_local: int) -> FloatExperts:
        local = slice(first, first + num_local)
        return FloatExperts(
            gate_up=self.gate_up[local].to("npu"),
            down=self.down[local].to("npu"),
            first=first,
            num_local=num_local,
            num_experts=NUM_EXPERTS,
        )

    def defined(
        self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, first: int, num_local: int
    ) -> torch.Tensor:
        total = torch.zeros(x.shape)
        for expert in range(first, first + num_local):
            gate, up = (x.float() @ self.gate_up[expert].float()).chunk(2, -1)
            rows = torch.nn.functional.silu(gate) * up @ self.down[expert].float()
            share = (weights.float() * (ids == expert)).sum(-1, keepdim=True)
            total += torch.where(share != 0, share * rows, 0)
        return total


def routed_tokens(num_tokens: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    x = torch.randn(num_tokens, HIDDEN_SIZE, generator=generator(4)).to(dtype)
    logits = torch.randn(num_tokens, NUM_EXPERTS, generator=generator(5))
    weights, ids = defined_choice(logits, RoutingRule(4))
    return x, weights.to(dtype), ids.to(torch.int32)


@pytest.mark.parametrize(("first", "num_local"), [(0, NUM_EXPERTS), (0, 4), (12, 4), (5, 1)])
@pytest.mark.parametrize("num_tokens", [1, 37])
def test_the_expert_stage_equals_its_definition(
    first: int, num_local: int, num_tokens: int, device: torch.device
):
    stage = Stage()
    x, weights, ids = routed_tokens(num_tokens)
    expected = stage.defined(x, weights, ids, first, num_local)
    experts = stage.on_device(first, num_local)
    actual = routed(experts, x.to(device), weights.to(device), ids.to(device))
    torch.testing.assert_close(actual.cpu(), expected, atol=1e-5, rtol=1e-5)


def test_the_expert_stage_in_bfloat16_is_close_to_its_definition(device: torch.device):
    stage = Stage(torch.bfloat16)
    x, weights, ids = routed_tokens(21, torch.bfloat16)
    expected = stage.defined(x, weights, ids, 0, NUM_EXPERTS)
    experts = stage.on_device(0, NUM_EXPERTS)
    actual = routed(experts, x.to(device), weights.to(device), ids.to(device))
    assert actual.dtype == torch.bfloat16
    # Two products rounded to 8 bits of mantissa, of values around 1.
    torch.testing.assert_close(actual.cpu().float(), expected, atol=5e-2, rtol=5e-2)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize(("first", "num_local"), [(0, NUM_EXPERTS), (4, 4)])
def test_a_token_that_is_not_a_number_stays_alone(
    value: float, first: int, num_local: int, device: torch.device
):
    stage = Stage()
    x, _, _ = routed_tokens(11)
    logits = torch.randn(11, NUM_EXPERTS, generator=generator(5))
    rule = RoutingRule(4, "sigmoid", num_expert_group=4, topk_group=2)

    def run() -> torch.Tensor:
        weights, ids = select_experts(x.to(device), logits.to(device), rule)
        return routed(stage.on_device(first, num_local), x.to(device), weights, ids).cpu()

    clean = run()
    x[7], logits[7] = value, value
    dirty = run()
    others = torch.arange(11) != 7
    assert clean.isfinite().all()
    # It goes to other experts, and a product over more rows may sum in another order.
    torch.testing.assert_close(dirty[others], clean[others], atol=1e-6, rtol=1e-5)
