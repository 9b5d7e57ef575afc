"""Text generation through the whole stack, compared with transformers token by token."""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from vllm import SamplingParams
from vllm.sampling_params import RepetitionDetectionParams, StructuredOutputsParams

from vllm_davinci_testing.engines import model_zoo
from vllm_davinci_testing.engines.engine_process import EngineProcess
from vllm_davinci_testing.engines.transformers_reference import TransformersReference, assert_greedy
from vllm_davinci_testing.processes.forked import output_of

MAX_TOKENS = 64
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)

# The model of all tests that compare paths through the engine.
PATHS_MODEL = "llama_head64_gqa4"

# With the model above: every family, head size and ratio of heads, tied and untied embeddings.
MODELS = (
    "llama_head128_mha_tied",
    "llama3_rope_head80_gqa4",
    "qwen2_bias_head64_gqa8_tied",
    "qwen3_norm_head128_gqa2",
    "mistral_window32_head80_gqa2",
)


def as_inputs(prompts: list[list[int]]) -> list[dict[str, Any]]:
    return [{"prompt_token_ids": prompt} for prompt in prompts]


def tokens_of(outputs: list[Any]) -> list[list[int]]:
    """Token ids of every completion of every request."""
    return [list(completion.token_ids) for output in outputs for completion in output.outputs]


# --- exact tokens ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_equal_those_of_transformers(
    name: str,
    zoo: Callable[[str], Path],
    reference: Callable[[str], TransformersReference],
    start_engine: Callable[..., EngineProcess],
    prompts: list[list[int]],
):
    with start_engine(zoo(name)) as engine:
        outputs = engine.generate(as_inputs(prompts), GREEDY)
    assert_greedy(reference(name), prompts, outputs, MAX_TOKENS)
    # One pass per prompt stands for generating token by token; here that is done.
    assert tokens_of(outputs[:2]) == [reference(name).greedy(p, MAX_TOKENS) for p in prompts[:2]]
    # A model that repeats itself or its prompt would prove little.
    assert len({tuple(tokens) for tokens in tokens_of(outputs)}) > 60


# --- the same tokens whatever the path -----------------------------------------------------------


@pytest.fixture(scope="module")
def engine(zoo: Callable[[str], Path], start_engine: Callable[..., EngineProcess]) -> EngineProcess:
    """An engine with vLLM's defaults: asynchronous scheduling, prefix cache, chunked prefill."""
    return start_engine(
        zoo(PATHS_MODEL),
        max_logprobs=20,
        structured_outputs_config={"backend": "xgrammar", "disable_any_whitespace": True},
    )


@pytest.fixture(scope="module")
def expected(
    engine: EngineProcess,
    reference: Callable[[str], TransformersReference],
    prompts: list[list[int]],
) -> list[list[int]]:
    outputs = engine.generate(as_inputs(prompts), GREEDY)
    assert_greedy(reference(PATHS_MODEL), prompts, outputs, MAX_TOKENS)
    return tokens_of(outputs)


@pytest.mark.parametrize(
    ("options", "environment"),
    [
        pytest.param(
            {"enable_chunked_prefill": False, "max_num_batched_tokens": 8192},
            {},
            id="whole_prefill",
        ),
        pytest.param({"max_num_batched_tokens": 48, "max_num_seqs": 16}, {}, id="chunked_prefill"),
        pytest.param({"async_scheduling": False}, {}, id="sync_scheduling"),
        pytest.param({}, {"VNPU_SCHEDULE": "threads"}, id="schedule_threads"),
    ],
)
def test_tokens_are_the_same_with(
    options: dict[str, Any],
    environment: dict[str, str],
    zoo: Callable[[str], Path],
    start_engine: Callable[..., EngineProcess],
    prompts: list[list[int]],
    engine: EngineProcess,
    expected: list[list[int]],
):
    usual = engine.scheduler_settings()
    assert usual["async_scheduling"] and usual["enable_chunked_prefill"]
    with start_engine(
        zoo(PATHS_MODEL), environment=environment, enable_prefix_caching=False, **options
    ) as other:
        assert other.scheduler_settings().items() >= options.items()
        assert other.schedule() == environment.get("VNPU_SCHEDULE", "eager")
        assert tokens_of(other.generate(as_inputs(prompts), GREEDY)) == expected


