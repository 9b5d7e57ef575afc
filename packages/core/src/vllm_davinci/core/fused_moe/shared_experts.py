"""Overlaps shared experts, on a side stream, with dispatch, routed experts and combine.

    side:           | gate_up    | act                    | down    |
    main:  | select | dispatch   | gate_up, act, down     | combine |

Shared experts' products overlap with communication, their vector work with routed experts'
products. In a ubatch they run on the main stream, because other ubatches overlap with
communication. If shared experts have an all-reduce of their own, it also overlaps with routed
experts.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import get_current_vllm_config
from vllm.distributed import get_tp_group
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.layers.fused_moe.runner.shared_experts import (
    SharedExperts,
    SharedExpertsOrder,
)

from vllm_davinci.core.components.protocols import Fork, StreamScheduler
from vllm_davinci.core.config.parsing import get_config
from vllm_davinci.core.config.side_streams import EXPERTS, side_stream
from vllm_davinci.core.layers.prefetch import prefetch
from vllm_davinci.core.log import init_logger

if TYPE_CHECKING:
    from vllm_davinci.core.fused_moe.layer import NPURoutedExperts

logger = init_logger(__name__)

SIDE = "shared expert"
STAGES = {"gate_up_proj", "act_fn", "down_proj"}  # children of a plain MLP


class OverlapHooks:
    """Hooks in a layer's forward, called on the main stream. This base class overlaps nothing."""

    def pre_dispatch(self) -> None:
        """Called at the selection of experts, or before rows are sent for it."""

    def post_dispatch(self) -> None:
        """Called when rows are at their experts."""

    def pre_combine(self) -> None:
        """Called when the experts' products are launched, before results are returned."""


NO_OVERLAP = OverlapHooks()


class SharedExpertsOverlap:
    """Overlaps a layer's shared experts with its routed experts, if vLLM does not run them.

    reduces_apart: all-reduce both results separately over the tensor-parallel ranks. Otherwise
                   vLLM's runner all-reduces their sum.
    """

    def __init__(
        self, scheduler: StreamScheduler, shared: SharedExperts, reduces_apart: bool = False
    ) -> None:
        self._scheduler = scheduler
        self._shared = shared
        self._layer: Any = shared._layer
        self.reduces_apart = reduces_apart
        self._has_stages: bool | None = None  # set in the run that measures memory

    @contextmanager
    def beside(self, x: torch.Tensor) -> Iterator[OverlapHooks]:
        """Runs the shared experts on `x` while the block runs the routed experts.

        The block calls the hooks. Afterwards the current stream waits for the shared experts too,
        and their result is where vLLM's runner reads it.
        """
        order = self._shared._determine_shared_experts_order(x)
        assert order is SharedExpertsOrder.MK_INTERNAL_OVERLAPPED, f"vLLM has run them: {order}"
        if self._scheduler.current_ubatch() is not None:
            result = self._begin_reduction(self._layer(x))
            try:
                yield NO_OVERLAP
            finally:
                shared_sum = result()
        else:
            if self._has_stages is None and get_forward_context().attn_metadata is None:
                self._has_stages = self._is_its_stages(x)
            with self._scheduler.fork(SIDE) as fork:
                hooks = (_Staged if self._has_stages else _Whole)(fork, self._layer, x)
                yield hooks
                shared_sum = hooks.result()
            shared_sum = self.reduced(shared_sum)
        self._shared._output[self._shared._output_idx] = shared_sum

    def reduced(self, part: torch.Tensor) -> torch.Tensor:
        """All-reduces in place, unless vLLM's runner does it."""
        communicator = self._communicator
        if communicator is None:
            return part
        total: torch.Tensor = communicator.all_reduce_in_place(part)
        return total

    @property
    def _communicator(self) -> Any:
        """Communicator of the tensor-parallel ranks; None if nothing is to be reduced."""
        group = get_tp_group()
        return group.device_communicator if self.reduces_apart and group.world_size > 1 else None

    def _begin_reduction(self, part: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Begins `reduced`; the returned function waits for it."""
        communicator = self._communicator
        if communicator is None:
            return lambda: part
        begun: Callable[[], torch.Tensor] = communicator.begin_all_reduce(part)
        return begun

    def decide_by_names(self) -> None:
        """Decides by names whether the layer consists of the stages: a dry-run has no results."""
        self._has_stages = self._names_stages

    @property
    def _names_stages(self) -> bool:
        return {name for name, _ in self._layer.named_children()} == STAGES

    def _is_its_stages(self, x: torch.Tensor) -> bool:
        """True if the stages and the layer give the same bits. The host waits: not for served
        steps."""
        if not self._names_stages:
            return False
        if torch.equal(_in_stages(self._layer, x), self._layer(x)):
            return True
        logger.warning_once(
            "Shared experts of type %s do more than the three stages: they run as a whole.",
            type(self._layer).__name__,
        )
        return False


class _Whole(OverlapHooks):
    """Runs the whole layer on the side stream, from the selection of routed experts on."""

    def __init__(self, fork: Fork, layer: Any, x: torch.Tensor) -> None:
        self._fork, self._layer, self._x = fork, layer, x
        self._result: torch.Tensor | None = None

    def pre_dispatch(self) -> None:
        self._result = self._fork.run(self._layer, self._x)

    def result(self) -> torch.Tensor:
        """[num_tokens, hidden_size], on the side stream."""
        assert self._result is not None, "the routed experts did not call pre_dispatch"
        return self._result


class _Staged(_Whole):
    """Runs each stage when the routed experts' stage that it overlaps with begins.

    Intermediate results stay on the side stream.
    """

    def pre_dispatch(self) -> None:
        def gate_up(x: torch.Tensor) -> None:
            self._between = self._layer.gate_up_proj(x)[0]

        self._fork.run(gate_up, self._x)

    def post_dispatch(self) -> None:
        def act() -> None:
            prefetch(self._layer.down_proj.weight)
            self._between = self._layer.act_fn(self._between)

        self._fork.run(act)

    def pre_combine(self) -> None:
        def down() -> torch.Tensor:
            result: torch.Tensor = self._layer.down_proj(self._between)[0]
            del self._between
            return result

        self._result = self._fork.run(down)


def _in_stages(layer: Any, x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = layer.down_proj(layer.act_fn(layer.gate_up_proj(x)[0]))[0]
    return result


def shared_experts_overlap(layer: "NPURoutedExperts") -> SharedExpertsOverlap | None:
    """The overlap; None if the option is off or shared experts have an input of their own."""
    vllm_config = get_current_vllm_config()
    scheduler = side_stream(vllm_config, EXPERTS)
    runner = vllm_config.compilation_config.static_forward_context.get(layer.layer_name)
    if scheduler is None or not isinstance(runner, MoERunner) or runner.shared_experts is None:
        return None
    if runner.routed_input_transform is not None:
        return None
    is_published = get_config(vllm_config).overlap == "published"
    reduces_apart = is_published and not layer.moe_config.is_sequence_parallel
    if reduces_apart:
        layer.moe_config.skip_final_all_reduce = True
    return SharedExpertsOverlap(scheduler, runner.shared_experts, reduces_apart)
