"""vLLM's DeepSeek attention on the device, step by step, equals attention in plain torch.

The reference computes each request from all its hidden states, without cache and absorption.
"""

import math
from types import SimpleNamespace

import pytest
import torch
import torch_npu
from vllm.config import VllmConfig
from vllm.forward_context import set_forward_context

from vllm_davinci.core.attention.mla.context import CONTEXT_CHUNK_ROWS
from vllm_davinci.core.attention.mla.metadata import NPUMLAMetadataBuilder
from vllm_davinci.core.attention.mla.projections import fusible_projections
from vllm_davinci.core.errors import ConfigurationError, UnsupportedFeatureError
from vllm_davinci.core.quantization.config import AscendQuantizationConfig
from vllm_davinci.core.quantization.formats.modelslim import QuantDescription
from vllm_davinci_testing.engines import deepseek_zoo
from vllm_davinci_testing.layers.launch_counter import LaunchCounter
from vllm_davinci_testing.layers.mla_layer import (
    BLOCK,
    CHUNKED,
    HEADS,
    HIDDEN,
    KV_LORA,
    MIXED,
    ROPE,
    STEPS,
    Block,
    Step,
    with_streams,
)
from vllm_davinci_testing.processes.forked import output_of

pytestmark = pytest.mark.usefixtures("registered")

YARN = {
    **deepseek_zoo.YARN,
    "mscale": 0.7,
    "mscale_all_dim": 1.3,
    "original_max_position_embeddings": 256,
}


@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("q_lora_rank", [48, None], ids=["q_lora", "no_q_lora"])
def test_every_step_equals_plain_attention(steps, q_lora_rank, vllm_config, device):
    Block(vllm_config, device, q_lora_rank=q_lora_rank).check(steps)


@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS)
def test_heads_padded_for_the_operator_equal_plain_attention(steps, vllm_config, device):
    Block(vllm_config, device, heads=6).check(steps)


@pytest.mark.parametrize("steps", [CHUNKED, MIXED], ids=["chunked", "mixed"])
@pytest.mark.parametrize("rows", [128, 200, 384])
def test_context_in_several_chunks_gives_the_same(steps, rows, vllm_config, device):
    block = Block(vllm_config, device)
    block.builder.context_chunk_rows = rows
    block.check(steps)


@pytest.mark.parametrize(
    "sizes",
    [{"qk_nope_head_dim": 32, "v_head_dim": 64}, {"qk_nope_head_dim": 128, "v_head_dim": 128}],
    ids=["unequal", "full_size"],
)
def test_head_sizes_of_keys_and_values_may_differ(sizes, vllm_config, device):
    Block(vllm_config, device, **sizes).check(MIXED)


@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("on_two_streams", [False, True], ids=["one_stream", "two_streams"])
def test_a_bias_of_the_norm_of_kv_c_reaches_the_values(steps, on_two_streams, vllm_config, device):
    description = QuantDescription.parse({"layers.0.attention.kv_a_layernorm.bias": "W8A8"})
    vllm_config.quant_config = AscendQuantizationConfig(description)
    make = with_streams if on_two_streams else Block
    make(vllm_config, device, kv_bias=1.0).check(steps)


def test_yarn_stretches_positions_and_sharpens_the_softmax(vllm_config, device):
    mscale = 0.1 * YARN["mscale_all_dim"] * math.log(YARN["factor"]) + 1.0
    Block(vllm_config, device, rope=dict(YARN)).check(MIXED, scale_correction=mscale**2)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float16, 4e-3), (torch.bfloat16, 3e-2)], ids=str
)
def test_16_bits_are_close_to_plain_attention(dtype, tolerance, vllm_config, device):
    Block(vllm_config, device, dtype).check(MIXED, tolerance=tolerance)


@pytest.mark.parametrize("threshold", [2, 16])
def test_decodes_of_several_queries_see_each_other_causally(threshold, vllm_config, device):
    block = Block(vllm_config, device)
    block.check([[("a", 40), ("b", 127), ("c", 20)]])
    block.builder.reorder_batch_threshold = threshold
    step = [("a", 1), ("b", threshold), ("c", 2), ("d", 17)]
    metadata = block.metadata(step)
    assert (metadata.num_decodes, metadata.num_prefills) == (3, 1)
    assert metadata.decode is not None
    assert metadata.decode.max_query_len == threshold
    outputs = block.forward(metadata).split([count for _, count in step])
    for (name, count), actual in zip(step, outputs, strict=True):
        expected = block.expected(name, 1.0)[-count:].float()
        torch.testing.assert_close(actual, expected, atol=2e-5, rtol=2e-5)


def test_more_drafts_than_the_operator_takes_are_refused(vllm_config, device):
    spec = Block(vllm_config, device).builder.kv_cache_spec
    vllm_config.speculative_config = SimpleNamespace(
        num_speculative_tokens=16, parallel_drafting=False
    )
    with pytest.raises(
        ConfigurationError, match=r"num_speculative_tokens must be at most 15: .* 17 are needed"
    ):
        NPUMLAMetadataBuilder(spec, [], vllm_config, device)