def test_tokens_are_the_same_for_hits_and_misses_of_the_prefix_cache(
    engine: EngineProcess,
    reference: Callable[[str], TransformersReference],
):
    prefix = list(range(100)) + list(range(30, 58))
    prompts = [[*prefix, *range(n, n + 12)] for n in range(0, 160, 20)]
    first = engine.generate(as_inputs(prompts[:1]), GREEDY)
    assert first[0].num_cached_tokens == 0
    outputs = engine.generate(as_inputs(prompts), GREEDY)
    assert [output.num_cached_tokens for output in outputs] == [128] * len(prompts)
    assert_greedy(reference(PATHS_MODEL), prompts, outputs, MAX_TOKENS)
    assert tokens_of(outputs[:1]) == tokens_of(first)


def test_tokens_are_the_same_after_preemption(
    zoo: Callable[[str], Path],
    start_engine: Callable[..., EngineProcess],
    prompts: list[list[int]],
    expected: list[list[int]],
):
    # Requests that grow out of their first block at different times, and blocks for half of them.
    chosen = [i for i, prompt in enumerate(prompts) if 70 <= len(prompt) <= 127][:12]
    assert len(chosen) == 12
    with start_engine(
        zoo(PATHS_MODEL),
        enable_prefix_caching=False,
        num_gpu_blocks_override=15,
        kv_cache_memory_bytes=None,
        gpu_memory_utilization=0.02,
        disable_log_stats=False,
    ) as engine:
        outputs = engine.generate(as_inputs([prompts[i] for i in chosen]), GREEDY)
        preemptions = engine.metrics()["vllm:num_preemptions"]
    assert preemptions > 0
    assert tokens_of(outputs) == [expected[i] for i in chosen]


@pytest.mark.parametrize("seed", range(4))  # test_exactness takes 20
def test_tokens_are_the_same_under_fuzz_seed(
    seed: int,
    zoo: Callable[[str], Path],
    start_engine: Callable[..., EngineProcess],
    prompts: list[list[int]],
    expected: list[list[int]],
):
    with start_engine(
        zoo(PATHS_MODEL),
        environment={"VNPU_SCHEDULE": f"fuzz:{seed}"},
        max_num_batched_tokens=128,
    ) as engine:
        sampling = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        assert engine.schedule() == f"fuzz:{seed}"
        outputs = engine.generate(as_inputs(prompts[:8]), sampling)
    assert tokens_of(outputs) == [tokens[:12] for tokens in expected[:8]]


# --- requests ------------------------------------------------------------------------------------


def test_parallel_samples_differ_and_repeat_with_their_seed(engine: EngineProcess):
    prompt = [{"prompt_token_ids": [72, 101, 108, 108, 111]}]
    sampling = SamplingParams(n=3, temperature=1.0, seed=7, max_tokens=24, ignore_eos=True)
    alone = tokens_of(engine.generate(prompt, sampling))
    assert len({tuple(tokens) for tokens in alone}) == 3
    others = [{"prompt_token_ids": [n]} for n in range(5)]
    free = SamplingParams(temperature=1.0, max_tokens=24, ignore_eos=True)
    together = engine.generate([*others, *prompt], [free] * 5 + [sampling])
    assert tokens_of(together[-1:]) == alone


def test_sampled_frequencies_follow_the_softmax(
    engine: EngineProcess, reference: Callable[[str], TransformersReference]
):
    prompt, samples, temperature = [1, 2, 3], 2000, 1.5
    sampling = SamplingParams(n=samples, temperature=temperature, seed=1, max_tokens=1, top_k=4)
    outputs = engine.generate(as_inputs([prompt]), sampling)
    counts = Counter(tokens[0] for tokens in tokens_of(outputs))
    logits = reference(PATHS_MODEL).logits(prompt)[-1]
    values, tokens = logits.topk(4)
    assert set(counts) <= set(tokens.tolist())
    probabilities = (values / temperature).softmax(dim=-1)
    for token, probability in zip(tokens.tolist(), probabilities.tolist(), strict=True):
        # Four standard deviations of a binomial distribution.
        margin = 4 * (samples * probability * (1 - probability)) ** 0.5
        assert counts[token] == pytest.approx(samples * probability, abs=margin)


