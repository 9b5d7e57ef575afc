"""The expert stage equals torch_npu's launches bit for bit, and its definition."""

import pytest
import torch
import torch_npu

from vllm_davinci.kernels import reference

ops = torch.ops.vllm_davinci
HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 64, 48, 16, 4
DTYPES = [torch.float32, torch.bfloat16]


def normal(seed: int, dtype: torch.dtype, *sizes: int) -> torch.Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed)).to(dtype)


def composed(
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    first: int,
) -> torch.Tensor:
    """The stage as calls of torch_npu."""
    rows, row_of_assignment, counts, _ = torch_npu.npu_moe_init_routing_v2(
        x, topk_ids, active_num=topk_ids.numel(), expert_num=EXPERTS, expert_tokens_num_type=1,
        expert_tokens_num_flag=True, active_expert_range=[first, first + gate_up.shape[0]],
    )  # fmt: skip

    def multiply(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch_npu.npu_grouped_matmul(
            [rows], [weight], group_list=counts, split_item=2, group_type=0, group_list_type=1
        )[0]

    rows = multiply(torch_npu.npu_swiglu(multiply(rows, gate_up)), down)
    return torch_npu.npu_moe_finalize_routing(
        rows.unsqueeze(0), None, None, None, topk_weights, row_of_assignment, None, drop_pad_mode=3
    )


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
def test_experts_of_a_rank_equal_their_composition(
    dtype: torch.dtype, num_tokens: int, first: int, num_local: int
) -> None:
    x = normal(0, dtype, num_tokens, HIDDEN)
    gate_up, down = weights(dtype, num_local)
    topk_weights = normal(3, dtype, num_tokens, TOP_K).abs()
    generator = torch.Generator().manual_seed(4)
    topk_ids = torch.stack(
        [torch.randperm(EXPERTS, generator=generator)[:TOP_K] for _ in range(num_tokens)]
    ).int()
    inputs = [t.npu() for t in (x, topk_weights, topk_ids, gate_up, down)]
    found = ops.experts(*inputs, first, EXPERTS)
    assert torch.equal(found, composed(*inputs, first))
    near(found, reference.experts(x, topk_weights, topk_ids, gate_up, down, first, EXPERTS))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("is_sigmoid", "groups", "with_bias", "factor"),
    [(True, (4, 2), True, 2.5), (True, (1, 1), True, 1.0), (False, (1, 1), False, 1.0),
     (False, (4, 1), False, 16.0)],
)  # fmt: skip
@pytest.mark.parametrize("are_logits_wide", [True, False], ids=["fp32_logits", "own_logits"])
def test_routing_and_experts_equal_their_composition(
    dtype: torch.dtype,
    is_sigmoid: bool,
    groups: tuple[int, int],
    with_bias: bool,
    factor: float,
    are_logits_wide: bool,
) -> None:
    num_tokens = 9
    x = normal(0, dtype, num_tokens, HIDDEN)
    gate_up, down = weights(dtype, EXPERTS)
    logits = normal(5, torch.float32 if are_logits_wide else dtype, num_tokens, EXPERTS)
    bias = normal(6, torch.float32, EXPERTS) if with_bias else None
    inputs = [t.npu() for t in (x, logits, gate_up, down)]
    device_bias = None if bias is None else bias.npu()
    scored = inputs[1] if bias is None else inputs[1].float()
    found = ops.routed_experts(
        inputs[0], inputs[1], device_bias, *inputs[2:], TOP_K, *groups, is_sigmoid, factor, 0,
        EXPERTS,
    )  # fmt: skip
    if not is_sigmoid and groups == (1, 1):
        topk_weights, topk_ids, _ = torch_npu.npu_moe_gating_top_k_softmax_v2(
            scored, k=TOP_K, renorm=1
        )
    else:
        topk_weights, topk_ids, _ = torch_npu.npu_moe_gating_top_k(
            scored, TOP_K, bias=device_bias, k_group=groups[1], group_count=groups[0],
            group_select_mode=int(with_bias), norm_type=int(is_sigmoid),
            routed_scaling_factor=factor,
        )  # fmt: skip
    expected = composed(inputs[0], topk_weights.to(dtype), topk_ids, *inputs[2:], 0)
    assert torch.equal(found, expected)
    near(
        found,
        reference.routed_experts(
            x, logits, bias, gate_up, down, TOP_K, *groups, is_sigmoid, factor, 0, EXPERTS
        ),
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_tokens", [1, 7, 40])
@pytest.mark.parametrize(("first", "num_local"), [(0, EXPERTS), (4, 8)])
def test_int8_experts_equal_their_composition(
    dtype: torch.dtype, num_tokens: int, first: int, num_local: int
) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    x = normal(0, dtype, num_tokens, HIDDEN)
    gate_up = torch.randint(
        -127, 128, (num_local, HIDDEN, 2 * INTERMEDIATE), dtype=torch.int8, generator=generator
    )
    down = torch.randint(
        -127, 128, (num_local, INTERMEDIATE, HIDDEN), dtype=torch.int8, generator=generator
    )
    gate_up_scale = normal(7, torch.float32, num_local, 2 * INTERMEDIATE).abs() / 800
    down_scale = normal(8, torch.float32, num_local, HIDDEN).abs() / 800
    if dtype == torch.bfloat16:
        down_scale = down_scale.to(dtype)
    topk_weights = normal(3, dtype, num_tokens, TOP_K).abs()
    topk_ids = torch.stack(
        [torch.randperm(EXPERTS, generator=generator)[:TOP_K] for _ in range(num_tokens)]
    ).int()
    host = (x, topk_weights, topk_ids, gate_up, gate_up_scale, down, down_scale)
    inputs = [t.npu() for t in host]
    found = ops.experts_w8a8(*inputs, first, EXPERTS)

    rows, row_of_assignment, counts, scales = torch_npu.npu_moe_init_routing_v2(
        inputs[0], inputs[2], active_num=topk_ids.numel(), expert_num=EXPERTS,
        expert_tokens_num_type=1, expert_tokens_num_flag=True, quant_mode=1,
        active_expert_range=[first, first + num_local],
    )  # fmt: skip
    groups = {"group_list": counts, "split_item": 2, "group_type": 0, "group_list_type": 1}
    sums = torch_npu.npu_grouped_matmul([rows], [inputs[3]], output_dtype=torch.int32, **groups)
    activated, activated_scales = torch_npu.npu_dequant_swiglu_quant(
        sums[0], weight_scale=inputs[4], activation_scale=scales, group_index=counts,
        activate_left=True, quant_mode=1,
    )  # fmt: skip
    rows = torch_npu.npu_grouped_matmul(
        [activated], [inputs[5]], scale=[inputs[6]], per_token_scale=[activated_scales],
        output_dtype=dtype, **groups,
    )[0]  # fmt: skip
    expected = torch_npu.npu_moe_finalize_routing(
        rows.unsqueeze(0), None, None, None, inputs[1], row_of_assignment, None, drop_pad_mode=3
    )
    assert torch.equal(found, expected)
    defined = reference.experts_w8a8(*host, first, EXPERTS)
    # An activation between two integers may fall to either, which moves a sum by a hundredth.
    limit = 0.02 * float(defined.abs().max())
    torch.testing.assert_close(found.cpu(), defined, rtol=0.02, atol=limit)


def test_a_broken_token_spoils_no_other() -> None:
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
