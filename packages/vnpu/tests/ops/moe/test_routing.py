"""Gating and routing of a mixture of experts equal their definitions."""

import pytest
import torch
import torch_npu
from hypothesis import given
from hypothesis import strategies as st

from vllm_davinci_testing.operators.comparison import compare
from vllm_davinci_testing.operators.strategies import FLOATS, shuffled, values


def near(npu: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = 1e-6 if npu.dtype == torch.float32 else 1e-2
    torch.testing.assert_close(npu.cpu().float(), expected.float(), rtol=tolerance, atol=tolerance)


def assignments(experts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the experts of all assignments, sorted, and each one's original position."""
    return experts.flatten().sort(stable=True)


@pytest.mark.parametrize("quantized", [False, True])
@given(
    tokens=st.integers(1, 12),
    k=st.integers(1, 4),
    active=st.sampled_from([None, (2, 6), (0, 0)]),
    by_position=st.booleans(),
    count_form=st.sampled_from([0, 1, 2]),
)
def test_tokens_are_expanded_in_the_order_of_their_experts(
    quantized, tokens, k, active, by_position, count_form
):
    x = values((tokens, 16), torch.float32, 1)
    experts = torch.stack([shuffled(8, t)[:k] for t in range(tokens)]).int()
    first, last = active or (0, 8)
    out, rows, counts, scale = torch_npu.npu_moe_init_routing_v2(
        x.npu(), experts.npu(), expert_num=8, expert_tokens_num_flag=True,
        expert_tokens_num_type=count_form, quant_mode=1 if quantized else -1,
        active_expert_range=[first, last], row_idx_type=int(by_position),
    )  # fmt: skip
    ordered, which = assignments(experts)
    inside = (ordered >= first) & (ordered < last)
    which = which[inside]
    n = len(which)
    picked = x[which // k]
    if quantized:
        largest = picked.abs().amax(-1, keepdim=True)
        near(scale[:n], largest[:, 0] / 127)
        steps = out[:n].cpu().float() * largest / 127 - picked
        assert (steps.abs() <= largest / 127 * 0.501).all()
    else:
        compare(out[:n], picked)
    if by_position:  # rows of later experts follow, then rows of earlier ones
        flat = experts.flatten()
        index = assignments(flat.masked_fill(flat < first, 8))[1].int()
        assert index[:n].tolist() == which.tolist()
    else:
        index = torch.full((tokens * k,), -1, dtype=torch.int32)
        index[which] = torch.arange(n).int()
    compare(rows, index)
    histogram = ordered[inside].long().bincount(minlength=8)[first:last]
    if count_form == 2:
        used = histogram.nonzero()[:, 0]
        pairs = torch.zeros(8, 2, dtype=torch.long)
        pairs[: len(used)] = torch.stack([used + first, histogram[used]], 1)
        compare(counts, pairs)
    else:
        compare(counts, histogram.cumsum(0) if count_form == 0 else histogram)


@given(capacity=st.integers(1, 5), seed=st.integers(0, 99))
def test_tokens_beyond_the_capacity_are_dropped(capacity: int, seed: int) -> None:
    x = values((7, 8), torch.float16, 1)
    experts = values((7, 2), torch.int64, seed, low=0, high=4).int()
    out, rows, *_ = torch_npu.npu_moe_init_routing_v2(
        x.npu(), experts.npu(), expert_capacity=capacity, expert_num=4, drop_pad_mode=1,
        expert_tokens_num_type=1, expert_tokens_num_flag=True, active_expert_range=[0, 4],
    )  # fmt: skip
    expected = torch.zeros(4, capacity, 8, dtype=torch.float16)
    index = torch.full((14,), -1, dtype=torch.int32)
    filled = [0] * 4
    for a, e in enumerate(experts.flatten().tolist()):
        if filled[e] < capacity:
            expected[e, filled[e]] = x[a // 2]
            index[a] = e * capacity + filled[e]
            filled[e] += 1
    compare(out, expected)
    compare(rows, index)


@pytest.mark.parametrize("mode", [0, 1, 2, 3])
@given(
    dtype=st.sampled_from(FLOATS), weighted=st.booleans(), biased=st.booleans(), skips=st.booleans()
)
def test_results_return_to_their_tokens(mode, dtype, weighted, biased, skips):
    tokens, k, size = 6, 3 if weighted else 1, 16
    rows = values((8, 3, size) if mode % 2 else (tokens * k, size), dtype, 1)
    flat = rows.view(-1, size)
    index = shuffled(flat.shape[0])[: tokens * k].int()
    if mode % 2:
        index[2] = -1  # dropped rows
    skip, bias = values((tokens, size), dtype, 2), values((8, size), dtype, 3)
    scales, experts = (
        values((tokens, k), dtype, 4),
        values((tokens, k), torch.int64, 5, low=0, high=8),
    )
    out = torch_npu.npu_moe_finalize_routing(
        rows.npu(), skip.npu() if skips else None, None, bias.npu() if biased else None,
        scales.npu() if weighted else None, index.npu(), experts.int().npu(), mode,
    )  # fmt: skip
    table = index.view(k, tokens).t() if mode < 2 else index.view(tokens, k)
    part = flat.float()[table.long()].masked_fill((table < 0)[..., None], 0)
    if biased:
        part = part + bias.float()[experts]
    if weighted:
        part = part * scales.float()[..., None]
    near(out, skip.float() * skips + part.sum(1))


def test_results_of_a_row_that_does_not_exist_are_refused() -> None:
    rows, index = torch.ones(4, 16).npu(), torch.tensor([0, 4], dtype=torch.int32).npu()
    with pytest.raises(RuntimeError, match=r"expandedRowIdx\[1\] is 4, there are 4 rows"):
        torch_npu.npu_moe_finalize_routing(rows, None, None, None, None, index, None, 2)
        torch.npu.synchronize()
