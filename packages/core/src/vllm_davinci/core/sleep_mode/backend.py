"""vLLM's sleep mode on memory with constant addresses."""

from vllm.device_allocator.sleep_mode_backend import SleepModeBackend, SleepModeBackendFactory

from vllm_davinci.core.config.registered_names import SLEEP_BACKEND
from vllm_davinci.core.device.sleeping_memory import WEIGHTS, Range, sleeping_memory


def register() -> None:
    """Registers the backend under its name. Idempotent."""
    if SLEEP_BACKEND not in SleepModeBackendFactory._registry:
        SleepModeBackendFactory.register_backend(
            SLEEP_BACKEND, __name__, NPUSleepModeBackend.__name__
        )


class NPUSleepModeBackend(SleepModeBackend):
    """Unmaps weights and KV cache. Both levels copy to the host what no checkpoint contains.

    parameters: address ranges that level 2 drops; the worker sets them before it sleeps
    """

    def __init__(self) -> None:
        super().__init__()
        self.parameters: list[Range] = []

    def suspend(self, level: int = 1) -> None:
        self._state = "SUSPENDED"
        sleeping_memory().sleep((WEIGHTS,), self.parameters if level == 2 else ())

    def resume(self, tags: list[str] | None = None) -> None:
        self._state = "RESUMING"
        sleeping_memory().wake_up(tags)
        self._state = "RUNNING"

    def discard(self, tags: tuple[str, ...]) -> None:
        sleeping_memory().discard(tags)
        self._state = "SUSPENDED"

    @classmethod
    def preserves_communicators(cls) -> bool:
        return True

    @classmethod
    def preserves_graphs_with_communicators(cls) -> bool:
        return True
