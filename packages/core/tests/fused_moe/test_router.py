"""Routing rules and the expert stage equal their definitions in plain torch."""

import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch
from transformers.models.deepseek_v4 import modeling_deepseek_v4
from vllm.model_executor.layers.activation import SituAndMul

from vllm_davinci.core.fused_moe.dispatcher.base import SelectedTokens
from vllm_davinci.core.fused_moe.dispatcher.local import LocalDispatcher
from vllm_davinci.core.fused_moe.gated_activation import GatedActivation, Situ
from vllm_davinci.core.fused_moe.local_experts import Experts, FloatExperts
from vllm_davinci.core.fused_moe.own_choice import OwnChoice, ZeroExperts
from vllm_davinci.core.fused_moe.router import RoutingRule, select_experts

NUM_EXPERTS, HIDDEN_SIZE, INTERMEDIATE_SIZE = 16, 48, 24
DECIDED = RoutingRule(0, is_decided=True)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def defined_choice(logits: torch.Tensor, rule: RoutingRule) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns each token's expert weights and experts, computed in plain torch."""
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
    scoring, renormalize, biased, groups, chosen_groups, scaling_factor, device
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


VOCAB_SIZE = 11


def deepseek_v4_router(name: str) -> tuple[torch.nn.Module, torch.Tensor]:
    """Makes a transformers router with random weights, and rows for it."""
    config = SimpleNamespace(
        num_experts_per_tok=3,
        num_local_experts=NUM_EXPERTS,
        hidden_size=HIDDEN_SIZE,
        scoring_func="sqrtsoftplus",
        routed_scaling_factor=1.5,
        vocab_size=VOCAB_SIZE,
    )
    router = getattr(modeling_deepseek_v4, name)(config)
    router.weight.data.normal_(generator=generator(1))
    return router, torch.randn(9, HIDDEN_SIZE, generator=generator(2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_square_root_of_softplus_chooses_as_in_deepseek_v4(dtype, device):
    router, x = deepseek_v4_router("DeepseekV4TopKRouter")
    router.e_score_correction_bias.normal_(generator=generator(3))
    logits, expected, ids = router(x)
    bias = router.e_score_correction_bias.to(device)
    rule = RoutingRule(3, "sqrtsoftplus", scaling_factor=1.5, correction_bias=bias)
    assert not rule.is_one_launch
    weights, chosen = select_experts(x.to(device, dtype), logits.to(device), rule)
    assert (weights.dtype, chosen.dtype) == (dtype, torch.int32)
    order, expected_order = chosen.cpu().long().sort(), ids.sort()
    assert torch.equal(order.values, expected_order.values)
    torch.testing.assert_close(
        weights.cpu().float().gather(1, order.indices),
        expected.gather(1, expected_order.indices).detach(),
        atol=1e-6 if dtype == torch.float32 else 5e-3,
        rtol=1e-5 if dtype == torch.float32 else 5e-3,
    )


def test_a_table_chooses_by_token_and_logits_weigh(device: torch.device):
    router, x = deepseek_v4_router("DeepseekV4HashRouter")
    table = torch.randint(NUM_EXPERTS, (VOCAB_SIZE, 3), generator=generator(4))
    router.tid2eid.copy_(table)
    tokens = torch.randint(VOCAB_SIZE, (9,), generator=generator(5))
    logits, expected, ids = router(x, tokens)
    rule = RoutingRule(3, "sqrtsoftplus", scaling_factor=1.5)
    choice = OwnChoice(rule, table.int().to(device), None)
    decided = choice(x.to(device), logits.to(device), tokens.to(device))
    weights, chosen = select_experts(x.to(device), decided, DECIDED)
    assert torch.equal(chosen.cpu().long(), ids)
    torch.testing.assert_close(weights.cpu(), expected.detach(), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("token", [-1, VOCAB_SIZE, 2**31 - 1])
def test_padding_of_any_number_has_experts_of_the_table(token: int, device: torch.device):
    table = torch.full((VOCAB_SIZE, 3), NUM_EXPERTS - 1, dtype=torch.int32, device=device)
    logits = torch.zeros(2, NUM_EXPERTS, device=device)
    choice = OwnChoice(RoutingRule(3, "sqrtsoftplus"), table, None)
    decided = choice(logits, logits, torch.tensor([0, token], device=device))
    _, ids = select_experts(logits, decided, DECIDED)
    assert ids.cpu().eq(NUM_EXPERTS - 1).all()


NUM_ZERO = 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_zero_experts_return_their_token_and_the_others_get_its_rows(dtype, device):
    bias = torch.randn(NUM_EXPERTS + NUM_ZERO, generator=generator(1)) / 4
    rule = RoutingRule(4, "softmax", False, scaling_factor=6.0, correction_bias=bias)
    logits = torch.randn(30, NUM_EXPERTS + NUM_ZERO, generator=generator())
    x = torch.randn(30, HIDDEN_SIZE, generator=generator(2)).to(dtype)
    weights, ids = defined_choice(logits, rule)
    zero = ZeroExperts(4, NUM_EXPERTS, bias, NUM_EXPERTS, "identity")
    choice = OwnChoice(dataclasses.replace(rule, correction_bias=bias.to(device)), None, zero)
    decided = choice(x.to(device), logits.to(device), None)
    found, found_ids = (each.cpu() for each in select_experts(x.to(device), decided, DECIDED))
    is_zero = ids >= NUM_EXPERTS
    assert is_zero.any() and not is_zero.all()
    assert torch.equal(found_ids.long(), torch.where(is_zero, ids - NUM_EXPERTS, ids))
    tolerance = (
        {"atol": 1e-6, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 0, "rtol": 0.01}
    )
    torch.testing.assert_close(found.float(), weights.masked_fill(is_zero, 0), **tolerance)
    share = (x.float() * (weights * is_zero).sum(-1, keepdim=True)).to(dtype)
    torch.testing.assert_close(zero.zero_expert_output.cpu(), share, **tolerance)
    assert zero.zero_expert_output is None  # it belongs to one step


def routed(
    experts: Experts, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor
) -> torch.Tensor:
    """Runs the stage like a layer without communication."""
    dispatcher = LocalDispatcher()
    tokens = dispatcher.dispatch(SelectedTokens(x, topk_weights, topk_ids), experts)
    results = experts(tokens.rows, tokens.tokens_per_expert, tokens.scales)
    return dispatcher.combine(results, tokens)


class Stage:
    """Experts with random weights, and their results by definition."""

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
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        ids: torch.Tensor,
        first: int,
        num_local: int,
        limit: float = math.inf,
    ) -> torch.Tensor:
        total = torch.zeros(x.shape)
        for expert in range(first, first + num_local):
            gate, up = (x.float() @ self.gate_up[expert].float()).chunk(2, -1)
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
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
def test_the_expert_stage_equals_its_definition(first, num_local, num_tokens, device):
    stage = Stage()
    x, weights, ids = routed_tokens(num_tokens)
    expected = stage.defined(x, weights, ids, first, num_local)
    experts = stage.on_device(first, num_local)
    actual = routed(experts, x.to(device), weights.to(device), ids.to(device))
    torch.testing.assert_close(actual.cpu(), expected, atol=1e-5, rtol=1e-5)


def test_a_limit_caps_gates_and_clips_factors(device: torch.device):
    stage = Stage()
    x, weights, ids = routed_tokens(23)
    limit = 0.5  # about half of the values exceed the limit
    whole = stage.on_device(0, NUM_EXPERTS)
    experts = dataclasses.replace(whole, activation=GatedActivation(limit))
    assert not experts.has_fused_op(torch.float32)
    expected = stage.defined(x, weights, ids, 0, NUM_EXPERTS, limit)
    arguments = x.to(device), weights.to(device), ids.to(device)
    actual = routed(experts, *arguments)
    torch.testing.assert_close(actual.cpu(), expected, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(routed(whole, *arguments).cpu(), expected, atol=1e-2)


@pytest.mark.parametrize("linear_beta", [None, 2.0])
def test_situ_equals_that_of_vllm(linear_beta: float | None, device: torch.device):
    activation = GatedActivation(situ=Situ(1.5, linear_beta))
    gate_up = 3 * torch.randn(7, 64, generator=torch.Generator().manual_seed(0))
    theirs = SimpleNamespace(beta=1.5, linear_beta=linear_beta)
    expected = SituAndMul.forward_native(theirs, gate_up)
    torch.testing.assert_close(activation(gate_up.to(device)).cpu(), expected)
    whole = Stage().on_device(0, NUM_EXPERTS)
    assert not dataclasses.replace(whole, activation=activation).has_fused_op(torch.float32)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize(("first", "num_local"), [(0, NUM_EXPERTS), (4, 4)])
def test_a_nan_token_affects_no_other(value, first, num_local, device):
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
    # Other rows have other experts, and a product over more rows may sum in another order.
    torch.testing.assert_close(dirty[others], clean[others], atol=1e-6, rtol=1e-5)
