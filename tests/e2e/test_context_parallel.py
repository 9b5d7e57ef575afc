"""Context parallelism: tokens equal an engine's with an undivided cache."""

from typing import Any

import numpy as np
import pytest
from vllm import SamplingParams

from vllm_davinci_testing.engines.deepseek_zoo import HEADS6
from vllm_davinci_testing.engines.fixture_types import Reference, StartEngine, Zoo
from vllm_davinci_testing.engines.graph_settings import decode_graphs
from vllm_davinci_testing.engines.transformers_reference import assert_greedy

NUM_TOKENS = 12
# Prompts are chunked at 200 tokens, in the middle of blocks.
SIZES = {"max_model_len": 512, "max_num_batched_tokens": 200, "distributed_executor_backend": "mp"}
GRAPHS = decode_graphs(1, 4)
RACES = {"VNPU_RACES": "raise", "VNPU_SCHEDULE": "fuzz:3"}
DENSE, LATENT = "qwen3_norm_head64_gqa8_tied", "deepseek_v3_dense"
# Prompts shorter than the ranks, shorter than a block, of whole blocks, and chunked.
LENGTHS = (1, 5, 128, 257, 389)


def prompt_of(length: int) -> list[int]:
    return [3 + (i * 7 + length) % 97 for i in range(length)]


def divided(ranks: int, interleave: int, exchange: str) -> dict[str, Any]:
    return {
        **SIZES,
        "tensor_parallel_size": ranks,
        "decode_context_parallel_size": ranks,
        "cp_kv_cache_interleave_size": interleave,
        "dcp_comm_backend": exchange,
    }


def case(name: str, model: str, *division: Any, thorough: bool = True, **options: Any) -> Any:
    marks = [pytest.mark.thorough] if thorough else []
    return pytest.param(model, {**divided(*division), **options}, id=name, marks=marks)


CASES = [
    case("dense_runs_of_1", DENSE, 2, 1, "ag_rs"),
    case("latent_graphs_blocks", LATENT, 2, 128, "a2a", thorough=False, **GRAPHS),
    case("dense_graphs_runs_of_16", DENSE, 4, 16, "a2a", **GRAPHS),
    case("dense_blocks_synchronous", DENSE, 2, 128, "a2a", async_scheduling=False),
    case("latent_runs_of_1", LATENT, 4, 1, "a2a"),
    case("latent_graphs_runs_of_16", LATENT, 2, 16, "ag_rs", **GRAPHS),
    case("latent_graphs_padded_heads", HEADS6.name, 2, 16, "a2a", **GRAPHS),
    case("latent_padded_heads", HEADS6.name, 2, 1, "ag_rs"),
    case("experts", "deepseek_v3_moe", 2, 1, "ag_rs", enable_expert_parallel=True, **GRAPHS),
]


PREFILLS = [
    pytest.param(
        model,
        {**SIZES, "prefill_context_parallel_size": 2, **options},
        id=f"prefills_{name}",
        marks=[] if name == "graphs" else [pytest.mark.thorough],
    )
    for name, (model, options) in {
        "graphs": ("deepseek_v3_moe", GRAPHS),
        "dense": (LATENT, {"enforce_eager": True}),
        "tensor_parallel": ("deepseek_v3_moe", {"tensor_parallel_size": 2, "enforce_eager": True}),
        "four_ranks": ("deepseek_v3_moe", {"prefill_context_parallel_size": 4, **GRAPHS}),
    }.items()
]


