"""Engines and their proxy are killed at random: no token is wrong, and every request ends."""

import random
import threading
from collections import Counter
from pathlib import Path

import httpx
import pytest
from vllm import SamplingParams

from vllm_davinci_testing.engines.disaggregation_proxy import ProxiedPair
from vllm_davinci_testing.engines.fixture_types import StartEngine
from vllm_davinci_testing.engines.server_process import SMALL, START_LIMIT_S
from vllm_davinci_testing.processes.waiting import becomes_true

pytest.importorskip("nixl", reason="disaggregation needs nixl: pip install 'vllm-davinci[pd]'")

NUM_REQUESTS = 1000
NUM_TOKENS = 8
CLIENTS = 4
DISTURBANCES = ("kill prefills", "kill decodes", "kill the proxy", "stand still")
OPTIONS = (*SMALL, "--max-num-batched-tokens=200", "--max-model-len=768")


def all_prompts() -> list[list[int]]:
    """Prompts of one to four blocks; several share a prefix."""
    chosen = random.Random(7)
    begin = [chosen.randrange(3, 99) for _ in range(200)]
    lengths = [chosen.randrange(20, 400) for _ in range(16)]
    return [
        [*begin[: n % 3 * 80], *(chosen.randrange(3, 99) for _ in range(length))]
        for n, length in enumerate(lengths)
    ]


class Load:
    """Clients that send requests one after another and count how each ended."""

    def __init__(
        self, pair: ProxiedPair, prompts: list[list[int]], expected: list[list[int]]
    ) -> None:
        self._pair, self._prompts, self._expected = pair, prompts, expected
        self.ended: Counter[str] = Counter()
        self._lock = threading.Lock()

    def run(self, num_requests: int, seed: int) -> None:
        chosen = random.Random(seed)
        for _ in range(num_requests):
            number = chosen.randrange(len(self._prompts))
            outcome = self._ask(number)
            with self._lock:
                self.ended[outcome] += 1
            if outcome == "told":
                # Clients retry after a pause.
                becomes_true(self._pair.is_ready, START_LIMIT_S)

    def _ask(self, number: int) -> str:
        try:
            answer = self._pair.complete(self._prompts[number], NUM_TOKENS)
        except (httpx.TransportError, httpx.HTTPStatusError):
            return "told"
        return "right" if answer.tokens == self._expected[number] else "wrong"


def disturb(pair: ProxiedPair, ended: threading.Event) -> list[str]:
    """Kills and restarts an engine or the proxy at intervals, or suspends one."""
    chosen = random.Random(5)
    done: list[str] = []
    while not ended.wait(chosen.uniform(2, 8)):
        done.append(chosen.choice(DISTURBANCES))
        if done[-1] == "kill prefills":
            pair.prefills.kill()
            pair.restart_prefills()
        elif done[-1] == "kill decodes":
            pair.decodes.kill()
            pair.restart_decodes()
        elif done[-1] == "kill the proxy":
            pair.kill_proxy()
            ended.wait(chosen.uniform(0, 2))
            pair.start_proxy()
        else:
            pair.stop_prefills()
            ended.wait(chosen.uniform(1, 6))
            pair.continue_prefills()
    return done


@pytest.mark.thorough
@pytest.mark.timeout(3600)
def test_no_request_gets_wrong_tokens(tiny_llama: Path, start_engine: StartEngine, tmp_path: Path):
    prompts = all_prompts()
    sampling = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with start_engine(tiny_llama, max_model_len=768, max_num_batched_tokens=200) as engine:
        outputs = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling)
    expected = [list(output.outputs[0].token_ids) for output in outputs]
    pair = ProxiedPair(
        tiny_llama,
        tmp_path,
        *OPTIONS,
        of_prefills=("--num-gpu-blocks-override=24",),
        extra={"kv_lease_duration": 6, "transfer_timeout": 3},
        environment={"UCX_TLS": "tcp"},  # sends as between hosts
    )
    load, ended, done = Load(pair, prompts, expected), threading.Event(), []
    clients = [
        threading.Thread(target=load.run, args=(NUM_REQUESTS // CLIENTS, n), daemon=True)
        for n in range(CLIENTS)
    ]
    killer = threading.Thread(target=lambda: done.extend(disturb(pair, ended)), daemon=True)
    try:
        pair.wait_until_ready()
        for thread in (*clients, killer):
            thread.start()
        for thread in clients:
            thread.join()
        ended.set()
        killer.join()
    finally:
        ended.set()
        pair.close()
    print(dict(load.ended), Counter(done))
    assert load.ended["wrong"] == 0
    assert load.ended.total() == NUM_REQUESTS
    assert load.ended["right"] > NUM_REQUESTS // 10
    assert done
