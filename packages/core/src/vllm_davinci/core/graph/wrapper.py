"""The model of a step: captured once per size, then replayed."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch_npu
from vllm.compilation.counter import compilation_counter
from vllm.compilation.cuda_graph import CUDAGraphOptions, CUDAGraphWrapper
from vllm.compilation.monitor import validate_cudagraph_capturing_enabled
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.forward_context import (
    BatchDescriptor,
    get_forward_context,
    is_forward_context_available,
)
from vllm.platforms import current_platform

from vllm_davinci.core.errors import DeviceError
from vllm_davinci.core.graph.host_lengths import HostLengths, Lengths


class CapturableMetadata(Protocol):
    """Attention metadata of a step that a graph can hold.

    host_lengths: records launches with lengths on the host during a capture; else None
    """

    host_lengths: HostLengths | None

    def step_lengths(self) -> tuple[Lengths, Lengths]:
        """Cumulative query lengths and total tokens, both per request of the step."""

    def step_tensors(self) -> tuple[torch.Tensor, ...]:
        """The tensors that the device reads."""


class Group(NamedTuple):
    """The layers of a graph that share metadata, named by one. ubatch: 0 in a whole step."""

    ubatch: int
    layer_name: str
    host_lengths: HostLengths


@dataclass(frozen=True)
class _Captured:
    """One size's graph.

    inputs:   address and shape of every tensor that a replay reads again, by name
    replayed: event recorded after each replay: before it, the graph must not be changed
    """

    graph: Any
    output: Any
    groups: list[Group]
    inputs: dict[str, tuple[int, torch.Size]]
    replayed: Any


class NPUGraphWrapper(CUDAGraphWrapper):
    """vLLM's wrapper around a model, on torch_npu's graphs.

    A step whose forward context requests a full graph is captured when its batch descriptor first
    occurs, which vLLM allows only in its capture phase. Later it is replayed: one launch, after the
    updates of its attention's lengths. Every other step runs the model itself.

    forward: runs the model, as ubatches if the step is split; default: the model itself
    replays: steps replayed so far, by tokens of their graph
    """

    def __init__(
        self,
        runnable: Any,
        vllm_config: VllmConfig,
        runtime_mode: CUDAGraphMode = CUDAGraphMode.FULL,
        cudagraph_options: CUDAGraphOptions | None = None,
        forward: Callable[..., Any] | None = None,
    ) -> None:
        super().__init__(runnable, vllm_config, runtime_mode, cudagraph_options)
        self._forward = runnable if forward is None else forward
        self.replays: Counter[int] = Counter()
        self._captured: dict[BatchDescriptor, _Captured] = {}
        self._update_stream: Any = None
        self._updated: Any = None

    def forget(self, descriptor: BatchDescriptor) -> None:
        """Drops the graph of a size, if it exists."""
        self._captured.pop(descriptor, None)
        self._leave_unused_pool()

    def clear_graphs(self) -> None:
        super().clear_graphs()
        self._captured.clear()
        self._leave_unused_pool()

    def _leave_unused_pool(self) -> None:
        """Switches to a new pool if this one has no graph left.

        torch_npu refuses to capture into a pool that has no graph but still has memory, which with
        expandable segments it keeps longer.
        """
        if not self._captured:
            self.graph_pool = current_platform.graph_pool_handle()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not is_forward_context_available():
            return self.runnable(*args, **kwargs)
        context = get_forward_context()
        if context.cudagraph_runtime_mode != self.runtime_mode:
            return self._forward(*args, **kwargs)
        descriptor = context.batch_descriptor
        assert descriptor is not None
        metadata = parts(context.attn_metadata)
        inputs = _inputs(args, kwargs, metadata)
        captured = self._captured.get(descriptor)
        if captured is None:
            validate_cudagraph_capturing_enabled()
            captured = self._capture(args, kwargs, metadata, inputs)
            self._captured[descriptor] = captured
            compilation_counter.num_cudagraph_captured += 1
        else:
            self._replay(captured, metadata, inputs, descriptor)
        return captured.output

    def _capture(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        metadata: list[dict[str, Any]],
        inputs: dict[str, tuple[int, torch.Size]],
    ) -> _Captured:
        if self._update_stream is None:
            self._update_stream, self._updated = torch_npu.npu.Stream(), torch_npu.npu.Event()
        graph = torch_npu.npu.NPUGraph()
        groups = [
            Group(ubatch, layer_name, HostLengths()) for ubatch, layer_name, _ in distinct(metadata)
        ]
        for group in groups:
            metadata[group.ubatch][group.layer_name].host_lengths = group.host_lengths
        try:
            with torch_npu.npu.graph(graph, pool=self.graph_pool):
                output = self._forward(*args, **kwargs)
        finally:
            for group in groups:
                metadata[group.ubatch][group.layer_name].host_lengths = None
        replayed = torch_npu.npu.Event()
        return _Captured(graph, output, groups, inputs, replayed)

    def _replay(
        self,
        captured: _Captured,
        metadata: list[dict[str, Any]],
        inputs: dict[str, tuple[int, torch.Size]],
        descriptor: BatchDescriptor,
    ) -> None:
        if inputs != captured.inputs:
            raise DeviceError(
                f"The graph of {descriptor} reads {_differences(captured.inputs, inputs)}: its "
                "results would be wrong. Start with --enforce-eager, and please report this."
            )
        stream = torch_npu.npu.current_stream()
        updates = self._update_stream
        with torch_npu.npu.stream(updates):
            updates.wait_event(captured.replayed)
            for group in captured.groups:
                lengths_q, lengths_kv = metadata[group.ubatch][group.layer_name].step_lengths()
                group.host_lengths.update(lengths_q, lengths_kv, updates)
            self._updated.record(updates)
        stream.wait_event(self._updated)
        captured.graph.replay()
        captured.replayed.record(stream)
        self.replays[descriptor.num_tokens] += 1


def parts(metadata: Any) -> list[dict[str, Any]]:
    """Metadata by layer, per ubatch."""
    return metadata if isinstance(metadata, list) else [metadata or {}]


def distinct(metadata: list[dict[str, Any]]) -> Iterable[tuple[int, str, CapturableMetadata]]:
    """Yields each distinct metadata of a step: its ubatch, its first layer, and itself."""
    for ubatch, of_part in enumerate(metadata):
        first_layers = {id(each): name for name, each in reversed(of_part.items())}
        for name in first_layers.values():
            yield ubatch, name, of_part[name]


def _inputs(
    args: tuple[Any, ...], kwargs: dict[str, Any], metadata: list[dict[str, Any]]
) -> dict[str, tuple[int, torch.Size]]:
    """Address and shape of each tensor that the device reads in a step, by name."""
    tensors = {str(position): each for position, each in enumerate(args)} | kwargs
    received = tensors.get("intermediate_tensors")
    if received is not None:
        tensors |= received.tensors
    found = {
        name: (each.data_ptr(), each.shape)
        for name, each in tensors.items()
        if isinstance(each, torch.Tensor)
    }
    for ubatch, layer_name, each in distinct(metadata):
        for number, tensor in enumerate(each.step_tensors()):
            found[f"{layer_name}/{ubatch}/{number}"] = tensor.data_ptr(), tensor.shape
    return found


def _differences(
    captured: dict[str, tuple[int, torch.Size]], now: dict[str, tuple[int, torch.Size]]
) -> str:
    changed = [
        f"{name} of {tuple(captured[name][1]) if name in captured else 'nothing'} and is given "
        f"{tuple(now[name][1]) if name in now else 'nothing'}"
        + (" elsewhere" if name in captured and name in now else "")
        for name in sorted(captured.keys() | now.keys())
        if captured.get(name) != now.get(name)
    ]
    return "; ".join(changed)
