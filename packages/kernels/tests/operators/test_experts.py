"""The expert stage equals its definition; test_kernels compares its bits with torch_npu's calls."""

from typing import NamedTuple

import pytest
import torch

from vllm_davinci import operators

ops = torch.ops.vllm_davinci
HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 64, 48, 16, 4
DTYPES = [torch.float32, torch.bfloat16]


def normal(seed: int, dtype: torch.dtype, *sizes: int) -> torch.Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Rule(NamedTuple):
    """A rule for choosing experts. groups: number of expert groups, and how many of them a token
    chooses from
    """

    groups: tuple[int, int]
    is_sigmoid: bool
    factor: float
    with_bias: bool

    @property
    def arguments(self) -> tuple[object, ...]:
        return TOP_K, *self.groups, self.is_sigmoid, self.factor


def near(npu: torch.Tensor, expected: torch.Tensor) -> None:
    limit = 32 * torch.finfo(expected.dtype).eps
    scale = float(expected.abs().max().clamp_min(1))
    torch.testing.assert_close(npu.cpu(), expected, rtol=limit, atol=limit * scale)


def weights(dtype: torch.dtype, num_local: int) -> tuple[torch.Tensor, torch.Tensor]:
    return (
        normal(1, dtype, num_local, HIDDEN, 2 * INTERMEDIATE) / 8,
        normal(2, dtype, num_local, INTERMEDIATE, HIDDEN) / 8,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [1, 7, 40])
@pytest.mark.parametrize(("first", "num_local"), [(0, EXPERTS), (4, 8)])
def test_experts_of_a_rank_equal_their_definition(dtype, num_tokens, first, num_local):
    x = normal(0, dtype, num_tokens, HIDDEN)
    gate_up, down = weights(dtype, num_local)
    topk_weights = normal(3, dtype, num_tokens, TOP_K).abs()
    generator = torch.Generator().manual_seed(4)
    topk_ids = torch.stack(
        [torch.randperm(EXPERTS, generator=generator)[:TOP_K] for _ in range(num_tokens)]
    ).int()
    inputs = [t.npu() for t in (x, topk_weights, topk_ids, gate_up, down)]
    found = ops.experts(*inputs, first, EXPERTS)
    near(found, operators.experts(x, topk_weights, topk_ids, gate_up, down, first, EXPERTS))


RULES = pytest.mark.parametrize(
    "rule",
    [
        Rule((4, 2), is_sigmoid=True, factor=2.5, with_bias=True),
        Rule((1, 1), is_sigmoid=True, factor=1.0, with_bias=True),
        Rule((1, 1), is_sigmoid=False, factor=1.0, with_bias=False),
        Rule((4, 1), is_sigmoid=False, factor=16.0, with_bias=False),
    ],
)
LOGITS = pytest.mark.parametrize(
    "are_logits_wide", [True, False], ids=["fp32_logits", "own_logits"]
)


