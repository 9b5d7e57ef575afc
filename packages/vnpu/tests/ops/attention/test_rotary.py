"""Rotary position embedding equals its definition."""

import pytest
import torch
import torch_npu
from hypothesis import given
from hypothesis import strategies as st

from vllm_davinci_testing.operators.comparison import compare
from vllm_davinci_testing.operators.strategies import FLOATS, values


def rotated(x: torch.Tensor, mode: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the factor of cos and the factor of sin."""
    if mode == "half":
        a, b = x.chunk(2, -1)
        return x, torch.cat([-b, a], -1)
    even, odd = x[..., ::2], x[..., 1::2]
    if mode == "interleave":
        return x, torch.stack([-odd, even], -1).flatten(-2)
    a, b, c, d = x.chunk(4, -1)
    return x, torch.cat([-b, a, -d, c], -1)


def embed(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mode: str) -> torch.Tensor:
    first, second = rotated(x.float(), mode)
    return (first * cos.float() + second * sin.float()).to(x.dtype)


@pytest.mark.parametrize("mode", ["half", "interleave"])
@given(
    dtype=st.sampled_from(FLOATS),
    shape=st.sampled_from([(2, 7, 3, 64), (1, 1, 5, 128), (9, 2, 80), (0, 2, 64), (4, 300, 2, 40)]),
    strided=st.booleans(),
)
def test_rotary_mul(mode: str, dtype: torch.dtype, shape: tuple[int, ...], strided: bool) -> None:
    angles = (*shape[:-2], 1, shape[-1])
    cos, sin = values(angles, dtype, 2), values(angles, dtype, 3)
    base = values((*shape[:-1], shape[-1] + 8), dtype, 1)

    def view(t: torch.Tensor) -> torch.Tensor:
        return t[..., : shape[-1]] if strided else t[..., : shape[-1]].contiguous()

    out = torch_npu.npu_rotary_mul(view(base.npu()), cos.npu(), sin.npu(), mode)
    compare(out, embed(view(base), cos, sin, mode))


@pytest.mark.parametrize("mode", ["half", "quarter", "interleave"])
@given(dtype=st.sampled_from(FLOATS), layout=st.sampled_from(["BSND", "TND"]))
def test_query_and_key_are_rotated_in_place(mode: str, dtype: torch.dtype, layout: str) -> None:
    lead = (2, 3) if layout == "BSND" else (6,)
    query, key = values((*lead, 4, 64), dtype, 1), values((*lead, 2, 64), dtype, 2)
    cos, sin = values((*lead, 1, 64), dtype, 3), values((*lead, 1, 64), dtype, 4)
    q, k = query.npu(), key.npu()
    torch_npu.npu_apply_rotary_pos_emb(q, k, cos.npu(), sin.npu(), layout, mode)
    compare(q, embed(query, cos, sin, mode))
    compare(k, embed(key, cos, sin, mode))


@pytest.mark.parametrize("style", ["half", "interleave"])
@given(dtype=st.sampled_from(FLOATS), rotary=st.sampled_from([32, 64]), tokens=st.integers(0, 40))
def test_angles_from_a_table(style: str, dtype: torch.dtype, rotary: int, tokens: int) -> None:
    table = values((50, rotary), dtype, 1)
    positions = values((tokens,), torch.int64, 2, low=0, high=50)
    query, key = values((tokens, 4 * 64), dtype, 3), values((tokens, 2 * 64), dtype, 4)
    out = torch_npu.npu_mrope(
        positions.npu(), query.npu(), key.npu(), table.npu(), 64, rotary_mode=style
    )
    cos, sin = table[positions].chunk(2, -1)
    spread = (
        (lambda t: t.repeat(1, 2)) if style == "half" else (lambda t: t.repeat_interleave(2, 1))
    )
    for got, x in zip(out, (query, key), strict=True):
        heads = x.view(tokens, x.shape[1] // 64, 64)
        turned = embed(heads[..., :rotary], spread(cos)[:, None], spread(sin)[:, None], style)
        compare(got, torch.cat([turned, heads[..., rotary:]], -1).view_as(x))


@pytest.mark.parametrize("mode", ["default", "interleave"])
def test_multimodal_positions_choose_the_angles(mode: str) -> None:
    section = [16, 24, 24] if mode == "default" else [24, 20, 20]
    table, positions = (
        values((30, 128), torch.float32, 1),
        values((3, 6), torch.int64, 2, low=0, high=30),
    )
    query = values((6, 2 * 128), torch.float32, 3)
    out, _ = torch_npu.npu_mrope(
        positions.npu(), query.npu(), query.npu(), table.npu(), 128, mrope_section=section,
        rotary_mode="half", cache_mode=mode,
    )  # fmt: skip
    if mode == "default":
        source = torch.repeat_interleave(torch.arange(3), torch.tensor(section))
    else:
        source = torch.zeros(64, dtype=torch.long)
        source[1 : 3 * section[1] : 3], source[2 : 3 * section[2] : 3] = 1, 2
    cos, sin = (
        half[source, :, torch.arange(64)].t().repeat(1, 2)[:, None]
        for half in table[positions].chunk(2, -1)
    )
    compare(out, embed(query.view(6, 2, 128), cos, sin, "half").view(6, 256))
