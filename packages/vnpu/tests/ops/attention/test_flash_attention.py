"""Attention without a cache equals plain attention."""

import pytest
import torch
import torch_npu
from hypothesis import given
from hypothesis import strategies as st

from vllm_davinci.operators.attention import visible_keys
from vllm_davinci_testing.operators.attention_definition import CAUSAL_MASK, attention, close
from vllm_davinci_testing.operators.strategies import FLOATS, values


@pytest.mark.parametrize("layout", ["SBH", "BSH", "BSND", "BNSD"])
@given(dtype=st.sampled_from(FLOATS), causal=st.booleans(), queries=st.integers(1, 70))
def test_dense_layouts(layout: str, dtype: torch.dtype, causal: bool, queries: int) -> None:
    query = values((2, 4, queries, 48), dtype, 1)
    key = values((2, 2, 75, 48), dtype, 2)
    orders = {"SBH": (2, 0, 1, 3), "BSH": (0, 2, 1, 3), "BSND": (0, 2, 1, 3), "BNSD": (0, 1, 2, 3)}

    def laid_out(t: torch.Tensor) -> torch.Tensor:
        t = t.permute(orders[layout]).contiguous()
        return (t.flatten(2) if layout.endswith("H") else t).npu()

    out, highest, total, *_ = torch_npu.npu_fusion_attention(
        laid_out(query), laid_out(key), laid_out(key), 4, layout, scale=0.2,
        atten_mask=CAUSAL_MASK.bool().npu() if causal else None, sparse_mode=3 if causal else 0,
    )  # fmt: skip
    if layout.endswith("H"):
        out = out.view(*out.shape[:2], 4, 48)
    out = out.permute(*(orders[layout].index(i) for i in range(4)))
    visible = visible_keys(queries, 75, 3) if causal else None
    for b in range(2):
        expected, lse = attention(query[b], key[b], key[b], 0.2, visible)
        close(out[b], expected, dtype)
        for copy in range(8):
            close(highest[b, ..., copy] + total[b, ..., copy].log(), lse, torch.float32)


@given(dtype=st.sampled_from(FLOATS), lengths=st.lists(st.integers(1, 60), min_size=1, max_size=4))
def test_packed_sequences(dtype: torch.dtype, lengths: list[int]) -> None:
    query = values((sum(lengths), 4, 80), dtype, 1)
    ends = torch.tensor(lengths).cumsum(0).tolist()
    out = torch_npu.npu_fusion_attention(
        query.npu(), query.npu(), query.npu(), 4, "TND", scale=0.1,
        actual_seq_qlen=ends, actual_seq_kvlen=ends,
    )[0]  # fmt: skip
    for start, end in zip([0, *ends], ends, strict=False):
        rows = query[start:end].transpose(0, 1)
        expected = attention(rows, rows, rows, 0.1)[0]
        close(out[start:end].transpose(0, 1), expected, dtype)


def test_the_bias_is_scaled_with_the_scores() -> None:
    query = values((1, 2, 9, 32), torch.float32, 1)
    bias = values((1, 2, 9, 9), torch.float32, 3)
    out = torch_npu.npu_fusion_attention(
        query.npu(), query.npu(), query.npu(), 2, "BNSD", pse=bias.npu(), scale=0.2
    )[0]
    expected = attention(query[0], query[0], query[0], 0.2, None, bias[0] * 0.2)[0]
    close(out[0], expected, torch.float32)
