"""Makes collectives in mixture-of-experts layers switching points."""

from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.runner.moe_runner import (
    MoERunner,
    _moe_forward,
    _moe_forward_shared,
)

from vllm_davinci.core.components.protocols import StreamScheduler
from vllm_davinci.core.fused_moe.own_choice import ZeroExperts


class SlotPerUBatch:
    """Holds one value per ubatch; replaces a list that vLLM indexes by its own ubatch."""

    def __init__(self, scheduler: StreamScheduler) -> None:
        self._current_ubatch = scheduler.current_ubatch
        self._values: dict[int | None, Any] = {}

    def __getitem__(self, index: int) -> Any:
        return self._values.get(self._current_ubatch())

    def __setitem__(self, index: int, value: Any) -> None:
        self._values[self._current_ubatch()] = value

    def clear(self) -> None:
        """Removes the values of an interrupted step."""
        self._values.clear()


def let_experts_switch(model: torch.nn.Module, scheduler: StreamScheduler) -> list[SlotPerUBatch]:
    """Lets ubatches switch inside the model's mixture-of-experts layers.

    A greenlet cannot switch inside a torch operator that is implemented in Python, so the layers
    are entered by the plain functions that vLLM uses on hosts without an accelerator. The shared
    experts' result and the zero experts' share, which a layer stores between two of its stages, get
    one slot per ubatch.
    Changes only these instances. Returns the slots, to be cleared after an error.
    """
    slots = []
    for module in model.modules():
        if not isinstance(module, MoERunner):
            continue
        shared = module.shared_experts
        module._forward_entry = _moe_forward if shared is None else _moe_forward_shared
        if shared is not None:
            shared._output = SlotPerUBatch(scheduler)
            slots.append(shared._output)
        if isinstance(module.router, ZeroExperts):
            module.router.shares = SlotPerUBatch(scheduler)
            slots.append(module.router.shares)
    return slots