def test_a_stop_string_ends_the_text_before_it(engine: EngineProcess):
    prompt = [{"prompt_token_ids": [83, 116, 111, 112]}]
    (whole,) = engine.generate(prompt, GREEDY)
    text = whole.outputs[0].text
    stop = next(c for c in text[5:] if c.isascii() and c.isprintable() and c not in text[:5])
    for included in (False, True):
        (output,) = engine.generate(
            prompt,
            SamplingParams(
                temperature=0,
                max_tokens=MAX_TOKENS,
                ignore_eos=True,
                stop=["never \x01 seen", stop],
                include_stop_str_in_output=included,
            ),
        )
        completion = output.outputs[0]
        assert completion.text == text[: text.index(stop)] + stop * included
        assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)


def test_logprobs_equal_those_of_transformers(
    engine: EngineProcess,
    reference: Callable[[str], TransformersReference],
    prompts: list[list[int]],
):
    chosen = prompts[3:9]
    sampling = SamplingParams(
        temperature=0, max_tokens=16, ignore_eos=True, logprobs=5, prompt_logprobs=3
    )
    outputs = engine.generate(as_inputs(chosen), sampling)
    for prompt, output in zip(chosen, outputs, strict=True):
        tokens = list(output.outputs[0].token_ids)
        rows = reference(PATHS_MODEL).logprobs([*prompt, *tokens])
        assert output.prompt_logprobs[0] is None
        seen = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
        followers = [*prompt[1:], *tokens]
        for row, follower, candidates in zip(rows, followers, seen, strict=False):
            assert follower in candidates
            assert len(candidates) >= 3
            best = {token for token, entry in candidates.items() if entry.rank <= 3}
            assert best >= set(row.topk(3).indices.tolist())
            for token, entry in candidates.items():
                assert entry.logprob == pytest.approx(float(row[token]), abs=2e-4)


@pytest.mark.parametrize(
    ("constraint", "pattern"),
    [
        ({"choice": ["positive", "negative"]}, r"positive|negative"),
        ({"regex": r"[a-c]{3}-\d{4}"}, r"[a-c]{3}-\d{4}"),
        (
            {
                "json": {
                    "type": "object",
                    "properties": {
                        "colour": {"enum": ["red", "green"]},
                        "ok": {"type": "boolean"},
                    },
                    "required": ["colour", "ok"],
                    "additionalProperties": False,
                }
            },
            r"\{.*\}",
        ),
        ({"grammar": 'root ::= "a" ("b" | "c") "d"'}, r"a[bc]d"),
    ],
    ids=["choice", "regex", "json", "grammar"],
)
def test_structured_output_has_the_structure(
    constraint: dict[str, Any], pattern: str, engine: EngineProcess
):
    constrained = SamplingParams(
        temperature=1.0,
        seed=3,
        max_tokens=80,
        structured_outputs=StructuredOutputsParams(**constraint),
    )
    free = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    prompts = [{"prompt_token_ids": [n, n + 1]} for n in range(6)]
    alone = tokens_of(engine.generate(prompts[1::2], free))
    outputs = engine.generate(prompts, [constrained, free] * 3)
    for output in outputs[::2]:
        text = output.outputs[0].text
        assert re.fullmatch(pattern, text), text
        if "json" in constraint:
            assert json.loads(text)["colour"] in ("red", "green")
    # The mask of one request does not reach its neighbours in the batch.
    assert tokens_of(outputs[1::2]) == alone


def greedy_tokens(engine: EngineProcess, **options: Any) -> list[int]:
    settings = {"temperature": 0, "max_tokens": 32, "ignore_eos": True, **options}
    (tokens,) = tokens_of(
        engine.generate([{"prompt_token_ids": [11, 22, 33]}], SamplingParams(**settings))
    )
    return tokens


@pytest.mark.parametrize("options", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}], ids=str)
def test_sampling_from_one_candidate_is_greedy(options: dict[str, Any], engine: EngineProcess):
    settings = {"temperature": 1.0, "seed": 5, **options}
    assert greedy_tokens(engine, **settings) == greedy_tokens(engine)


