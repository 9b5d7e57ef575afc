"""Times one engine that sleeps, wakes up and receives new weights."""

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from serving.decode_engine import decode_engine, decode_requests
from vllm_davinci.core.device.sleeping_memory import sleeping_memory


def measure(options: dict[str, Any]) -> dict[str, Any]:
    seconds: dict[str, list[float]] = defaultdict(list)

    def timed(name: str, call: Callable[[], Any]) -> Any:
        begin = time.perf_counter()
        answer = call()
        seconds[name].append(time.perf_counter() - begin)
        return answer

    llm = timed("start", lambda: decode_engine(options["model"], 8, enable_sleep_mode=True))
    prompts, sampling = decode_requests(8, 4)

    def tokens() -> list[list[int]]:
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    expected = tokens()
    awake = sum(sleeping_memory().mapped_bytes().values())
    asleep = 0
    for _ in range(options["rounds"]):
        timed("sleep, level 1", lambda: llm.sleep(level=1))
        asleep = max(asleep, sum(sleeping_memory().mapped_bytes().values()))
        timed("waking, level 1", llm.wake_up)
        assert tokens() == expected
        timed("sleep, level 2", lambda: llm.sleep(level=2))
        asleep = max(asleep, sum(sleeping_memory().mapped_bytes().values()))

        def with_weights() -> None:
            llm.wake_up()
            llm.collective_rpc("reload_weights")

        timed("waking, level 2, with its weights from the checkpoint", with_weights)
        assert tokens() == expected
    return {"seconds": seconds, "bytes_awake": awake, "bytes_asleep": asleep}
