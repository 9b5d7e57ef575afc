"""MLA's stages equal their definitions; attention equals torch_npu's calls bit for bit.

Core's test_mla_fused and tests/e2e/test_kernels.py compare the stage's bits with torch_npu's calls.
"""

import pytest
import torch
import torch_npu

from vllm_davinci import operators
from vllm_davinci_testing.operators.mla_stage import (
    BLOCK,
    HEADS,
    KV_LORA,
    ROPE,
    Block,
    near,
)
from vllm_davinci_testing.processes.forked import output_of

ops = torch.ops.vllm_davinci
DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("q_lora_rank", [None, 48])
@pytest.mark.parametrize(("num_tokens", "num_decode_tokens"), [(1, 1), (5, 5), (7, 3), (6, 0)])
def test_preprocess_equals_its_definition(dtype, q_lora_rank, num_tokens, num_decode_tokens):
    block = Block(dtype, q_lora_rank, num_tokens)
    found = ops.mla_preprocess(*block.arguments(), num_decode_tokens)
    host = Block(dtype, q_lora_rank, num_tokens)
    on_host = [a.cpu() if isinstance(a, torch.Tensor) else a for a in host.arguments()]
    defined = operators.mla_preprocess(*on_host, num_decode_tokens)
    for ours, definition in zip(found, defined, strict=True):
        assert (ours is None) == (definition is None)
        if ours is not None:
            near(ours, definition)
    for cache, definition in zip(block.caches, (on_host[9], on_host[10]), strict=True):
        near(cache, definition)


@pytest.mark.parametrize("q_lora_rank", [None, 48])
@pytest.mark.parametrize(("num_tokens", "num_decode_tokens"), [(5, 5), (7, 3)])
def test_a_side_stream_changes_nothing(q_lora_rank, num_tokens, num_decode_tokens):
    block, other = (Block(torch.float32, q_lora_rank, num_tokens) for _ in range(2))
    alone = ops.mla_preprocess(*block.arguments(), num_decode_tokens)
    beside = ops.mla_preprocess(
        *other.arguments(), num_decode_tokens, side_stream=torch.npu.Stream()
    )
    for one, two in zip((*alone, *block.caches), (*beside, *other.caches), strict=True):
        assert (one is None) == (two is None)
        if one is not None:
            # Two products may be summed in another order than one.
            torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-5)


BESIDE = """
import torch
import vllm_davinci.kernels
from vllm_davinci_testing.operators.mla_stage import Block, IntegerBlock, assert_repeats

ops = torch.ops.vllm_davinci
assert_repeats(lambda: Block(torch.float32, 48, 7), ops.mla_preprocess, 6)
for is_dynamic in (True, False):
    make = lambda: IntegerBlock(torch.bfloat16, 48, 7, is_dynamic)
    assert_repeats(make, ops.mla_preprocess_w8a8, 5)
print("equal")
"""


@pytest.mark.parametrize("schedule", ["threads", "fuzz:1", "fuzz:2", "fuzz:3"])
def test_streams_of_the_stage_wait_for_each_other(schedule: str) -> None:
    """In any order that the stage's events allow, the result is the same, and no race is found."""
    assert output_of(BESIDE, VNPU_SCHEDULE=schedule, VNPU_RACES="raise")[-1] == "equal"


def test_a_captured_stage_runs_again_on_new_inputs() -> None:
    block, other = Block(torch.float32, 48, 5), Block(torch.float32, 48, 5)
    stream = torch.npu.Stream()
    stream.wait_stream(torch.npu.current_stream())
    graph = torch.npu.NPUGraph()
    with torch.npu.stream(stream):
        ops.mla_preprocess(*block.arguments(), 5)  # looks up the functions before the capture
        graph.capture_begin()
        captured = ops.mla_preprocess(*block.arguments(), 5)
        filler = [torch.full((64, 1024), 7.0, device="npu") for _ in range(4)]
        graph.capture_end()
    for factor in (1.0, -2.0):
        block.x.copy_(other.x * factor)
        with torch.npu.stream(stream):
            stream.wait_stream(torch.npu.default_stream())
            graph.replay()
        torch.npu.synchronize()
        expected = ops.mla_preprocess(other.x * factor, *other.arguments()[1:], 5)
        assert torch.equal(captured[0], expected[0]) and torch.equal(captured[1], expected[1])
    assert all(bool((memory == 7).all()) for memory in filler)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("query_lens", [[1, 1, 1], [2, 2, 2], [1, 3]])
def test_decode_attention_equals_its_composition(dtype: torch.dtype, query_lens: list[int]) -> None:
    num_tokens, num_reqs = sum(query_lens), len(query_lens)
    generator = torch.Generator().manual_seed(num_tokens)
    block = Block(dtype, None, num_tokens)
    caches = [
        torch.randn(8, BLOCK, 1, n, generator=generator).to(dtype).npu() for n in (KV_LORA, ROPE)
    ]
    ql_nope, q_pe = (
        torch.randn(num_tokens, HEADS, n, generator=generator).to(dtype).npu()
        for n in (KV_LORA, ROPE)
    )
    table = torch.randperm(8, generator=generator)[: num_reqs * 2].view(num_reqs, 2).int().npu()
    ends = torch.tensor(query_lens).cumsum(0).tolist()
    seq_lens = [130 + 17 * n for n in range(num_reqs)]
    causal = max(query_lens) > 1
    mask = torch.ones(2048, 2048, dtype=torch.bool).triu(1).npu() if causal else None
    found = ops.mla_decode_attention(
        ql_nope, q_pe, *caches, table, ends, seq_lens, mask, block.W_UV, 0.1
    )
    out, _ = torch_npu.npu_fused_infer_attention_score(
        ql_nope, caches[0].flatten(2), caches[0].flatten(2), query_rope=q_pe,
        key_rope=caches[1].flatten(2), atten_mask=mask, sparse_mode=3 if causal else 0,
        block_table=table, actual_seq_lengths=ends, actual_seq_lengths_kv=seq_lens,
        num_heads=HEADS, num_key_value_heads=1, scale=0.1, input_layout="TND_NTD",
        block_size=BLOCK,
    )  # fmt: skip
    expected = torch_npu.npu_transpose_batchmatmul(
        out, block.W_UV, perm_x1=(0, 1, 2), perm_x2=(0, 1, 2), perm_y=(1, 0, 2)
    ).flatten(1)
    assert torch.equal(found, expected)
    arguments = (ql_nope, q_pe, *caches, table)
    near(
        found,
        operators.mla_decode_attention(
            *(t.cpu() for t in arguments), ends, seq_lens, mask, block.W_UV.cpu(), 0.1
        ),
    )


def test_mismatched_weights_are_refused() -> None:
    block = Block(torch.float32, 48, 4)
    wrong = block.arguments()
    wrong[1] = block.a_weight[:, :-1]
    with pytest.raises(ValueError, match=r"a_weight of sizes \[96, 623\].*\[hidden, 624\]"):
        ops.mla_preprocess(*wrong, 4)
    with pytest.raises(ValueError, match="5 decode tokens among 4"):
        ops.mla_preprocess(*block.arguments(), 5)
