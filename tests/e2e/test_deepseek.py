"""DeepSeek's MLA through the whole stack: transformers' tokens."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from vllm import SamplingParams

from vllm_davinci.core.export.exporter import Exporter
from vllm_davinci.vnpu import timeline
from vllm_davinci_testing.engines import deepseek_zoo, model_zoo
from vllm_davinci_testing.engines.engine_process import EngineError, EngineProcess
from vllm_davinci_testing.engines.fixture_types import Reference, StartEngine, Zoo
from vllm_davinci_testing.engines.generating import (
    COMPOSED,
    FUZZED,
    IN_PARTS,
    TWO_RANKS,
    as_inputs,
    paths,
)
from vllm_davinci_testing.engines.refusals import refusal_of
from vllm_davinci_testing.engines.transformers_reference import TransformersReference, assert_greedy

MAX_TOKENS = 64
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)

# The model of all tests that compare paths through the engine.
PATHS_MODEL = "deepseek_v3_dense"

ON_ONE_DEVICE_AND_TWO = pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="one_device", marks=pytest.mark.thorough),
        pytest.param(
            {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}, id="tensor2"
        ),
    ],
)


@pytest.fixture(scope="module")
def batch(prompts: list[list[int]]) -> list[list[int]]:
    """The first 32 prompts, of 1 to 150 tokens; six lengths lie around a cache block."""
    return prompts[:32]


NAMES = ["deepseek_r1_yarn_moe"]
OTHER_NAMES = [model.name for model in deepseek_zoo.DEEPSEEK if model.name not in NAMES]


@pytest.mark.parametrize(
    "name", [*NAMES, *(pytest.param(name, marks=pytest.mark.thorough) for name in OTHER_NAMES)]
)
def test_greedy_tokens_equal_those_of_transformers(name, zoo, reference, start_engine, batch):
    with start_engine(zoo(name)) as engine:
        outputs = engine.generate(as_inputs(batch), GREEDY)
    assert_greedy(reference(name), batch, outputs, MAX_TOKENS)
    # A model that repeats itself or its prompt would make this test weak.
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) > 30


@pytest.mark.thorough
def test_a_rank_with_all_heads_of_a_large_model_computes_the_same(
    zoo: Zoo, reference: Reference, start_engine: StartEngine, batch: list[list[int]]
):
    name, chosen = deepseek_zoo.HEADS128.name, batch[:6]
    with start_engine(zoo(name)) as engine:
        outputs = engine.generate(as_inputs(chosen), GREEDY)
    assert_greedy(reference(name), chosen, outputs, MAX_TOKENS)


@pytest.mark.parametrize(
    "options", paths({"whole": COMPOSED, "tensor2_in_parts": {**TWO_RANKS, **IN_PARTS}})
)
def test_heads_that_decodes_pad_compute_the_same(options, exact_engine, batch):
    with exact_engine(deepseek_zoo.HEADS6.name, batch, 24, environment=FUZZED, **options):
        pass


@pytest.mark.parametrize(
    ("options", "environment"),
    [
        pytest.param(
            {
                "enable_chunked_prefill": False,
                "max_num_batched_tokens": 8192,
                "async_scheduling": False,
            },
            {},
            id="whole_prefill_sync_scheduling",
            marks=pytest.mark.thorough,
        ),
        # Chunks of prompts run beside decodes.
        pytest.param(
            {"max_num_batched_tokens": 48, "max_num_seqs": 16},
            {"VNPU_SCHEDULE": "fuzz:1"},
            id="chunked_prefill_schedule_fuzz",
        ),
    ],
)
def test_tokens_are_the_same_with(options, environment, exact_engine, batch):
    more = {"environment": environment, "enable_prefix_caching": False}
    with exact_engine(PATHS_MODEL, batch, MAX_TOKENS, **more, **options):
        pass


def test_tokens_are_the_same_for_hits_and_misses_of_the_prefix_cache(zoo, reference, start_engine):
    prefix = list(range(100)) + list(range(30, 58))
    prompts = [[*prefix, *range(n, n + 12)] for n in range(0, 160, 20)]
    with start_engine(zoo(PATHS_MODEL)) as engine:
        first = engine.generate(as_inputs(prompts[:1]), GREEDY)
        outputs = engine.generate(as_inputs(prompts), GREEDY)
    assert first[0].num_cached_tokens == 0
    assert [output.num_cached_tokens for output in outputs] == [128] * len(prompts)
    assert_greedy(reference(PATHS_MODEL), prompts[:1], first, MAX_TOKENS)
    assert_greedy(reference(PATHS_MODEL), prompts, outputs, MAX_TOKENS)


@ON_ONE_DEVICE_AND_TWO
def test_the_trained_checkpoint_gives_transformers_tokens(options, tiny_deepseek, start_engine):
    source = Path(__file__).read_text(encoding="utf-8")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_deepseek)
    prompts = [tokenizer(source[n * 200 : n * 200 + 40 * (n % 9 + 1)]).input_ids for n in range(32)]
    # The checkpoint's weights are bf16; both sides compute in fp32.
    with start_engine(
        tiny_deepseek, max_num_batched_tokens=64, max_num_seqs=8, **options
    ) as engine:
        outputs = engine.generate(as_inputs(prompts), GREEDY)
    assert_greedy(TransformersReference(tiny_deepseek), prompts, outputs, MAX_TOKENS)


MULTISTREAM = {
    "torchair_graph_config": {"enable_multistream_mla": True, "enable_multistream_moe": True},
    "weight_prefetch_config": {"enabled": True, "min_bytes": 0},
}
COUNTED: dict[str, Any] = {
    "max_num_seqs": 8,
    "worker_extension_cls": "vllm_davinci_testing.engines.counting_worker.CallCountingWorker",
}


def with_calls(engine: EngineProcess, prompts: list[list[int]]) -> tuple[list[Any], list[Any]]:
    """Returns the outputs, and per worker the number of calls of each compiled operator."""
    engine.on_workers("count_compiled_calls")
    outputs = engine.generate(as_inputs(prompts), GREEDY)
    return outputs, engine.on_workers("compiled_calls")


@ON_ONE_DEVICE_AND_TWO
def test_side_streams_inside_layers_change_no_token_and_race_nowhere(
    options, tiny_deepseek, start_engine, batch, tmp_path
):
    traces = tmp_path / "traces"
    traces.mkdir()
    environment = {"VNPU_RACES": "raise", "VNPU_SCHEDULE": "fuzz:3", "VNPU_TRACE": str(traces)}
    with start_engine(
        tiny_deepseek, environment=environment, additional_config=MULTISTREAM, **COUNTED, **options
    ) as engine:
        outputs, calls = with_calls(engine, batch[:8])
    # In every decode of every layer, and in no step with a prefill.
    assert all(counts["mla_preprocess beside"] >= 60 * 4 for counts in calls)
    trace = timeline.read([traces])
    assert {trace.role(task) for task in trace.tasks} >= {"vector", "shared expert"}
    assert_greedy(TransformersReference(tiny_deepseek), batch[:8], outputs, MAX_TOKENS)


@pytest.mark.thorough
@ON_ONE_DEVICE_AND_TWO
def test_side_streams_beside_int8_projections_change_no_token_and_race_nowhere(
    options, tiny_deepseek, start_engine, batch, tmp_path
):
    Exporter(tiny_deepseek, tmp_path, "W8A8_DYNAMIC", torch.bfloat16, {}).run(lambda _: None)
    found = []
    for environment, streams in (
        ({}, {}),
        ({"VNPU_RACES": "raise", "VNPU_SCHEDULE": "fuzz:3"}, MULTISTREAM),
    ):
        with start_engine(
            tmp_path,
            dtype="bfloat16",
            environment=environment,
            additional_config=streams,
            **COUNTED,
            **options,
        ) as engine:
            outputs, calls = with_calls(engine, batch[:8])
        found.append([list(output.outputs[0].token_ids) for output in outputs])
        name = "mla_preprocess_w8a8 beside" if streams else "mla_preprocess_w8a8"
        # In every decode of every layer.
        assert all(counts[name] >= 60 * 4 for counts in calls)
    assert found[0] == found[1]


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.thorough)])
def test_text_in_16_bits_stays_near_that_of_transformers(
    dtype: str, zoo: Zoo, reference: Reference, start_engine: StartEngine, batch: list[list[int]]
):
    with start_engine(zoo(PATHS_MODEL), dtype=dtype, max_logprobs=1) as engine:
        outputs = engine.generate(
            as_inputs(batch),
            SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, logprobs=1),
        )
    worst = 0.0
    for prompt, output in zip(batch, outputs, strict=True):
        token = output.outputs[0].token_ids[0]
        expected = float(reference(PATHS_MODEL).logprobs(prompt)[-1, token])
        worst = max(worst, abs(output.outputs[0].logprobs[0][token].logprob - expected))
    # Weights of the two layers are normal with a gain of 1.2, rounded to 8 and 11 bits.
    assert worst < {"bfloat16": 0.5, "float16": 0.06}[dtype]


@pytest.mark.parametrize(
    ("model", "named"),
    [
        pytest.param(
            deepseek_zoo.deepseek("latent_of_256", "deepseek_v3", q_lora_rank=96, kv_lora_rank=256),
            r"layers\.0\.self_attn\.attn has kv_lora_rank 256 \(must be 512\)",
            id="latent_size",
            marks=pytest.mark.nightly("refusals"),
        ),
        pytest.param(
            deepseek_zoo.deepseek(
                "narrow_heads", "deepseek_v3", q_lora_rank=96, qk_nope_head_dim=24
            ),
            r"qk_nope_head_dim 24 \(must be a multiple of 16\)",
            id="head_size",
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_shapes_that_the_operator_lacks_are_refused_while_loading(
    model: model_zoo.ZooModel, named: str, start_engine: StartEngine, tmp_path: Path
):
    checkpoint = model_zoo.write_checkpoint(model, tmp_path / model.name)
    with pytest.raises(EngineError, match=named):
        start_engine(checkpoint)


@pytest.mark.parametrize(
    ("dtype", "why"),
    [
        ("fp8", r"--kv-cache-dtype fp8 .*the model is float32\. Use --kv-cache-dtype auto"),
        ("bfloat16", 'kv_cache_dtype="bfloat16" is incompatible with dtype="float32"'),  # vLLM's
    ],
)
def test_a_cache_in_another_dtype_is_refused(dtype: str, why: str, zoo: Zoo):
    assert re.search(why, refusal_of(zoo(PATHS_MODEL), kv_cache_dtype=dtype))