def test_padding_rows_become_zero_and_change_nothing_else(vllm_config, device):
    block = Block(vllm_config, device)
    block.run(MIXED[0])
    metadata = block.metadata(MIXED[1])
    plain = block.forward(metadata)
    padded = block.forward(metadata, num_padding_rows=5)
    assert torch.equal(padded[:-5], plain)
    assert torch.equal(padded[-5:], torch.zeros(5, HIDDEN))


def test_a_profile_run_and_an_idle_step_give_zeros(vllm_config: VllmConfig, device: torch.device):
    block = Block(vllm_config, device)
    block.common([("a", 9)])
    idle = block.forward(None)
    block.wrapper.mla_attn.kv_cache = None
    profile = block.forward(None)
    assert torch.equal(idle, torch.zeros(9, HIDDEN))
    assert torch.equal(profile, torch.zeros(9, HIDDEN))


@pytest.mark.parametrize("is_compressed", [False, True], ids=["hidden_states", "compressed"])
def test_a_profile_run_takes_as_much_memory_as_the_largest_prefill(
    is_compressed: bool, vllm_config: VllmConfig, device: torch.device
):
    """Every call of a block must have the same peak memory, because vLLM gives the rest to the
    cache.
    """
    block = Block(vllm_config, device, q_lora_rank=48)
    block.common([("a", 9)])
    block.wrapper.mla_attn.kv_cache = None
    hidden = torch.cat(block.new).to(device)

    def run() -> None:
        if is_compressed:
            block.wrapper.forward_compressed(block.positions, block.wrapper.compress(hidden))
        else:
            block.module(block.positions, hidden, None)

    with torch.inference_mode(), set_forward_context(None, block.vllm_config):
        run()
        torch.npu.reset_peak_memory_stats()
        before = torch.npu.memory_allocated()
        run()
    expanded = CONTEXT_CHUNK_ROWS * 2 * (32 + ROPE + 32) * HEADS * hidden.element_size()
    assert torch.npu.max_memory_allocated() - before >= expanded


@pytest.mark.parametrize("poisoned", range(4))
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nan_and_inf_stay_in_their_request(poisoned, value, vllm_config, device):
    block = Block(vllm_config, device)
    block.run(MIXED[0])
    step = MIXED[1]
    metadata = block.metadata(step)
    counts = [count for _, count in step]
    plain = block.forward(metadata).split(counts)
    rows = list(torch.cat(block.new).split(counts))
    rows[poisoned] = torch.full_like(rows[poisoned], value)
    outputs = block.forward(metadata, torch.cat(rows)).split(counts)
    for request, (before, after) in enumerate(zip(plain, outputs, strict=True)):
        assert request == poisoned or torch.equal(before, after)
    assert not outputs[poisoned].isfinite().any()


# One block's launches: projections, norm, rotary, cache write, attention, output projection.
DECODE_LAUNCHES = {48: 9, None: 8}
# Queries, keys and values are expanded and copied; there are no absorbed products.
PREFILL_LAUNCHES = {48: 12, None: 11}
CONTEXT_CHUNK_LAUNCHES = 9


@pytest.mark.parametrize("q_lora_rank", [48, None], ids=["q_lora", "no_q_lora"])
def test_launches_per_block_stay_in_the_budget(q_lora_rank, vllm_config, device):
    block = Block(vllm_config, device, q_lora_rank=q_lora_rank)

    def launches(step: Step) -> int:
        metadata = block.metadata(step)
        # The first block of a step looks up cosines and sines for all blocks.
        block.forward(metadata)
        hidden = torch.cat(block.new).to(device)
        by_layer = {block.wrapper.mla_attn.layer_name: metadata}
        with (
            torch.inference_mode(),
            set_forward_context(by_layer, vllm_config),
            LaunchCounter() as counter,
        ):
            block.module(block.positions, hidden, None)
        crossings = {"aten::_to_copy", "aten::item", "aten::_local_scalar_dense", "aten::nonzero"}
        assert not crossings & set(counter.names), "a copy between host and device"
        return len(counter.names)

    assert launches([("a", 40), ("b", 300)]) == PREFILL_LAUNCHES[q_lora_rank]
    assert launches([("a", 1), ("b", 1)]) == DECODE_LAUNCHES[q_lora_rank]
    assert (
        launches([("a", 20), ("b", 20)]) == PREFILL_LAUNCHES[q_lora_rank] + CONTEXT_CHUNK_LAUNCHES
    )


