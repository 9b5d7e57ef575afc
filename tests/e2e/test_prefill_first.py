"""The prefill-first scheduler in whole engines gives the tokens of vLLM's scheduler."""

from typing import Any

import pytest
from vllm import SamplingParams

pytestmark = pytest.mark.nightly("layouts")

THOROUGH = pytest.mark.thorough
SMALL = {
    "max_num_seqs": 6,
    "max_num_batched_tokens": 256,
    "enforce_eager": False,
    "enable_prefix_caching": True,
}
PREFILL_FIRST = {"ascend_scheduler_config": {"enabled": True}}
FEW_BLOCKS = {"num_gpu_blocks_override": 8}
TP2 = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
PP2 = {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"}

CASES = [
    pytest.param({"async_scheduling": True}, id="async"),
    pytest.param({**FEW_BLOCKS, "async_scheduling": True}, id="few_blocks_async"),
    pytest.param({"async_scheduling": False, **FEW_BLOCKS}, id="few_blocks", marks=THOROUGH),
    pytest.param({**TP2, **FEW_BLOCKS}, id="tp2", marks=THOROUGH),
    pytest.param({**PP2, **FEW_BLOCKS}, id="pp2", marks=THOROUGH),
]


def generate(engine: Any, prompts: list[list[int]]) -> list[list[int]]:
    """Generates greedily for requests that end at different times; some share a prefix."""
    chosen = [prompt[:100] for prompt in prompts[:14]]
    chosen += [[*prompts[5][:128], *prompt[:20]] for prompt in prompts[6:12]]
    parameters = [
        SamplingParams(temperature=0, max_tokens=8 + 30 * (number % 4), ignore_eos=True)
        for number in range(len(chosen))
    ]
    outputs = engine.generate([{"prompt_token_ids": prompt} for prompt in chosen], parameters)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize("options", CASES)
def test_tokens_equal_those_of_vllm_s_scheduler(
    options, start_engine, tiny_deepseek, tiny_llama, prompts
):
    model = tiny_llama if "pipeline" in str(options) else tiny_deepseek
    plain = start_engine(model, **{**SMALL, **TP2} if "mp" in str(options) else SMALL)
    expected = generate(plain, prompts)
    plain.close()
    engine = start_engine(
        model,
        environment={"VNPU_RACES": "raise"},
        additional_config=PREFILL_FIRST,
        disable_log_stats=False,
        **{**SMALL, **options},
    )
    assert "PrefillFirst" in engine.scheduler_settings()["scheduler_cls"]
    assert generate(engine, prompts) == expected
    preemptions = engine.metrics()["vllm:num_preemptions"]
    assert (preemptions > 0) == ("num_gpu_blocks_override" in options)
    for replays in engine.on_workers("graph_replays"):
        assert sum(replays.values()) > 50
    engine.close()


def test_a_prompt_that_fits_no_step_ends_without_tokens(start_engine, tiny_llama):
    engine = start_engine(
        tiny_llama, **{**SMALL, "max_num_batched_tokens": 64}, additional_config=PREFILL_FIRST
    )
    parameters = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    prompts = [{"prompt_token_ids": [9] * length} for length in (64, 65, 3)]
    outputs = [output.outputs[0] for output in engine.generate(prompts, parameters)]
    assert [len(output.token_ids) for output in outputs] == [4, 0, 4]
    assert outputs[1].finish_reason == "length"
    assert "its prompt has 65 tokens, --max-num-batched-tokens is 64" in engine.log_text()
    engine.close()
