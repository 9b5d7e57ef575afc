"""The ranks' shares of an embedding sum to the embedding."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_davinci import operators

ops = torch.ops.vllm_davinci


@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@given(ranks=st.integers(1, 5), tokens=st.lists(st.integers(0, 19), min_size=1, max_size=30))
def test_shares_sum_to_the_embedding(dtype, kind, ranks, tokens):
    table = torch.arange(20 * 8).view(20, 8).to(dtype)
    ids = torch.tensor(tokens, dtype=kind)
    per_rank = -(-20 // ranks)
    total = torch.zeros(len(tokens), 8, dtype=dtype)
    for rank in range(ranks):
        share = table[rank * per_rank : (rank + 1) * per_rank]
        if not len(share):
            continue
        # A shard is padded as in vLLM; no token has a padding row.
        padded = torch.cat([share, torch.full((per_rank - len(share), 8), torch.nan)]).to(dtype)
        part = ops.vocab_parallel_embedding(
            ids.npu(), padded.npu(), rank * per_rank, len(share)
        ).cpu()
        assert torch.equal(
            part, operators.vocab_parallel_embedding(ids, padded, rank * per_rank, len(share))
        )
        total += part
    assert torch.equal(total, table[ids])


def test_a_share_without_rows_is_refused() -> None:
    ids = torch.zeros(3, dtype=torch.int64).npu()
    with pytest.raises(ValueError, match="a share of 0 rows"):
        ops.vocab_parallel_embedding(ids, torch.ones(8, 4).npu(), 0, 0)
    with pytest.raises(TypeError, match="int32 or int64"):
        ops.vocab_parallel_embedding(ids.float(), torch.ones(8, 4).npu(), 0, 4)
    with pytest.raises(ValueError, match=r"at least \[9, embedding_dim\]"):
        ops.vocab_parallel_embedding(ids, torch.ones(8, 4).npu(), 0, 9)