@pytest.mark.parametrize("q_lora_rank", [48, None], ids=["q_lora", "no_q_lora"])
def test_a_fused_preprocess_finds_the_projections(q_lora_rank, vllm_config, device):
    """For compressed queries, vLLM's model uses its own layer class for the down-projection."""
    block = Block(vllm_config, device, q_lora_rank=q_lora_rank)
    weights = fusible_projections(block.wrapper.mla_attn.preprocess.modules)
    assert weights is not None
    rank = q_lora_rank or 0
    assert weights.down.shape == (HIDDEN, rank + KV_LORA + ROPE)
    assert weights.up.shape == (q_lora_rank or HIDDEN, HEADS * (32 + ROPE))
    assert (weights.norm is None) == (q_lora_rank is None)
    layer = block.wrapper.fused_qkv_a_proj or block.wrapper.kv_a_proj_with_mqa
    assert weights.down.data_ptr() == layer.weight.data_ptr()  # not copied
    assert type(weights.down) is torch.Tensor


def test_two_parts_of_a_step_equal_the_whole(vllm_config: VllmConfig, device: torch.device):
    """Each ubatch has its own metadata, and the layer stores nothing about a step."""
    whole = Block(vllm_config, device)
    whole.run(MIXED[0])
    step = MIXED[1]
    common = whole.common(step)
    expected = whole.forward(whole.builder.build(0, common)).split([n for _, n in step])
    hidden, positions = torch.cat(whole.new), whole.positions
    parts = []
    for requests, rows in ((slice(0, 3), slice(0, 22)), (slice(3, 4), slice(22, 172))):
        starts = common.query_start_loc_cpu[requests.start : requests.stop + 1]
        part = common.replace(
            query_start_loc_cpu=starts - starts[0],
            seq_lens_cpu_upper_bound=common.seq_lens_cpu_upper_bound[requests],
            num_reqs=requests.stop - requests.start,
            num_actual_tokens=rows.stop - rows.start,
            max_query_len=max(n for _, n in step[requests]),
            block_table_tensor=common.block_table_tensor[requests],
            slot_mapping=common.slot_mapping[rows],
        )
        parts.append((whole.builder.build(0, part), rows))
    outputs = []
    for metadata, rows in parts:
        whole.positions = positions[rows]
        outputs.append(whole.forward(metadata, hidden[rows]))
    cut = torch.cat(outputs).split([n for _, n in step])
    for before, after in zip(expected, cut, strict=True):
        torch.testing.assert_close(before, after, atol=1e-6, rtol=1e-6)


def test_more_heads_than_the_operator_takes_are_refused_with_the_option(
    vllm_config: VllmConfig, device: torch.device
):
    with pytest.raises(
        UnsupportedFeatureError, match=r"129 heads .* padded to 128.*--tensor-parallel-size"
    ):
        Block(vllm_config, device, heads=129)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("heads", "taken"), [(3, 4), (6, 8), (12, 16), (96, 128)])
def test_padded_heads_keep_the_bits_of_each_head_alone(dtype, heads, taken, vllm_config, device):
    block = Block(vllm_config, device, dtype, heads=heads)
    block.run([("a", 40), ("b", 127), ("c", 300)])
    metadata = block.metadata([("a", 1), ("b", 1), ("c", 1)]).decode
    assert metadata is not None
    impl, cache, generator = block.wrapper.mla_attn.impl, block.cache, block.generator
    assert impl.decode_heads == taken
    ql_nope, q_pe = (
        torch.randn(3, heads, size, generator=generator).to(device, dtype)
        for size in (KV_LORA, ROPE)
    )
    found = impl.decode(ql_nope, q_pe, cache, metadata).unflatten(1, (heads, -1))
    for head in range(heads):
        own = slice(head, head + 1)
        # The operator's order of sums depends on the number of heads, so this one is all of them.
        query, query_rope = (each[:, own].repeat(1, taken, 1) for each in (ql_nope, q_pe))
        out, _ = torch_npu.npu_fused_infer_attention_score(
            query, cache.kv_c_flat, cache.kv_c_flat, query_rope=query_rope,
            key_rope=cache.k_pe_flat, block_table=metadata.block_table,
            actual_seq_lengths=metadata.actual_seq_lengths_q,
            actual_seq_lengths_kv=metadata.seq_lens, num_heads=taken, num_key_value_heads=1,
            scale=impl.scale, input_layout="TND_NTD", block_size=BLOCK,
        )  # fmt: skip
        alone = torch_npu.npu_transpose_batchmatmul(
            out[own], impl.W_UV[own], perm_x1=(0, 1, 2), perm_x2=(0, 1, 2), perm_y=(1, 0, 2)
        )
        assert torch.equal(found[:, own], alone)


OF_A_CHIP = """
import torch
from vllm_davinci.core.attention.head_sizes import mla_decode_heads, sparse_mla_heads

for heads in (4, 6, 96):
    sizes = heads, 512, 64, torch.bfloat16
    print(mla_decode_heads(*sizes), sparse_mla_heads(*sizes))
"""


@pytest.mark.refused_calls
@pytest.mark.parametrize(
    ("release", "taken"),
    [("8.3", ["32 4", "32 8", "128 128"]), ("8.5", ["4 4", "8 8", "128 128"])],
)
def test_heads_are_padded_to_the_next_number_that_a_release_takes(release: str, taken: list[str]):
    assert output_of(OF_A_CHIP, VNPU_SOC="Ascend910B3", VNPU_CANN=release) == taken