def tokens(
    dtype: torch.dtype, are_logits_wide: bool, with_bias: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Makes nine tokens, their router logits, and the correction bias."""
    logits = normal(5, torch.float32 if are_logits_wide else dtype, 9, EXPERTS)
    bias = normal(6, torch.float32, EXPERTS) if with_bias else None
    return normal(0, dtype, 9, HIDDEN), logits, bias


@pytest.mark.parametrize("dtype", DTYPES)
@RULES
@LOGITS
def test_routing_and_experts_equal_their_definition(dtype, rule, are_logits_wide):
    x, logits, bias = tokens(dtype, are_logits_wide, rule.with_bias)
    gate_up, down = weights(dtype, EXPERTS)
    inputs = [t.npu() for t in (x, logits, gate_up, down)]
    device_bias = None if bias is None else bias.npu()
    found = ops.routed_experts(
        inputs[0], inputs[1], device_bias, *inputs[2:], *rule.arguments, 0, EXPERTS
    )  # fmt: skip
    near(
        found, operators.routed_experts(x, logits, bias, gate_up, down, *rule.arguments, 0, EXPERTS)
    )


def int8_weights(dtype: torch.dtype, num_local: int) -> list[torch.Tensor]:
    """Makes gate_up and its scale, down and its scale."""
    generator = torch.Generator().manual_seed(num_local)
    gate_up, down = (
        torch.randint(-127, 128, (num_local, *sizes), dtype=torch.int8, generator=generator)
        for sizes in ((HIDDEN, 2 * INTERMEDIATE), (INTERMEDIATE, HIDDEN))
    )
    gate_up_scale = normal(7, torch.float32, num_local, 2 * INTERMEDIATE).abs() / 800
    down_scale = normal(8, torch.float32, num_local, HIDDEN).abs() / 800
    return [
        gate_up,
        gate_up_scale,
        down,
        down_scale.to(dtype) if dtype == torch.bfloat16 else down_scale,
    ]


def near_integers(npu: torch.Tensor, expected: torch.Tensor) -> None:
    # An activation halfway between two integers may round up or down, which changes a sum by 1 %.
    limit = 0.02 * float(expected.abs().max())
    torch.testing.assert_close(npu.cpu(), expected, rtol=0.02, atol=limit)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_tokens", [1, 7, 40])
@pytest.mark.parametrize(("first", "num_local"), [(0, EXPERTS), (4, 8)])
def test_int8_experts_equal_their_definition(dtype, num_tokens, first, num_local):
    generator = torch.Generator().manual_seed(num_tokens)
    x = normal(0, dtype, num_tokens, HIDDEN)
    weights = int8_weights(dtype, num_local)
    topk_weights = normal(3, dtype, num_tokens, TOP_K).abs()
    topk_ids = torch.stack(
        [torch.randperm(EXPERTS, generator=generator)[:TOP_K] for _ in range(num_tokens)]
    ).int()
    host = (x, topk_weights, topk_ids, *weights)
    inputs = [t.npu() for t in host]
    found = ops.experts_w8a8(*inputs, first, EXPERTS)
    near_integers(found, operators.experts_w8a8(*host, first, EXPERTS))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@RULES
@LOGITS
def test_routing_and_int8_experts_equal_their_definition(dtype, rule, are_logits_wide):
    first = 4
    x, logits, bias = tokens(dtype, are_logits_wide, rule.with_bias)
    weights = int8_weights(dtype, 8)
    given = (*rule.arguments, first, EXPERTS)
    on_device = [t.npu() for t in weights]
    device_bias = None if bias is None else bias.npu()
    found = ops.routed_experts_w8a8(x.npu(), logits.npu(), device_bias, *on_device, *given)
    near_integers(found, operators.routed_experts_w8a8(x, logits, bias, *weights, *given))


def test_a_nan_token_affects_no_other() -> None:
    x = normal(0, torch.float32, 6, HIDDEN)
    gate_up, down = weights(torch.float32, EXPERTS)
    logits = normal(5, torch.float32, 6, EXPERTS)
    broken = x.clone()
    broken[2] = torch.nan
    outputs = [
        ops.routed_experts(
            t.npu(), logits.npu(), None, gate_up.npu(), down.npu(), TOP_K, 1, 1, False, 1.0, 0,
            EXPERTS,
        ).cpu()
        for t in (x, broken)
    ]  # fmt: skip
    others = [0, 1, 3, 4, 5]
    assert torch.equal(outputs[0][others], outputs[1][others])
    assert outputs[1][2].isnan().all()


def test_experts_outside_the_model_are_refused() -> None:
    gate_up, down = (t.npu() for t in weights(torch.float32, 8))
    x, ids = torch.ones(2, HIDDEN).npu(), torch.zeros(2, TOP_K, dtype=torch.int32).npu()
    with pytest.raises(ValueError, match="experts 12 to 20 of 16"):
        ops.experts(x, ids.float(), ids, gate_up, down, 12, EXPERTS)
    with pytest.raises(ValueError, match=r"give \[tokens, top_k\] both"):
        ops.experts(x, ids.float()[:1], ids, gate_up, down, 0, EXPERTS)
    rule = (TOP_K, 1, 1, False, 1.0, 0, EXPERTS)
    integers = [t.npu() for t in int8_weights(torch.bfloat16, 8)]
    logits = torch.zeros(2, EXPERTS).npu()
    with pytest.raises(ValueError, match=r"logits of sizes \[1, 16\].*give \[tokens, experts\]"):
        ops.routed_experts_w8a8(x, logits[:1], None, *integers, *rule)
    with pytest.raises(ValueError, match=r"scales of sizes \[8, 95\].*give one per column"):
        ops.routed_experts_w8a8(
            x, logits, None, integers[0], integers[1][:, 1:], *integers[2:], *rule
        )
    with pytest.raises(TypeError, match=r"weights of Float.*without _w8a8"):
        ops.routed_experts_w8a8(x, logits, None, gate_up, integers[1], down, integers[3], *rule)
