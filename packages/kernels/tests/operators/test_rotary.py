"""Rotary embedding equals torch_npu's launch bit for bit, and its definition."""

import pytest
import torch
import torch_npu
from hypothesis import given
from hypothesis import strategies as st

from vllm_davinci import operators

ops = torch.ops.vllm_davinci
MAX_POSITION = 64


@pytest.mark.parametrize("is_neox_style", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@given(
    num_tokens=st.integers(1, 9),
    heads=st.sampled_from([(1, 1), (4, 2), (8, 1)]),
    sizes=st.sampled_from([(64, 64), (64, 32), (128, 128)]),
    seed=st.integers(0, 99),
)
def test_query_and_key_rotate_by_their_position(
    dtype, is_neox_style, num_tokens, heads, sizes, seed
):
    head_size, rotary_dim = sizes
    generator = torch.Generator().manual_seed(seed)
    positions = torch.randint(MAX_POSITION, (num_tokens,), generator=generator)
    query, key = (
        torch.randn(num_tokens, n * head_size, generator=generator).to(dtype) for n in heads
    )
    angles = torch.rand(MAX_POSITION, rotary_dim // 2, generator=generator) * 6
    table = torch.cat([angles.cos(), angles.sin()], -1).to(dtype)
    inputs = [t.npu() for t in (positions, query, key, table)]
    turned = ops.rotary_embedding(*inputs, head_size, is_neox_style)
    launched = torch_npu.npu_mrope(
        *inputs,
        head_size,
        mrope_section=[0, 0, 0],  # the variable for the default was removed, so pass it
        rotary_mode="half" if is_neox_style else "interleave",
    )
    defined = operators.rotary_embedding(positions, query, key, table, head_size, is_neox_style)
    limit = 16 * torch.finfo(dtype).eps
    for ours, expected, definition in zip(turned, launched, defined, strict=True):
        assert torch.equal(ours, expected)
        torch.testing.assert_close(ours.cpu(), definition, rtol=limit, atol=limit)


def test_rows_without_a_whole_head_are_refused() -> None:
    positions, rows, table = torch.arange(2).npu(), torch.ones(2, 96).npu(), torch.ones(4, 64).npu()
    with pytest.raises(ValueError, match="do not hold heads of 64"):
        ops.rotary_embedding(positions, rows, rows, table, 64, True)
    with pytest.raises(ValueError, match=r"give \[num_tokens\]"):
        ops.rotary_embedding(positions[:1], rows, rows, table, 32, True)
