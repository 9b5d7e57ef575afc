"""KV cache blocks offloaded to host memory: tokens and logprobs equal those without offload."""

import re
from collections.abc import Mapping
from typing import Any

import pytest
from vllm import SamplingParams

from vllm_davinci_testing.engines.engine_process import EngineError, EngineProcess
from vllm_davinci_testing.engines.generating import as_inputs, tokens_and_logprobs
from vllm_davinci_testing.engines.refusals import refusal_of

NIGHTLY = pytest.mark.nightly("weights")
BLOCK_TOKENS = 128
SAMPLING = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=3)
OPTIONS: dict[str, Any] = {
    "max_model_len": 768,
    "max_num_seqs": 2,
    "kv_cache_memory_bytes": None,
    "gpu_memory_utilization": 0.02,
    "disable_log_stats": False,
}
# Two requests run at a time in 12 blocks, with five per prompt: the next prompt evicts the last.
FEW_BLOCKS: dict[str, Any] = {"num_gpu_blocks_override": 12}
# Enough blocks that nothing is evicted or loaded from the host.
MANY_BLOCKS: dict[str, Any] = {"num_gpu_blocks_override": 64}
RACES = {"environment": {"VNPU_RACES": "raise", "VNPU_SCHEDULE": "fuzz:3"}}


def prompts() -> list[list[int]]:
    """Six prompts of five blocks; pairs of prompts share their first two blocks."""
    prefixes = [[3 + (i * 7 + n) % 97 for i in range(2 * BLOCK_TOKENS)] for n in range(3)]
    return [
        [*prefixes[n % 3], *(3 + (i * 11 + n) % 89 for i in range(3 * BLOCK_TOKENS + 9))]
        for n in range(6)
    ]


def answers(engine: EngineProcess, asked: list[list[int]]) -> list[tuple[list[int], Any]]:
    """Returns each request's tokens, and the three likeliest logprobs at each position."""
    return tokens_and_logprobs(engine.generate(as_inputs(asked), SAMPLING))


def loaded_tokens(before: Mapping[str, float], after: Mapping[str, float]) -> float:
    """Returns the number of prompt tokens loaded from host memory."""
    name = "vllm:external_prefix_cache_hits"
    return after[name] - before[name]


def assert_near(answers: list[Any], expected: list[Any]) -> None:
    """Asserts equal tokens, and logprobs that differ only by rounding.

    MLA sums a prompt's cached and new parts separately. Evictions move the boundary between them,
    which on some processors changes the last bits.
    """
    assert [tokens for tokens, _ in answers] == [tokens for tokens, _ in expected]
    for (tokens, found), (_, wanted) in zip(answers, expected, strict=True):
        for token, got, want in zip(tokens, found, wanted, strict=True):
            assert abs(got[token] - want[token]) < 1e-4


@pytest.mark.parametrize(
    ("checkpoint", "options"),
    [
        pytest.param(
            "tiny_llama", {"async_scheduling": False}, id="dense_sync", marks=pytest.mark.thorough
        ),
        pytest.param("tiny_llama", {"enforce_eager": False, **RACES}, id="dense_graphs_races"),
        pytest.param("tiny_deepseek", RACES, id="mla_races", marks=NIGHTLY),
        pytest.param(
            "tiny_llama", {"tensor_parallel_size": 2, **RACES}, id="dense_tp2", marks=NIGHTLY
        ),
    ],
)
def test_evicted_blocks_come_back_bit_by_bit(checkpoint, options, repository, start_engine):
    model, asked = repository / "checkpoints" / checkpoint, prompts()
    options = {**OPTIONS, **options}
    with start_engine(model, **MANY_BLOCKS, **options) as engine:
        alone = answers(engine, asked)
        again = answers(engine, asked)
    with start_engine(model, kv_offloading_size=0.25, **FEW_BLOCKS, **options) as engine:
        first = answers(engine, asked)
        before = engine.metrics()
        second = answers(engine, asked)
        loaded = loaded_tokens(before, engine.metrics())
    for got, expected in ((first, alone), (second, again)):
        if checkpoint == "tiny_llama":
            assert got == expected
        else:
            assert_near(got, expected)
    # At least the first prompts were loaded, because the device kept none of their blocks.
    assert loaded >= 2 * 4 * BLOCK_TOKENS


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"kv_offloading_size": 1.0, "kv_offloading_backend": "lmcache"},
            "lmcache is not supported.*Use native",
        ),
        (
            {"kv_transfer_config": {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}},
            "kv_connector 'LMCacheConnectorV1'.*Use OffloadingConnector",
        ),
        (
            {"kv_transfer_config": {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}},
            "needs cpu_bytes_to_use",
        ),
        (
            {"kv_offloading_size": 1.0, "enable_sleep_mode": True},
            "--kv-offloading-size is not supported with --enable-sleep-mode",
        ),
    ],
)
def test_what_cannot_be_kept_on_the_host_ends_the_start(options, message, tiny_llama):
    assert re.search(message, refusal_of(tiny_llama, **OPTIONS, **FEW_BLOCKS, **options))


@pytest.mark.nightly("refusals")
def test_too_little_memory_of_the_host_ends_the_start(tiny_llama, start_engine):
    with pytest.raises(
        EngineError, match=r"is too small for one block of the KV cache.*Give at least"
    ):
        start_engine(tiny_llama, kv_offloading_size=1e-6, **OPTIONS, **FEW_BLOCKS)
