"""Fused launches of dispatch and combine give the tokens of separate launches."""

import pytest
from vllm import SamplingParams

from vllm_davinci_testing.engines.dp_engines import DPEngines

RANDOM = SamplingParams(temperature=1.0, max_tokens=16, ignore_eos=True)


@pytest.mark.parametrize(
    ("dp_ranks", "tensor", "options", "additional"),
    [
        pytest.param(
            2,
            1,
            {"enable_expert_parallel": True},
            {},
            id="data2_expert2",
            marks=pytest.mark.nightly("layouts"),
        ),
        *(
            pytest.param(*case, id=name, marks=pytest.mark.thorough)
            for name, case in {
                "expert2": (1, 2, {"enable_expert_parallel": True}, {}),
                "expert4": (1, 4, {"enable_expert_parallel": True}, {}),
                "expert_tensor2": (1, 4, {}, {"expert_tensor_parallel_size": 2}),
                "pipeline2_expert2": (
                    1,
                    2,
                    {"enable_expert_parallel": True, "pipeline_parallel_size": 2},
                    {},
                ),
                "data2_expert_tensor2": (2, 2, {}, {"expert_tensor_parallel_size": 2}),
            }.items()
        ),
    ],
)
def test_fused_launches_give_the_tokens_of_separate_ones(
    dp_ranks, tensor, options, additional, zoo, start_engine, prompts
):
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    if tensor > 1:
        options = {**options, "distributed_executor_backend": "mp"}
    tokens = []
    for scheme in ("all_to_all", "fused"):
        with DPEngines(
            start_engine,
            zoo("qwen3_moe_hidden1024"),
            count=dp_ranks,
            # Its fused launches support any number of ranks.
            environment={"VNPU_SOC": "Ascend910_9391"},
            dtype="bfloat16",
            max_num_batched_tokens=128,
            tensor_parallel_size=tensor,
            additional_config={**additional, "moe_communication": scheme},
            **options,
        ) as engine:
            outputs = engine.generate(prompts[8:12], greedy)
            # The first prompt takes one more step, in which a second DP rank is idle.
            outputs += engine.generate([list(range(200)), [5]], greedy)
            # Each DP rank draws its own random numbers.
            drawn = engine.generate([prompts[8]] * dp_ranks, RANDOM)
            assert f"Mixture of experts: {scheme}, because" in engine.log_text()
        assert len({tuple(output.outputs[0].token_ids) for output in drawn}) == dp_ranks
        tokens.append([list(output.outputs[0].token_ids) for output in outputs])
    assert tokens[0] == tokens[1]
    assert len({tuple(each) for each in tokens[0]}) == 6
