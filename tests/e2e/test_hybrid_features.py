"""Models with recurrent state: data-parallel ranks, int8 checkpoints, sleep.

test_expert_balancing.py moves their experts.
"""

import re

import pytest
import torch
from vllm import SamplingParams

from vllm_davinci_testing.engines.dp_engines import DPEngines
from vllm_davinci_testing.engines.generating import (
    FUZZED,
    IN_PARTS,
    RACES,
    TWO_RANKS,
    as_inputs,
    bits,
)
from vllm_davinci_testing.engines.integer_reference import IntegerReference
from vllm_davinci_testing.engines.transformers_reference import assert_greedy

NEXT, KIMI, NEMOTRON = "qwen3_next_moe", "kimi_linear", "nemotron_h"
MAX_TOKENS = 24
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
THOROUGH, NIGHTLY = pytest.mark.thorough, pytest.mark.nightly("layouts")
SPREAD = {**IN_PARTS, "enable_expert_parallel": True}
# Projections that transformers fuses, and Kimi-Linear's names of experts' projections.
JOINED = {"conv1d": ("q_conv1d", "k_conv1d", "v_conv1d")}
EXPERT = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


def in_transformers(name: str) -> str:
    """Translates a tensor name of a Nemotron or Kimi-Linear checkpoint to transformers' name."""
    name = name.replace("backbone.", "model.").replace("block_sparse_moe.", "mlp.")
    name = re.sub(r"self_attn\.(f_[ab]_proj|dt_bias|A_log)", r"self_attn.forget_gate.\1", name)
    return re.sub(r"(experts\.\d+)\.(w[123])", lambda m: f"{m[1]}.{EXPERT[m[2]]}", name)


@pytest.mark.parametrize(
    ("model", "options"),
    [
        pytest.param(NEXT, SPREAD, id="next_expert2", marks=NIGHTLY),
        pytest.param(NEXT, {"async_scheduling": False}, id="next_eager", marks=THOROUGH),
        pytest.param(KIMI, SPREAD, id="kimi_expert2", marks=THOROUGH),
        pytest.param(NEMOTRON, IN_PARTS, id="nemotron", marks=THOROUGH),
    ],
)
def test_data_parallel_ranks_of_which_one_is_idle_give_the_same_tokens(
    model, options, zoo, reference, start_engine, prompts
):
    chosen = prompts[:5]
    with DPEngines(start_engine, zoo(model), 2, environment=FUZZED, **options) as engines:
        # In the second round only the first rank has a request; the other runs dummy steps.
        for given in (chosen, chosen[:1], chosen):
            outputs = engines.generate(given, GREEDY)
            assert_greedy(reference(model), given, outputs, MAX_TOKENS)


@pytest.mark.parametrize(
    ("model", "options"),
    [
        pytest.param(NEXT, {}, id=NEXT, marks=NIGHTLY),
        *(
            pytest.param(model, {}, id=model, marks=THOROUGH)
            for model in (KIMI, NEMOTRON, "qwen3_5_dense", "qwen3_5_moe")
        ),
        *(
            pytest.param(model, TWO_RANKS, id=f"{model}_tensor2", marks=THOROUGH)
            for model in (NEXT, KIMI)
        ),
    ],
)
def test_an_int8_export_gives_the_tokens_of_its_integers(
    model, options, zoo, reference, quantize, start_engine, prompts
):
    """Linear attention's projections are integers too, as in ModelSlim's Qwen3-Next.

    A rounded input may become another integer. The limit is the number of tokens that change in
    transformers, with the same integers, when it rounds to 16 bits between layers.
    """
    directory, chosen = quantize(zoo(model), "W8A8_DYNAMIC"), prompts[:16]
    asked = {"dtype": "bfloat16", **IN_PARTS, **options}
    with start_engine(directory, environment=RACES, **asked) as engine:
        outputs = engine.generate(as_inputs(chosen), GREEDY)
    tokens = [list(each.outputs[0].token_ids) for each in outputs]
    exact, rounded = (
        IntegerReference(directory, named=in_transformers, joined=JOINED, dtype=dtype)
        for dtype in (torch.float32, torch.bfloat16)
    )
    in_16_bits = [rounded.greedy(each, MAX_TOKENS) for each in chosen]
    ours = sum(exact.differing_tokens(chosen, tokens))
    allowed = sum(exact.differing_tokens(chosen, in_16_bits))
    of_floats = sum(reference(model).differing_tokens(chosen, tokens))
    print(f"differing tokens: {ours}, of 16 bits {allowed}, from floats {of_floats}")
    assert ours <= 1.25 * allowed
    assert of_floats > 0


@pytest.mark.parametrize(
    "model", [pytest.param(NEXT, marks=THOROUGH), pytest.param(NEMOTRON, marks=NIGHTLY)]
)
def test_tokens_are_equal_before_and_after_sleep(model, zoo, start_engine, prompts):
    options = {
        "enable_sleep_mode": True,
        "worker_extension_cls": "vllm_davinci_testing.engines.sleeping_worker.SleepingWorker",
    }
    with start_engine(zoo(model), environment=RACES, **options, **IN_PARTS) as engine:
        expected = bits(engine, prompts[3:9])
        for level in (1, 2, 1):
            engine.sleep(level)
            (asleep,) = engine.on_workers("memory")
            assert asleep["weights"] == asleep["kv_cache"] == 0
            engine.wake_up()
            if level == 2:
                engine.on_workers("reload_weights")
            assert bits(engine, prompts[3:9]) == expected