@pytest.mark.parametrize("name", ["repetition_penalty", "presence_penalty", "frequency_penalty"])
def test_penalties_choose_as_their_definitions_do(
    name: str, engine: EngineProcess, reference: Callable[[str], TransformersReference]
):
    prompt, penalty = [11, 22, 33], 1.4

    def adjust(logits: torch.Tensor, generated: list[int]) -> torch.Tensor:
        if name == "repetition_penalty":
            seen = torch.tensor(sorted({*prompt, *generated}))
            chosen = logits[seen]
            logits[seen] = torch.where(chosen > 0, chosen / penalty, chosen * penalty)
            return logits
        for token, count in Counter(generated).items():
            logits[token] -= penalty * (count if name == "frequency_penalty" else 1)
        return logits

    tokens = greedy_tokens(engine, **{name: penalty}, max_tokens=64)
    assert tokens[:32] != greedy_tokens(engine)
    assert reference(PATHS_MODEL).first_difference(prompt, tokens, adjust) is None


def test_tokens_can_be_allowed_biased_and_forbidden(engine: EngineProcess):
    free = greedy_tokens(engine)
    assert set(greedy_tokens(engine, allowed_token_ids=[7, 8, 9])) <= {7, 8, 9}
    assert greedy_tokens(engine, logit_bias={5: 100.0}) == [5] * 32
    assert free[0] not in greedy_tokens(engine, logit_bias={free[0]: -100.0})
    # vLLM wants the forbidden words as text; a byte of printable ASCII is one token.
    tokenizer = {chr(byte): byte - 33 for byte in range(33, 127)}
    word, token = next((c, t) for c, t in tokenizer.items() if t in free)
    assert token not in greedy_tokens(engine, bad_words=[word])


def test_a_stop_token_waits_for_the_smallest_number_of_tokens(engine: EngineProcess):
    free = greedy_tokens(engine)
    stop = free[3]
    first = free.index(stop)
    assert greedy_tokens(engine, stop_token_ids=[stop]) == free[: first + 1]
    waited = greedy_tokens(engine, stop_token_ids=[stop], min_tokens=first + 5)
    assert len(waited) > first + 4
    assert stop not in waited[: first + 4]


def test_logprobs_of_tokens_that_are_named(
    engine: EngineProcess, reference: Callable[[str], TransformersReference]
):
    prompt, named = [11, 22, 33], [7, 8, 9]
    sampling = SamplingParams(temperature=0, max_tokens=1, logprob_token_ids=named)
    (output,) = engine.generate(as_inputs([prompt]), sampling)
    (candidates,) = output.outputs[0].logprobs
    row = reference(PATHS_MODEL).logprobs(prompt)[-1]
    assert set(candidates) == {*named, int(row.argmax())}
    for token, entry in candidates.items():
        assert entry.logprob == pytest.approx(float(row[token]), abs=2e-4)


def test_a_repetition_ends_the_text(engine: EngineProcess):
    repeated = RepetitionDetectionParams(max_pattern_size=1, min_pattern_size=1, min_count=3)
    options = {"logit_bias": {5: 100.0}, "repetition_detection": repeated}
    assert greedy_tokens(engine, **options) == [5] * 3


def test_every_other_sampling_option_is_accepted(engine: EngineProcess):
    outputs = engine.generate(
        [{"prompt_token_ids": [11, 22, 33]}],
        SamplingParams(
            temperature=0.8,
            top_p=0.9,
            top_k=20,
            max_tokens=4,
            n=1,
            detokenize=False,
            skip_special_tokens=False,
            spaces_between_special_tokens=False,
            stop=None,
            logprobs=0,
            flat_logprobs=True,
            ignore_eos=False,
            skip_reading_prefix_cache=True,
            stream_interval=2,
            extra_args={"any": "thing"},
        ),
    )
    assert 1 <= len(outputs[0].outputs[0].token_ids) <= 4


# --- embeddings ----------------------------------------------------------------------------------


def test_embeddings_of_a_decoder_equal_those_of_transformers(
    zoo: Callable[[str], Path],
    reference: Callable[[str], TransformersReference],
    start_engine: Callable[..., EngineProcess],
    prompts: list[list[int]],
):
    name = "qwen3_norm_head64_gqa8_tied"
    with start_engine(zoo(name), runner="pooling", convert="embed") as engine:
        outputs = engine.embed(as_inputs(prompts[:24]))
    for prompt, output in zip(prompts, outputs, strict=False):
        last = reference(name).last_hidden_state(prompt)[-1]
        expected = torch.nn.functional.normalize(last, dim=-1)
        torch.testing.assert_close(
            torch.tensor(output.outputs.embedding), expected, atol=2e-5, rtol=1e-4
        )


