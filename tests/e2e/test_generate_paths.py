"""Every path through the engine gives transformers' tokens."""

import pytest
from vllm import SamplingParams

from vllm_davinci_testing.engines.fixture_types import Engines, Prompts
from vllm_davinci_testing.engines.generating import as_inputs, tokens_of
from vllm_davinci_testing.engines.preemption import few_blocks
from vllm_davinci_testing.engines.transformers_reference import TransformersReference, assert_greedy

pytestmark = pytest.mark.nightly("layouts")

MAX_TOKENS = 64
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)

# The model of all tests that compare paths through the engine.
PATHS_MODEL = "llama_head64_gqa4"

# With the model above: every family, head size and ratio of heads, tied and untied embeddings.
MODELS = (
    pytest.param("llama_head128_mha_tied", marks=pytest.mark.thorough),
    pytest.param("llama3_rope_head80_gqa4", marks=pytest.mark.thorough),
    pytest.param("qwen2_bias_head64_gqa8_tied", marks=pytest.mark.thorough),
    "qwen3_norm_head128_gqa2",
    "mistral_window32_head80_gqa2",
)


# --- exact tokens ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_equal_those_of_transformers(name, zoo, reference, start_engine, prompts):
    with start_engine(zoo(name)) as engine:
        outputs = engine.generate(as_inputs(prompts), GREEDY)
    assert_greedy(reference(name), prompts, outputs, MAX_TOKENS)
    # One pass per prompt replaces token-by-token generation; this test does the latter.
    assert tokens_of(outputs[:2]) == [reference(name).greedy(p, MAX_TOKENS) for p in prompts[:2]]
    # A model that repeats itself or its prompt would prove little.
    assert len({tuple(tokens) for tokens in tokens_of(outputs)}) > 60


@pytest.mark.parametrize(
    ("options", "environment"),
    [
        pytest.param(
            {"enable_chunked_prefill": False, "max_num_batched_tokens": 8192},
            {},
            id="whole_prefill",
            marks=pytest.mark.thorough,
        ),
        pytest.param({"max_num_batched_tokens": 48, "max_num_seqs": 16}, {}, id="chunked_prefill"),
        pytest.param({"async_scheduling": False}, {}, id="sync_scheduling"),
        pytest.param({}, {"VNPU_SCHEDULE": "threads"}, id="schedule_threads"),
    ],
)
def test_tokens_are_the_same_with(options, environment, exact_engine, prompts):
    more = {"environment": environment, "enable_prefix_caching": False}
    with exact_engine(PATHS_MODEL, prompts, MAX_TOKENS, **more, **options) as other:
        assert other.scheduler_settings().items() >= options.items()
        assert other.schedule() == environment.get("VNPU_SCHEDULE", "eager")


def test_tokens_are_the_same_after_preemption(exact_engine: Engines, prompts: Prompts):
    # Requests outgrow their first block at different times, and half of the needed blocks exist.
    chosen = [prompt for prompt in prompts if 70 <= len(prompt) <= 127][:12]
    assert len(chosen) == 12
    options = {"enable_prefix_caching": False, **few_blocks(15)}
    with exact_engine(PATHS_MODEL, chosen, MAX_TOKENS, **options) as engine:
        assert engine.metrics()["vllm:num_preemptions"] > 0


@pytest.mark.parametrize("seed", range(1))  # test_exactness takes 20
def test_tokens_are_the_same_under_fuzz_seed(seed: int, exact_engine: Engines, prompts: Prompts):
    options = {"environment": {"VNPU_SCHEDULE": f"fuzz:{seed}"}, "max_num_batched_tokens": 128}
    with exact_engine(PATHS_MODEL, prompts[:8], 12, **options) as engine:
        assert engine.schedule() == f"fuzz:{seed}"


def test_the_shipped_checkpoint_completes_python_in_bfloat16(tiny_llama, start_engine):
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
