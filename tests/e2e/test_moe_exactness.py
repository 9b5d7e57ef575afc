"""Mixtures of experts in every layout of ranks, with each dispatch method, in 20 orders of
execution.

32 prompts of 64 tokens each equal transformers in fp32. Fused launches do not support fp32 and are
compared in bf16 with separate launches of the same rows. `nox -s tests -- -m thorough` runs this
file.
"""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from vllm import SamplingParams

from vllm_davinci_testing.engines.engine_process import EngineProcess
from vllm_davinci_testing.engines.fixture_types import Prompts, Reference, StartEngine, Zoo
from vllm_davinci_testing.engines.server_process import SMALL, ForkedServer
from vllm_davinci_testing.engines.transformers_reference import assert_greedy

pytestmark = pytest.mark.thorough

NUM_PROMPTS, MAX_TOKENS = 32, 64
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)

QWEN, V3 = "qwen3_moe_softmax_top2_of_8", "deepseek_v3_moe"


def ranks(tensor: int, pipeline: int = 1, whole_experts: bool = True) -> dict[str, Any]:
    return {
        "distributed_executor_backend": "mp",
        "tensor_parallel_size": tensor,
        "pipeline_parallel_size": pipeline,
        "enable_expert_parallel": whole_experts,
    }


# Engine options and additional_config by layout; `auto` chooses no exchange.
ONE_DP_RANK: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "expert2": (ranks(2), {}),
    "expert4": (ranks(4), {}),
    "tensor4": (ranks(4, whole_experts=False), {}),
    "tensor4_expert_tensor2": (ranks(4, whole_experts=False), {"expert_tensor_parallel_size": 2}),
    "pipeline2_expert2": (ranks(2, pipeline=2), {}),
    "pipeline2": (ranks(1, pipeline=2, whole_experts=False), {}),
}
EXCHANGES = ("auto", "all_to_all")
WITHOUT_EXCHANGE = ("tensor4", "pipeline2")  # every rank has a part of each expert


def generated(engine: EngineProcess, prompts: list[list[int]]) -> list[Any]:
    return engine.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts[:NUM_PROMPTS]], GREEDY
    )


@pytest.mark.parametrize("model", [QWEN, V3])
@pytest.mark.parametrize(
    ("layout", "scheme"),
    [
        (layout, scheme)
        for layout in ONE_DP_RANK
        for scheme in EXCHANGES
        if scheme == "auto" or layout not in WITHOUT_EXCHANGE
    ],
)
def test_every_layout_of_one_dp_rank_gives_the_tokens_of_transformers(
    layout, scheme, model, zoo, reference, start_engine, prompts
):
    options, additional = ONE_DP_RANK[layout]
    with start_engine(
        zoo(model), additional_config={**additional, "moe_communication": scheme}, **options
    ) as engine:
        outputs = generated(engine, prompts)
        said = engine.log_text()
    # Only the first rank logs the method, and a V3's first stage may have no experts.
    if model == QWEN or options["pipeline_parallel_size"] == 1:
        assert ("Mixture of experts: all_to_all, because" in said) == (scheme == "all_to_all")
    assert_greedy(reference(model), prompts[:NUM_PROMPTS], outputs, MAX_TOKENS)


@pytest.mark.parametrize("model", [QWEN, V3])
@pytest.mark.parametrize(
    ("whole_experts", "scheme"),
    [
        (True, "auto"),
        (True, "all_gather"),
        (True, "multicast"),
        (True, "all_to_all"),
        (False, "auto"),
        (False, "all_to_all"),
    ],
)
def test_two_dp_ranks_of_two_ranks_give_the_tokens_of_transformers(
    whole_experts, scheme, model, zoo, reference, prompts, tmp_path
):
    server = ForkedServer(
        zoo(model),
        tmp_path / "log.txt",
        *SMALL,
        "--api-server-count=1",
        "--data-parallel-size=2",
        "--tensor-parallel-size=2",
        *(["--enable-expert-parallel"] if whole_experts else []),
        f"--additional-config={json.dumps({'moe_communication': scheme})}",
    )
    try:
        server.wait_until_ready()
        with ThreadPoolExecutor(16) as threads:
            tokens = list(
                threads.map(
                    lambda prompt: server.complete(prompt, MAX_TOKENS), prompts[:NUM_PROMPTS]
                )
            )
        server.interrupt()
        server.wait_for_end()
    finally:
        server.kill()
    for prompt, each in zip(prompts, tokens, strict=False):
        assert len(each) == MAX_TOKENS
        assert reference(model).first_difference(prompt, each) is None


@pytest.mark.parametrize("seed", range(20))
def test_every_order_that_events_allow_gives_the_tokens_of_transformers(
    seed: int, zoo: Zoo, reference: Reference, start_engine: StartEngine, prompts: Prompts
):
    model = (QWEN, V3)[seed % 2]
    with start_engine(
        zoo(model),
        environment={"VNPU_SCHEDULE": f"fuzz:{seed}"},
        max_num_batched_tokens=512,
        additional_config={"moe_communication": EXCHANGES[seed // 2 % 2]},
        **ranks(2),
    ) as engine:
        outputs = generated(engine, prompts)
    assert_greedy(reference(model), prompts[:NUM_PROMPTS], outputs, MAX_TOKENS)
