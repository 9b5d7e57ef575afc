"""Several devices: every combination of ranks gives one device's tokens."""

import random
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from vllm_davinci_testing.engines.generating import assert_generates
from vllm_davinci_testing.engines.server_process import SMALL, ForkedServer, shared_memory

MAX_TOKENS = 64

# Eight query heads and two key-value heads: of four ranks, two share each key-value head and take
# half of its query heads each.
MODEL = "llama_head64_gqa4"


@pytest.mark.parametrize(
    ("model", "ranks"),
    [
        pytest.param(MODEL, {"tensor_parallel_size": 2}, id="tensor2"),
        pytest.param(MODEL, {"tensor_parallel_size": 4}, id="tensor4", marks=pytest.mark.thorough),
        pytest.param(MODEL, {"pipeline_parallel_size": 2}, id="pipeline2"),
        # One stage has only dense layers and the other only experts, so each lacks the other's
        # weight names.
        pytest.param(
            "deepseek_v3_moe",
            {"pipeline_parallel_size": 2},
            id="pipeline2_experts",
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            "qwen3_norm_head128_gqa2",
            {"tensor_parallel_size": 2},
            id="tensor2_qk_norm",
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_tokens_equal_those_of_one_device(model, ranks, exact_engine, prompts):
    # test_generate compares one device with the same reference.
    options = {"distributed_executor_backend": "mp", **ranks}
    with exact_engine(model, prompts, MAX_TOKENS, **options) as engine:
        ranks_seen = engine.log_text().count("backend=hccl")
        held = shared_memory(engine.processes())
    assert ranks_seen == next(iter(ranks.values()))
    # The workers' queues exist while they run, and are removed afterwards.
    assert held
    assert not [path for path in held if path.exists()]


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.thorough)])
def test_two_dp_ranks_give_the_tokens_of_one(ranks, zoo, reference, prompts, tmp_path):
    log = tmp_path / "log.txt"
    server = ForkedServer(
        zoo(MODEL),
        log,
        *SMALL,
        "--data-parallel-size=2",
        "--api-server-count=1",
        f"--tensor-parallel-size={ranks}",
        '--additional-config={"sequence_parallel": {"min_tokens": 1}}',
    )
    try:
        server.wait_until_ready()
        with httpx.Client(base_url=server.url, timeout=300) as client:

            def complete(prompt: list[int]) -> list[int]:
                answer = client.post(
                    "/v1/completions",
                    json={
                        "model": str(zoo(MODEL)),
                        "prompt": prompt,
                        "max_tokens": 32,
                        "temperature": 0,
                        "ignore_eos": True,
                        "return_token_ids": True,
                    },
                )
                answer.raise_for_status()
                return answer.json()["choices"][0]["token_ids"]

            with ThreadPoolExecutor(16) as threads:
                generated = list(threads.map(complete, prompts[:32]))
            metrics = client.get("/metrics").text.splitlines()
        for prompt, tokens in zip(prompts, generated, strict=False):
            assert len(tokens) == 32
            assert reference(MODEL).first_difference(prompt, tokens) is None
        for dp_rank in ("0", "1"):
            served = [
                float(line.rsplit(" ", 1)[1])
                for line in metrics
                if line.startswith("vllm:request_success_total") and f'engine="{dp_rank}"' in line
            ]
            assert sum(served) > 0, f"DP rank {dp_rank} got no request"
        # DP ranks of a dense model are independent engines.
        assert ("run sequence parallel on 2" in log.read_text(errors="replace")) == (ranks == 2)
        server.interrupt()
        server.wait_for_end()
    finally:
        server.kill()


def test_a_stage_prepares_no_step_over_the_copies_of_the_one_before(exact_engine, reference):
    """A stage must not overwrite inputs that are still being copied; copies are late here."""
    model = "qwen3_moe_softmax_top2_of_8"
    generator = random.Random(2)
    lengths = (5, 80, 150, 31, 1, 64, 129, 17)
    prompts = [[generator.randrange(256) for _ in range(length)] for length in lengths]
    with exact_engine(
        *(model, prompts, 12),
        environment={"VNPU_SCHEDULE": "fuzz:52", "VNPU_RACES": "raise"},
        pipeline_parallel_size=2,
        distributed_executor_backend="mp",
        async_scheduling=False,
        max_num_batched_tokens=224,
        max_num_seqs=16,
    ) as engine:
        assert_generates(engine, reference(model), prompts, 12)
