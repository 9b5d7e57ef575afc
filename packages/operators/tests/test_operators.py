"""Definitions equal torch's own functions, if torch has them."""

import pytest
import torch
from torch.nn import functional

from vllm_davinci import operators
from vllm_davinci.operators.attention import attend, visible_keys
from vllm_davinci.operators.norm import swiglu
from vllm_davinci.operators.quantization import dynamic_quant, pack_int4
from vllm_davinci.operators.rotary import rotated_pairs


def normal(*sizes: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed))


def test_norms_equal_those_of_torch() -> None:
    x, residual, weight = normal(5, 64), normal(5, 64, seed=2), normal(64, seed=3)
    normed, total = operators.add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(total, x + residual)
    torch.testing.assert_close(normed, functional.rms_norm(total, (64,), weight, 1e-6))


def test_swiglu_is_silu_of_the_first_half_times_the_second() -> None:
    gate, up = normal(5, 32), normal(5, 32, seed=2)
    torch.testing.assert_close(swiglu(torch.cat([gate, up], 1)), functional.silu(gate) * up)


@pytest.mark.parametrize(("queries", "keys"), [(7, 7), (3, 9)])
def test_causal_attention_equals_torchs(queries: int, keys: int) -> None:
    query, key, value = (
        normal(*sizes, seed=seed)
        for seed, sizes in enumerate([(queries, 4, 16), (keys, 2, 16), (keys, 2, 8)])
    )
    visible = visible_keys(queries, keys, 3)
    heads_first = [each.transpose(0, 1) for each in (query, key, value)]
    expected = functional.scaled_dot_product_attention(
        *heads_first, attn_mask=visible, enable_gqa=True, scale=0.3
    )
    out, lse = attend(query, key, value, 0.3, visible)
    torch.testing.assert_close(out, expected.transpose(0, 1))
    assert lse.shape == (queries, 4, 1)


@pytest.mark.parametrize("mode", range(5))
def test_a_sparse_mode_shows_each_query_its_keys(mode: int) -> None:
    before, after, queries, keys = 2, 1, 3, 5
    for i, row in enumerate(visible_keys(queries, keys, mode, before, after).tolist()):
        own = i + keys - queries
        band = {0: (i - before, i + after), 4: (own - before, own + after)}
        first, last = {1: (0, keys), 2: (0, i), 3: (0, own), **band}[mode]
        assert row == [first <= j <= last for j in range(keys)]


def test_rotations_turn_pairs_by_their_angle() -> None:
    angles = torch.rand(6, 1, 8) * 6
    cos, sin = (each.repeat(1, 1, 2) for each in (angles.cos(), angles.sin()))
    x = normal(6, 3, 16)
    numbers = torch.view_as_complex(x.unflatten(-1, (8, 2))) * torch.polar(
        torch.ones_like(angles), angles
    )
    first, second = rotated_pairs(x, cos, sin).chunk(2, -1)
    torch.testing.assert_close(torch.complex(first, second), numbers)


def test_integers_represent_their_rows() -> None:
    x = normal(5, 32)
    integers, scales = dynamic_quant(x)
    assert integers.dtype == torch.int8
    assert ((integers * scales[:, None] - x).abs() <= 0.5001 * scales[:, None]).all()


def test_eight_4_bit_integers_are_one_of_32_bits() -> None:
    x = torch.arange(-8, 8, dtype=torch.int8).view(1, 16)
    packed = pack_int4(x)
    unpacked = (packed[..., None] >> torch.arange(0, 32, 4).int()).flatten(-2) << 28 >> 28
    assert torch.equal(unpacked.to(torch.int8), x)


def test_sums_of_all_ranks_experts_equal_one_rank() -> None:
    x, gate_up, down = normal(6, 8), normal(4, 8, 12, seed=2), normal(4, 6, 8, seed=3)
    ids = torch.rand(6, 4).topk(2, -1)[1].int()
    weights = torch.rand(6, 2)
    whole = operators.experts(x, weights, ids, gate_up, down, 0, 4)
    parts = [
        operators.experts(x, weights, ids, gate_up[first:][:2], down[first:][:2], first, 4)
        for first in (0, 2)
    ]
    torch.testing.assert_close(sum(parts), whole)
