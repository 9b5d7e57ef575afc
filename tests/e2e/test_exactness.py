"""All model shapes and engine paths give transformers' 64 tokens for each of 64 prompts.

`nox -s tests -- -m thorough` runs all; test_generate and test_parallel run a part daily.
"""

from itertools import product
from typing import Any

import pytest
from vllm import SamplingParams

from vllm_davinci_testing.engines.fixture_types import Prompts, Reference, StartEngine, Zoo
from vllm_davinci_testing.engines.generating import as_inputs, tokens_of
from vllm_davinci_testing.engines.model_zoo import ZOO, ZooModel, write_checkpoint
from vllm_davinci_testing.engines.transformers_reference import TransformersReference, assert_greedy

pytestmark = pytest.mark.thorough

MAX_TOKENS = 64
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)

# Query heads per key-value head: numbers of query and of key-value heads.
HEADS = {1: (2, 2), 2: (4, 2), 4: (4, 1), 8: (8, 1)}


def shape(model_type: str, head_size: int, ratio: int, tied: bool) -> ZooModel:
    num_heads, num_kv_heads = HEADS[ratio]
    return ZooModel(
        f"{model_type}_head{head_size}_gqa{ratio}" + "_tied" * tied,
        model_type,
        num_heads,
        num_kv_heads,
        head_size,
        # Qwen2's head size follows from its hidden size.
        hidden_size=num_heads * head_size if model_type == "qwen2" else 192,
        tied=tied,
        options={"sliding_window": 40} if model_type == "mistral" else {},
    )


# Each family with each head size and ratio; half of them tie embeddings.
SHAPES = [
    shape(*properties, tied=(number + number // len(HEADS)) % 2 == 1)
    for number, properties in enumerate(
        product(("llama", "qwen2", "qwen3", "mistral"), (64, 80, 128), HEADS)
    )
]

FAMILIES = (
    "llama_head64_gqa4",
    "qwen2_bias_head128_gqa2",
    "qwen3_norm_head128_gqa2",
    "mistral_window48_head64_gqa4_tied",
)

# The models of the zoo, and all shapes.
MODELS = [*ZOO, *SHAPES]

# Engine options and environment variables by path.
PATHS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "whole_prefill": ({"enable_chunked_prefill": False, "max_num_batched_tokens": 8192}, {}),
    "chunked_prefill": ({"max_num_batched_tokens": 48, "max_num_seqs": 16}, {}),
    "sync_scheduling": ({"async_scheduling": False}, {}),
    "schedule_threads": ({}, {"VNPU_SCHEDULE": "threads"}),
    "tensor2": ({"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}, {}),
    "tensor4": ({"tensor_parallel_size": 4, "distributed_executor_backend": "mp"}, {}),
    "pipeline2": ({"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"}, {}),
}


@pytest.mark.parametrize("model", MODELS, ids=[model.name for model in MODELS])
def test_every_shape_gives_the_tokens_of_transformers(model, tmp_path, start_engine, prompts):
    checkpoint = write_checkpoint(model, tmp_path / "model")
    with start_engine(checkpoint) as engine:
        outputs = engine.generate(as_inputs(prompts), GREEDY)
    exact = TransformersReference(checkpoint)
    assert_greedy(exact, prompts, outputs, MAX_TOKENS)
    # assert_greedy checks with one pass per prompt; this generates token by token.
    assert tokens_of(outputs[:1]) == [exact.greedy(prompts[0], MAX_TOKENS)]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", FAMILIES)
def test_every_path_gives_the_tokens_of_transformers(
    name, path, zoo, reference, start_engine, prompts
):
    options, environment = PATHS[path]
    with start_engine(zoo(name), environment=environment, **options) as engine:
        assert engine.schedule() == environment.get("VNPU_SCHEDULE", "eager")
        outputs = engine.generate(as_inputs(prompts), GREEDY)
    assert_greedy(reference(name), prompts, outputs, MAX_TOKENS)


@pytest.mark.parametrize("name", FAMILIES)
def test_misses_and_hits_of_the_prefix_cache_give_the_tokens_of_transformers(
    name: str, zoo: Zoo, reference: Reference, start_engine: StartEngine, prompts: Prompts
):
    prefix = [*range(100), *range(30, 58)]  # one cache block
    prompts = [prefix + prompt[:60] for prompt in prompts]
    with start_engine(zoo(name)) as engine:
        (miss,) = engine.generate(as_inputs(prompts[:1]), GREEDY)
        hits = engine.generate(as_inputs(prompts), GREEDY)
    assert miss.num_cached_tokens == 0
    assert {output.num_cached_tokens for output in hits} == {len(prefix)}
    assert_greedy(reference(name), prompts[:1], [miss], MAX_TOKENS)
    assert_greedy(reference(name), prompts, hits, MAX_TOKENS)


@pytest.mark.parametrize("seed", range(20))
def test_every_fuzz_seed_gives_the_tokens_of_transformers(
    seed: int, zoo: Zoo, reference: Reference, start_engine: StartEngine, prompts: Prompts
):
    name = FAMILIES[seed % len(FAMILIES)]
    schedule = {"VNPU_SCHEDULE": f"fuzz:{seed}"}
    with start_engine(zoo(name), environment=schedule, max_num_batched_tokens=512) as engine:
        assert engine.schedule() == f"fuzz:{seed}"
        outputs = engine.generate(as_inputs(prompts), GREEDY)
    assert_greedy(reference(name), prompts, outputs, MAX_TOKENS)
