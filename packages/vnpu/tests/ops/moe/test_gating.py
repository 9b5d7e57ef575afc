"""Experts are chosen for tokens."""

import pytest
import torch
import torch_npu
from hypothesis import given
from hypothesis import strategies as st

from vllm_davinci_testing.operators.comparison import compare
from vllm_davinci_testing.operators.strategies import FLOATS, values


def near(npu: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = 1e-6 if npu.dtype == torch.float32 else 1e-2
    torch.testing.assert_close(npu.cpu().float(), expected.float(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("norm", [0, 1])
@given(
    dtype=st.sampled_from(FLOATS),
    tokens=st.integers(0, 9),
    group_score=st.sampled_from([0, 1]),
    groups=st.sampled_from([(1, 1), (4, 2), (8, 8)]),
    biased=st.booleans(),
    renorm=st.sampled_from([0, 1]),
)
def test_gating_top_k(norm, dtype, tokens, group_score, groups, biased, renorm):
    count, chosen_groups = groups
    x, bias = values((tokens, 32), dtype, 1), values((32,), dtype, 2)
    weights, experts, scores = torch_npu.npu_moe_gating_top_k(
        x.npu(), 4, bias=bias.npu() if biased else None, k_group=chosen_groups, group_count=count,
        group_select_mode=group_score, renorm=renorm, norm_type=norm, out_flag=True,
        routed_scaling_factor=2.5,
    )  # fmt: skip
    expected = x.float().softmax(-1) if norm == 0 else x.float().sigmoid()
    choice = expected + bias.float() if biased else expected
    grouped = choice.view(tokens, count, 32 // count)
    best = grouped.amax(-1) if group_score == 0 else grouped.topk(2, -1)[0].sum(-1)
    kept = torch.zeros_like(best, dtype=torch.bool)
    kept.scatter_(1, best.sort(stable=True, descending=True)[1][:, :chosen_groups], True)
    choice = grouped.masked_fill(~kept[..., None], -torch.inf).flatten(1)
    chosen = choice.sort(stable=True, descending=True)[1][:, :4]
    picked = expected.gather(1, chosen)
    if norm == 1 or renorm == 1:
        picked = picked / picked.sum(-1, keepdim=True)
    compare(experts, chosen.int())
    near(weights, picked * 2.5)
    near(scores, expected)


@pytest.mark.parametrize("groups", [(1, 1), (4, 2)])
def test_gating_takes_nan_first_and_the_lower_number_of_equal_scores(groups):
    x = torch.zeros(3, 16)
    x[1, 5], x[1, 9] = torch.nan, 3.0
    x[2] = torch.tensor([-1.0, 2.0] * 8)
    weights, experts, _ = torch_npu.npu_moe_gating_top_k(
        x.npu(), 4, k_group=groups[1], group_count=groups[0], norm_type=1
    )
    compare(experts[0], torch.tensor([0, 1, 2, 3]).int())
    compare(experts[1], torch.tensor([5, 9, 0, 1] if groups[0] == 1 else [5, 9, 4, 6]).int())
    compare(experts[2], torch.tensor([1, 3, 5, 7]).int())
    near(weights[[0, 2]], torch.full((2, 4), 0.25))
    assert weights[1].isnan().all().item()


def test_gating_by_the_id_of_the_token() -> None:
    x, table = values((3, 8), torch.float32, 1), torch.tensor([[0, 1], [5, 2], [7, 3]])
    weights, experts, _ = torch_npu.npu_moe_gating_top_k(
        x.npu(), 2, input_ids=torch.tensor([2, 0, 2]).npu(), tid2eid=table.npu(), norm_type=1
    )
    chosen = table[[2, 0, 2]]
    picked = x.sigmoid().gather(1, chosen)
    compare(experts, chosen.int())
    near(weights, picked / picked.sum(-1, keepdim=True))


@given(dtype=st.sampled_from(FLOATS), finished=st.booleans(), renorm=st.sampled_from([0, 1]))
def test_gating_top_k_softmax(dtype: torch.dtype, finished: bool, renorm: int) -> None:
    x, done = values((6, 16), dtype, 1), torch.tensor([False, True] * 3)
    flag = done.npu() if finished else None
    softmax = x.float().softmax(-1)
    order = x.float().sort(stable=True, descending=True)[1][:, :3]
    marked = order.masked_fill(done[:, None], 16) if finished else order
    weights, experts, rows = torch_npu.npu_moe_gating_top_k_softmax(x.npu(), flag, 3)
    near(weights, softmax.gather(1, order))
    compare(experts, marked.int())
    compare(rows, torch.arange(18).view(3, 6).t().int())
    weights, experts, whole = torch_npu.npu_moe_gating_top_k_softmax_v2(
        x.npu(), k=3, finished=flag, renorm=renorm, output_softmax=True
    )
    chosen = x.float().gather(1, order).softmax(-1) if renorm else softmax.gather(1, order)
    near(weights, chosen)
    compare(experts, marked.int())
    if renorm == 0:
        near(whole, softmax)
