"""Data-parallel ranks that step together, each an engine in its own process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from vllm_davinci_testing.engines.engine_process import EngineProcess
from vllm_davinci_testing.processes.ranks import free_port

T = TypeVar("T")


class DPEngines:
    """Several engines as one: every call goes to all of them at once.

    start: makes an engine, as the fixture start_engine does; `engine`: its options
    count: DP ranks; one is an ordinary engine
    """

    def __init__(
        self,
        start: Callable[..., EngineProcess],
        model: Path,
        count: int = 1,
        environment: Mapping[str, str] | None = None,
        **engine: Any,
    ) -> None:
        port = free_port()

        def start_one(rank: int) -> EngineProcess:
            place = {
                "VLLM_DP_RANK": str(rank),
                "VLLM_DP_RANK_LOCAL": str(rank),
                "VLLM_DP_SIZE": str(count),
                "VLLM_DP_MASTER_IP": "127.0.0.1",
                "VLLM_DP_MASTER_PORT": str(port),
            }
            return start(
                model, environment={**(environment or {}), **(place if count > 1 else {})}, **engine
            )

        self._threads = ThreadPoolExecutor(count)
        self.engines = list(self._threads.map(start_one, range(count)))

    def generate(
        self, prompts: list[list[int]], *arguments: Any, adapters: list[Any] | None = None
    ) -> list[Any]:
        """Returns outputs in the order of the prompts; DP rank r gets prompts r, r + count, ...

        adapters: a LoRARequest or None for each prompt
        """
        count = len(self.engines)
        found = self._on_all(
            lambda rank, engine: engine.generate(
                [{"prompt_token_ids": prompt} for prompt in prompts[rank::count]],
                *arguments,
                **({} if adapters is None else {"lora_request": adapters[rank::count]}),
            )
        )
        outputs: list[Any] = [None] * len(prompts)
        for rank, of_dp_rank in enumerate(found):
            outputs[rank::count] = of_dp_rank
        return outputs

    def on_workers(self, method: str, *arguments: Any) -> list[Any]:
        """Calls a worker method; returns its results by DP rank and rank."""
        found = self._on_all(lambda _, engine: engine.on_workers(method, *arguments))
        return [answer for answers in found for answer in answers]

    def log_text(self) -> str:
        return "\n".join(engine.log_text() for engine in self.engines)

    def _on_all(self, work: Callable[[int, EngineProcess], T]) -> list[T]:
        return list(self._threads.map(work, range(len(self.engines)), self.engines))

    def __enter__(self) -> DPEngines:
        return self

    def __exit__(self, *exception: object) -> None:
        # A DP rank ends only together with the others.
        self._on_all(lambda _, engine: engine.close())
        self._threads.shutdown()
