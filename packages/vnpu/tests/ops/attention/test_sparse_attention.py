"""Sparse attention: token selection, and attention to the selected tokens."""

import pytest
import torch
import torch_npu

BLOCK = 16
SIZE, LATENT, ROPE = 128, 512, 64
NUM_BLOCKS = 40


def paged(lengths: list[int], generator: torch.Generator) -> torch.Tensor:
    """Makes a block table with distinct blocks in random order."""
    widest = max(-(-length // BLOCK) for length in lengths)
    numbers = torch.randperm(NUM_BLOCKS, generator=generator)[: len(lengths) * widest]
    return numbers.view(len(lengths), widest).int()


def rows_of(cache: torch.Tensor, table: torch.Tensor, length: int) -> torch.Tensor:
    return cache[table.long()].flatten(0, 1)[:length].squeeze(1)


def chosen_tokens(
    query: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor, seen: int, count: int
) -> list[int]:
    """Returns tokens by descending score. query: [heads, size]; keys: [length, size]; weights:
    [heads]
    """
    scores = (torch.relu(query.double() @ keys.double().T) * weights.double()[:, None]).sum(0)
    return scores[:seen].argsort(descending=True, stable=True)[:count].tolist()


def on_npu(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [tensor.npu() for tensor in tensors]


def ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32).npu()


@pytest.mark.parametrize(
    ("queries", "lengths", "count"),
    [
        ([1, 1, 1], [1, 33, 200], 24),
        ([5, 40, 1], [5, 60, 64], 24),
        ([7], [90], 2048),
        ([0, 3], [17, 20], 8),
    ],
)
@pytest.mark.parametrize("heads", [1, 8])
def test_tokens_of_the_largest_scores_are_chosen(queries, lengths, count, heads):
    generator = torch.Generator().manual_seed(3)
    query = torch.randn(sum(queries), heads, SIZE, generator=generator)
    weights = torch.randn(sum(queries), heads, generator=generator)
    cache = torch.randn(NUM_BLOCKS, BLOCK, 1, SIZE, generator=generator)
    table = paged(lengths, generator)
    ends = torch.tensor(queries).cumsum(0).tolist()
    found, _ = torch_npu.npu_lightning_indexer(
        *on_npu(query, cache, weights),
        actual_seq_lengths_query=ints(ends),
        actual_seq_lengths_key=ints(lengths),
        block_table=table.npu(),
        layout_query="TND",
        layout_key="PA_BSND",
        sparse_count=count,
    )
    assert found.shape == (sum(queries), 1, count) and found.dtype == torch.int32
    row = 0
    for request, (own, length) in enumerate(zip(queries, lengths, strict=True)):
        keys = rows_of(cache, table[request], length)
        for i in range(own):
            seen = length - own + i + 1
            wanted = chosen_tokens(query[row], keys, weights[row], seen, count)
            assert found[row, 0].tolist() == wanted + [-1] * (count - len(wanted))
            row += 1


def test_a_token_is_chosen_alike_alone_and_beside_others():
    generator = torch.Generator().manual_seed(4)
    query = torch.randn(9, 4, SIZE, generator=generator)
    weights = torch.randn(9, 4, generator=generator)
    key = torch.randn(120, 1, SIZE, generator=generator)

    def choose(rows: slice, length: int) -> torch.Tensor:
        return torch_npu.npu_lightning_indexer(
            *on_npu(query[rows], key, weights[rows]),
            actual_seq_lengths_query=ints([len(query[rows])]),
            actual_seq_lengths_key=ints([length]),
            layout_query="TND",
            layout_key="TND",
            sparse_count=40,
        )[0]

    together = choose(slice(None), 120)
    for row in range(9):
        assert torch.equal(choose(slice(row, row + 1), 112 + row), together[row : row + 1])


def attend(
    query: torch.Tensor, rope: torch.Tensor, latent: torch.Tensor, key_rope: torch.Tensor, scale
) -> torch.Tensor:
    """Attends in fp64. query: [heads, latent size]; latent: [length, latent size]"""
    scores = query.double() @ latent.double().T + rope.double() @ key_rope.double().T
    return (scores * scale).softmax(-1) @ latent.double()


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)]
)
@pytest.mark.parametrize("block", [1, 4])
def test_queries_attend_to_chosen_tokens_alone(dtype: torch.dtype, tolerance: float, block: int):
    generator = torch.Generator().manual_seed(5)
    queries, lengths, heads, count = [1, 6], [70, 45], 4, 20
    query = torch.randn(7, heads, LATENT, generator=generator).to(dtype)
    rope = torch.randn(7, heads, ROPE, generator=generator).to(dtype)
    latent = torch.randn(NUM_BLOCKS, BLOCK, 1, LATENT, generator=generator).to(dtype)
    key_rope = torch.randn(NUM_BLOCKS, BLOCK, 1, ROPE, generator=generator).to(dtype)
    table = paged(lengths, generator)
    indices = torch.full((7, 1, count), -1, dtype=torch.int32)
    tokens: list[list[int]] = []
    row = 0
    for own, length in zip(queries, lengths, strict=True):
        for i in range(own):
            seen = length - own + i + 1
            blocks = torch.randperm(-(-seen // block), generator=generator)[:count]
            if row == 3:
                blocks = blocks[:2]
            indices[row, 0, : len(blocks)] = blocks
            tokens.append(
                [
                    j
                    for b in blocks.tolist()
                    for j in range(b * block, b * block + block)
                    if j < seen
                ]
            )
            row += 1
    out, _, _ = torch_npu.npu_sparse_flash_attention(
        *on_npu(query, latent, latent, indices),
        0.05,
        block_table=table.npu(),
        actual_seq_lengths_query=ints([1, 7]),
        actual_seq_lengths_kv=ints(lengths),
        query_rope=rope.npu(),
        key_rope=key_rope.npu(),
        sparse_block_size=block,
        layout_query="TND",
        layout_kv="PA_BSND",
        attention_mode=2,
    )
    for row, chosen in enumerate(tokens):
        request = int(row > 0)
        own_latent = rows_of(latent, table[request], lengths[request])[chosen]
        own_rope = rows_of(key_rope, table[request], lengths[request])[chosen]
        wanted = attend(query[row], rope[row], own_latent, own_rope, 0.05)
        torch.testing.assert_close(out[row].cpu().double(), wanted, atol=tolerance, rtol=tolerance)


def test_all_tokens_give_the_bits_of_dense_attention():
    generator = torch.Generator().manual_seed(6)
    lengths, heads = [130, 7, 64], 8
    query = torch.randn(3, heads, LATENT, generator=generator)
    rope = torch.randn(3, heads, ROPE, generator=generator)
    latent = torch.randn(NUM_BLOCKS, BLOCK, 1, LATENT, generator=generator)
    key_rope = torch.randn(NUM_BLOCKS, BLOCK, 1, ROPE, generator=generator)
    table = paged(lengths, generator).npu()
    indices = torch.full((3, 1, 256), -1, dtype=torch.int32)
    for row, length in enumerate(lengths):
        indices[row, 0, :length] = torch.randperm(length, generator=generator)
    sparse, _, _ = torch_npu.npu_sparse_flash_attention(
        *on_npu(query, latent, latent, indices),
        0.05,
        block_table=table,
        actual_seq_lengths_query=ints([1, 2, 3]),
        actual_seq_lengths_kv=ints(lengths),
        query_rope=rope.npu(),
        key_rope=key_rope.npu(),
        layout_query="TND",
        layout_kv="PA_BSND",
        attention_mode=2,
    )
    dense, _ = torch_npu.npu_fused_infer_attention_score(
        *on_npu(query, latent.flatten(2), latent.flatten(2)),
        query_rope=rope.npu(),
        key_rope=key_rope.flatten(2).npu(),
        actual_seq_lengths=[1, 2, 3],
        actual_seq_lengths_kv=lengths,
        block_table=table,
        num_heads=heads,
        num_key_value_heads=1,
        scale=0.05,
        input_layout="TND",
        block_size=BLOCK,
    )
    assert torch.equal(sparse, dense)


def test_statistics_equal_those_of_the_chosen_tokens():
    generator = torch.Generator().manual_seed(7)
    query = torch.randn(2, 4, LATENT, generator=generator)
    rope = torch.randn(2, 4, ROPE, generator=generator)
    latent = torch.randn(30, 1, LATENT, generator=generator)
    key_rope = torch.randn(30, 1, ROPE, generator=generator)
    indices = torch.tensor([[[3, 9, 28, -1]], [[0, 29, -1, -1]]], dtype=torch.int32)
    _, maximum, total = torch_npu.npu_sparse_flash_attention(
        *on_npu(query, latent, latent, indices),
        0.05,
        actual_seq_lengths_query=ints([2]),
        actual_seq_lengths_kv=ints([30]),
        query_rope=rope.npu(),
        key_rope=key_rope.npu(),
        layout_query="TND",
        layout_kv="TND",
        attention_mode=2,
        return_softmax_lse=True,
    )
    for row, chosen in enumerate([[3, 9, 28], [0, 29]]):
        scores = 0.05 * (
            query[row].double() @ latent[chosen, 0].double().T
            + rope[row].double() @ key_rope[chosen, 0].double().T
        )
        wanted = scores.max(-1).values
        torch.testing.assert_close(maximum[0, row].cpu().double(), wanted, atol=1e-5, rtol=1e-5)
        sums = (scores - wanted[:, None]).exp().sum(-1)
        torch.testing.assert_close(total[0, row].cpu().double(), sums, atol=1e-5, rtol=1e-5)


def test_a_block_that_the_cache_does_not_have_is_named():
    query = torch.randn(1, 1, SIZE)
    cache = torch.randn(2, BLOCK, 1, SIZE)
    with pytest.raises(RuntimeError, match="names block 9 of a cache of 2"):
        torch_npu.npu_lightning_indexer(
            *on_npu(query, cache, torch.ones(1, 1)),
            actual_seq_lengths_query=ints([1]),
            actual_seq_lengths_key=ints([20]),
            block_table=ints([0, 9]).view(1, 2),
            layout_query="TND",
            layout_key="PA_BSND",
            sparse_count=8,
        )
        torch.npu.synchronize()