def test_embeddings_of_an_encoder_equal_those_of_transformers(
    tmp_path: Path, start_engine: Callable[..., EngineProcess], prompts: list[list[int]]
):
    checkpoint = model_zoo.write_bert(tmp_path / "bert")
    with start_engine(checkpoint, runner="pooling") as engine:
        outputs = engine.embed(as_inputs(prompts[:24]))
    network = transformers.AutoModel.from_pretrained(checkpoint, attn_implementation="eager").eval()
    for prompt, output in zip(prompts, outputs, strict=False):
        with torch.inference_mode():
            first = network(torch.tensor([prompt])).last_hidden_state[0, 0]
        expected = torch.nn.functional.normalize(first, dim=-1)
        torch.testing.assert_close(
            torch.tensor(output.outputs.embedding), expected, atol=2e-5, rtol=1e-4
        )


# --- a trained checkpoint ------------------------------------------------------------------------


def test_the_shipped_checkpoint_completes_python_in_bfloat16(
    tiny_llama: Path, start_engine: Callable[..., EngineProcess]
):
    prompts = ["def ", "import ", "class ", "if __name__ == "]
    with start_engine(tiny_llama, dtype="bfloat16") as engine:
        sampling = SamplingParams(temperature=0, max_tokens=40, logprobs=0)
        outputs = engine.generate(prompts, sampling)
    assert outputs[3].outputs[0].text.startswith("'__main__':")
    exact = TransformersReference(tiny_llama)
    for output in outputs:
        completion = output.outputs[0]
        tokens = list(completion.token_ids)
        prompt = list(output.prompt_token_ids)
        rows = exact.logprobs([*prompt, *tokens])[len(prompt) - 1 : -1]
        expected = [float(row[token]) for row, token in zip(rows, tokens, strict=True)]
        seen = [
            entry[token].logprob for entry, token in zip(completion.logprobs, tokens, strict=True)
        ]
        # bfloat16 keeps 8 bits: logits of about 20 are off by up to 0.1.
        assert seen == pytest.approx(expected, abs=0.25)


# --- profiling --------------------------------------------------------------------------------


def test_virtual_devices_compute_with_the_threads_that_there_were(tiny_llama: Path):
    """vLLM leaves one to a process with a model, where nobody has set OMP_NUM_THREADS."""
    [threads] = output_of(
        f"""
        import os
        import torch
        os.environ.pop("OMP_NUM_THREADS", None)
        torch.set_num_threads(3)
        from vllm import LLM
        LLM({str(tiny_llama)!r}, dtype="bfloat16", enforce_eager=True, max_model_len=256)
        print("threads:", torch.get_num_threads())
        """,
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_LOGGING_LEVEL="ERROR",
        VNPU_SOC="Ascend910B3",
    )[-1:]
    assert threads == "threads: 3"


def test_vllm_s_profiler_writes_a_trace_of_host_and_device(
    start_engine: Callable[..., EngineProcess], tiny_llama: Path, tmp_path: Path
):
    engine = start_engine(
        tiny_llama,
        enforce_eager=False,
        max_num_seqs=4,
        profiler_config={"profiler": "torch", "torch_profiler_dir": str(tmp_path)},
    )
    engine.on_workers("profile", True)
    engine.generate(as_inputs([[5, 6, 7]]), SamplingParams(temperature=0, max_tokens=4))
    engine.on_workers("profile", False)
    engine.close()
    (trace,) = tmp_path.glob("*.pt.trace.json.gz")
    with gzip.open(trace, "rt", encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    names = Counter(event.get("name") for event in events)
    assert names["aten::argmax"] >= 4
    assert sum(count for name, count in names.items() if str(name).startswith("aten::")) > 100
    kernels = Counter(event["name"] for event in events if event.get("cat") == "kernel")
    num_layers = json.loads((tiny_llama / "config.json").read_text())["num_hidden_layers"]
    # The prefill's are launched one by one, those of three decodes come from a replayed graph.
    assert kernels["aclnnFusedInferAttentionScoreV3"] == 4 * num_layers
    assert kernels["aclnnArgMax"] >= 4
