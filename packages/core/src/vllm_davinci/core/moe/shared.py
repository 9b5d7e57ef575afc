"""Shared experts on a stream of their own, beside routing, dispatch, experts and combine."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.layers.fused_moe.runner.shared_experts import (
    SharedExperts,
    SharedExpertsOrder,
)

from vllm_davinci.core.side_streams import experts_scheduler
from vllm_davinci.core.stream_scheduler import StreamScheduler

if TYPE_CHECKING:
    from vllm_davinci.core.moe.layer import NPURoutedExperts

SIDE = "shared expert"


class SharedBeside:
    """One layer's shared experts, where vLLM leaves it to the routed experts to run them."""

    def __init__(self, scheduler: StreamScheduler, shared: SharedExperts) -> None:
        self._scheduler = scheduler
        self._shared = shared

    def __call__(self, x: torch.Tensor, routed: Callable[[], torch.Tensor]) -> torch.Tensor:
        """What `routed` returns; the current stream ends behind the shared experts of x too."""
        with self._scheduler.fork(SIDE) as fork:
            fork.run(self._compute, x)
            return routed()

    def _compute(self, x: torch.Tensor) -> torch.Tensor | None:
        """Puts the result where vLLM's runner takes it from. Returns it."""
        self._shared(x, SharedExpertsOrder.MK_INTERNAL_OVERLAPPED)
        return self._shared._output[self._shared._output_idx]


def shared_beside(layer: "NPURoutedExperts") -> SharedBeside | None:
    """None when the option is off, and for a layer whose shared experts have another input."""
    vllm_config = get_current_vllm_config()
    scheduler = experts_scheduler(vllm_config)
    runner = vllm_config.compilation_config.static_forward_context.get(layer.layer_name)
    if scheduler is None or not isinstance(runner, MoERunner) or runner.shared_experts is None:
        return None
    if runner.routed_input_transform is not None:
        return None
    return SharedBeside(scheduler, runner.shared_experts)