@pytest.mark.parametrize(("model", "options"), [*CASES, *PREFILLS])
def test_tokens_equal_those_of_transformers(model, options, zoo, reference, start_engine):
    greedy = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    prompts = [prompt_of(length) for length in LENGTHS]
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    with start_engine(zoo(model), environment=RACES, **options) as engine:
        outputs = engine.generate(inputs, greedy)
        assert_greedy(reference(model), prompts, outputs, NUM_TOKENS)
        # A cached prefix consists of whole blocks, each with the tokens of all ranks.
        again = engine.generate(inputs, greedy)
        assert_greedy(reference(model), prompts, again, NUM_TOKENS)
        block = 128 * options.get("decode_context_parallel_size", 1)
        hits = [output.num_cached_tokens for output in again]
        assert hits == [(length - 1) // block * block for length in LENGTHS]


@pytest.mark.parametrize(
    ("model", "interleave"),
    [
        pytest.param(DENSE, 1, marks=pytest.mark.nightly("layouts")),
        pytest.param(DENSE, 128, marks=pytest.mark.thorough),
        pytest.param(LATENT, 16, marks=pytest.mark.thorough),
    ],
)
def test_a_rank_keeps_its_stripe_of_the_undivided_cache_and_few_blocks_are_enough(
    model: str, interleave: int, zoo: Zoo, reference: Reference, start_engine: StartEngine
):
    greedy = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    prompt = prompt_of(389)
    # In one chunk: merging chunks rounds.
    whole_prompt = {
        "max_num_batched_tokens": 512,
        "worker_extension_cls": "vllm_davinci_testing.engines.cache_worker.CacheWorker",
    }
    undivided = {**SIZES, "tensor_parallel_size": 2, **whole_prompt}
    with start_engine(zoo(model), **undivided) as engine:
        engine.generate([{"prompt_token_ids": prompt}], greedy)
        whole = engine.on_workers("cached_rows", 4)
    few_blocks = {"num_gpu_blocks_override": 5, "disable_log_stats": False}
    options = {**divided(2, interleave, "ag_rs"), **whole_prompt, **few_blocks}
    with start_engine(zoo(model), environment=RACES, **options) as engine:
        engine.generate([{"prompt_token_ids": prompt}], greedy)
        assert_stripes(whole, engine.on_workers("cached_rows", 2), interleave, len(prompt))
        # Each request outgrows its single block (128 tokens on each of two ranks), and one more
        # block is free.
        prompts = [prompt_of(length) for length in (247, 250, 252)]
        outputs = engine.generate([{"prompt_token_ids": each} for each in prompts], greedy)
        assert_greedy(reference(model), prompts, outputs, NUM_TOKENS)
        assert engine.metrics()["vllm:num_preemptions"] > 0


def assert_stripes(
    whole: list[Any], stripes: list[Any], interleave: int, prompt_length: int
) -> None:
    """Compares the ranks' caches, as returned by `cached_rows`, byte for byte.

    The first layer is compared for all cached tokens; later layers for the prompt only, because in
    decodes their input merges the ranks' results.
    """
    assert len(whole) == len(stripes) and len(whole[0]) == len(stripes[0]) > 1
    for rank, of_rank in enumerate(stripes):
        for layer, parts in enumerate(of_rank):
            length = prompt_length if layer else prompt_length + NUM_TOKENS - 1
            kept = [t for t in range(length) if t // interleave % len(stripes) == rank]
            for part, rows in enumerate(parts):
                expected = whole[rank][layer][part][kept]
                assert expected.any(axis=1).all()
                assert np.array_equal(rows[: len(kept)], expected), (rank, layer, part)


@pytest.mark.thorough
@pytest.mark.parametrize("exchange", ["ag_rs", "a2a"])
@pytest.mark.parametrize("model", [DENSE, LATENT])
def test_a_strict_chip_takes_every_call(model, exchange, zoo, start_engine):
    """In 16 bits rounding depends on the division: logprobs are close, and no call is refused."""
    wanted = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1, logprobs=1)
    inputs = [{"prompt_token_ids": prompt_of(length)} for length in LENGTHS]
    logprobs = []
    for options in (divided(2, 16, exchange), {**SIZES, "tensor_parallel_size": 2}):
        with start_engine(zoo(model), dtype="bfloat16", **GRAPHS, **options) as engine:
            outputs = engine.generate(inputs, wanted)
        logprobs.append(
            [
                entries[token].logprob
                for prompt, output in zip(inputs, outputs, strict=True)
                for token, entries in zip(
                    prompt["prompt_token_ids"][1:], output.prompt_logprobs[1:], strict=True
                )
            ]
        )
    assert logprobs[0] == pytest.approx(logprobs[1], abs=0.15)
