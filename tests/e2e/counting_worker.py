"""Workers that count what they launch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from vllm.distributed import get_tp_group

from vllm_davinci.core.distributed.communicator import NPUCommunicator
from vllm_davinci.core.ops import compiled
from vllm_davinci.vnpu import _C


class CountingWorker:
    """Mixed into the worker by vLLM's option worker_extension_cls."""

    def count_collectives(self) -> None:
        """From now on, those between the ranks of a replica."""
        communicator = get_tp_group().device_communicator
        assert isinstance(communicator, NPUCommunicator)
        self.counted: Counter[str] = Counter()
        self._host_counts = _C.host_counts()
        launch = communicator._collective

        def counting(name: str, *arguments: Any) -> None:
            self.counted[name] += 1
            launch(name, *arguments)

        hook: Callable[..., None] = counting
        communicator._collective = hook  # of this object alone

    def collectives(self) -> dict[str, int]:
        """How often each was launched."""
        return dict(self.counted)

    def host_waits(self) -> dict[str, int]:
        """How often the host waited for the device since then, and copied from it."""
        now = _C.host_counts()
        return {name: now[name] - count for name, count in self._host_counts.items()}


class CallCountingWorker:
    """Mixed into the worker by vLLM's option worker_extension_cls.

    Calls that run on a side stream too count as "NAME beside".
    """

    def count_compiled_calls(self) -> None:
        """From now on, those of layers to compiled operators."""
        self.called: Counter[str] = Counter()
        for name, operator in compiled._operators.items():
            compiled._operators[name] = self._counting(name, operator)

    def _counting(self, name: str, operator: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*arguments: Any) -> Any:
            is_beside = any(isinstance(argument, torch.Stream) for argument in arguments)
            self.called[name + " beside" * is_beside] += 1
            return operator(*arguments)

        return counting

    def compiled_calls(self) -> dict[str, int]:
        """How often each was called."""
        return dict(self.called)
