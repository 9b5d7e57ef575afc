"""The graphs of the V2 runner: vLLM's manager chooses among them, torch_npu's graphs hold them."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch_npu
from vllm.compilation.counter import compilation_counter
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.distributed.parallel_state import get_pp_group
from vllm.platforms import current_platform
from vllm.utils.gc_utils import freeze_gc_for_cudagraph_capture
from vllm.v1.worker.gpu.cudagraph_utils import (
    BatchExecutionDescriptor,
    CudaGraphManager,
    ModelCudaGraphManager,
)
from vllm.v1.worker.gpu.lora_utils import create_lora_capture_hook

from vllm_davinci.core.device.soc import GraphLimits
from vllm_davinci.core.fused_moe.layer_counts import layer_counts
from vllm_davinci.core.graph.capture import GraphCapture
from vllm_davinci.core.graph.host_lengths import HostLengths
from vllm_davinci.core.graph.wrapper import Group, distinct, parts
from vllm_davinci.core.runner.model_state import NPUModelState

CreateForward = Callable[..., Callable[[CUDAGraphMode], None]]


@dataclass(frozen=True)
class _Captured:
    """One size's graph. replayed: recorded after each replay; nothing of it changes before that."""

    graph: Any
    groups: list[Group]
    replayed: Any


class _OnNPU(CudaGraphManager):
    """vLLM's manager of graphs, between it and what it knows of a model's graphs.

    What follows on the step's lengths is updated before each replay, on a stream of its own.
    """

    graphs: dict[BatchExecutionDescriptor, _Captured]
    state: NPUModelState  # has the metadata of the step that is captured or replayed
    replays: Counter[int]  # tokens of a graph -> steps
    _create_forward: CreateForward
    _update_stream: Any = None
    _updated: Any = None

    def capture(self, create_forward_fn: CreateForward, *args: Any, **kwargs: Any) -> None:
        """Keeps what makes a size's forward; `capture_size` calls it."""
        self._create_forward = create_forward_fn

    def capture_size(self, descriptor: BatchExecutionDescriptor) -> None:
        self._create_forward(descriptor, warmup=True)(CUDAGraphMode.NONE)
        forward = self._create_forward(descriptor, warmup=False)
        if self._update_stream is None:
            self._update_stream, self._updated = torch_npu.npu.Stream(), torch_npu.npu.Event()
        metadata = parts(self.state.newest_metadata)
        graph = torch_npu.npu.NPUGraph()
        groups = [Group(ubatch, layer, HostLengths()) for ubatch, layer, _ in distinct(metadata)]
        for group in groups:
            metadata[group.ubatch][group.layer_name].host_lengths = group.host_lengths
        try:
            with torch_npu.npu.graph(graph, pool=self.pool):
                forward(CUDAGraphMode.NONE)
        finally:
            for group in groups:
                metadata[group.ubatch][group.layer_name].host_lengths = None
        self.graphs[descriptor] = _Captured(graph, groups, torch_npu.npu.Event())
        self._graphs_captured = True
        compilation_counter.num_cudagraph_captured += 1

    def run_fullgraph(self, desc: BatchExecutionDescriptor) -> Any:
        """Replays a graph with the lengths of the newest step."""
        captured, metadata = self.graphs[desc], parts(self.state.newest_metadata)
        stream, updates = torch_npu.npu.current_stream(), self._update_stream
        with torch_npu.npu.stream(updates):
            updates.wait_event(captured.replayed)
            for group in captured.groups:
                lengths_q, lengths_kv = metadata[group.ubatch][group.layer_name].step_lengths()
                group.host_lengths.update(lengths_q, lengths_kv, updates)
            self._updated.record(updates)
        stream.wait_event(self._updated)
        captured.graph.replay()
        captured.replayed.record(stream)
        self.replays[desc.num_tokens] += 1

    def forget(self, descriptor: BatchExecutionDescriptor) -> None:
        """Gives up the graph of a size, if there is one.

        torch_npu refuses to capture into a pool whose graphs have all gone while it has memory.
        """
        self.graphs.pop(descriptor, None)
        if not self.graphs:
            self.pool = current_platform.graph_pool_handle()

    def use_sizes(self, sizes: list[int]) -> None:
        """Pads steps to these sizes alone; without any, all are eager."""
        if not sizes:
            self.cudagraph_mode = CUDAGraphMode.NONE
        self._candidates.clear()
        self._capture_descs.clear()
        self._init_candidates()


class NPUGraphManager(ModelCudaGraphManager, _OnNPU):
    """The graphs of a model's steps."""

    @classmethod
    def taking_over(cls, manager: ModelCudaGraphManager, state: NPUModelState) -> "NPUGraphManager":
        """The same object under this class. state: has the metadata of each step"""
        manager.__class__ = cls
        assert isinstance(manager, cls)
        manager.state, manager.replays = state, Counter()
        return manager

    def take_forward(self, runner: Any) -> None:
        """Takes from vLLM what a graph of each size holds. runner: vLLM's"""
        self.capture(
            runner.model,
            runner.model_state,
            runner.input_buffers,
            runner.intermediate_tensors,
            runner.block_tables,
            runner.attn_groups,
            runner.kv_cache_config,
            has_lora=runner.lora_config is not None,
            use_aux_hidden_state_outputs=runner.use_aux_hidden_state_outputs,
            lora_capture_hook=create_lora_capture_hook(runner.lora_config, runner),
        )


class StepGraphs(GraphCapture):
    """Which graphs of steps there are, what they take, how often they ran.

    runner: makes the manager of graphs anew for each KV cache
    """

    def __init__(self, runner: Any, vllm_config: VllmConfig, limits: GraphLimits) -> None:
        self._runner = runner
        self._vllm_config = vllm_config
        self._compilation = vllm_config.compilation_config
        self._limits = limits
        self._memory = self.plan = self.of_drafter = None
        self._workspace_bytes = self.captured_bytes = 0

    @property
    def _manager(self) -> NPUGraphManager | None:
        runner: Any = self._runner
        manager: NPUGraphManager | None = runner.cudagraph_manager
        return manager

    def capture_steps(self) -> int:
        """Captures every size. Returns the bytes of device memory it took."""
        runner: Any = self._runner
        manager = self._manager
        if manager is None or not manager.needs_capture():
            return 0
        self._query_len = manager.decode_query_len
        is_first = get_pp_group().is_first_rank
        layers = layer_counts(runner.get_model(), runner.kv_cache_config, is_first)
        with runner.maybe_setup_dummy_loras(runner.lora_config):
            manager.take_forward(runner)
            return self.capture(layers, lambda size: 1)

    @contextmanager
    def _own_pool(self) -> Iterator[None]:
        manager = self._manager
        assert manager is not None
        pool, manager.pool = manager.pool, current_platform.graph_pool_handle()
        runner: Any = self._runner
        try:
            with (
                freeze_gc_for_cudagraph_capture(),
                runner.maybe_setup_dummy_loras(runner.lora_config),
            ):
                manager.take_forward(runner)
                yield
        finally:
            manager.graphs.clear()
            manager.pool = pool

    def _descriptors(self) -> Iterable[tuple[CUDAGraphMode, list[Any]]]:
        manager = self._manager
        asked = {} if manager is None else manager._capture_descs
        return [(CUDAGraphMode.FULL, list(asked.get(CUDAGraphMode.FULL, [])))]

    def _count_from_here(self) -> None:
        if self._manager is not None:
            self._manager.replays.clear()

    def use_sizes(self, sizes: list[int]) -> None:
        compilation = self._compilation
        compilation.cudagraph_capture_sizes = sorted(sizes)
        compilation.max_cudagraph_capture_size = max(sizes, default=0)
        if not sizes:
            compilation.cudagraph_mode = CUDAGraphMode.NONE
        assert self._manager is not None
        self._manager.use_sizes(sizes)

    def _capture_size(self, descriptor: Any, mode: CUDAGraphMode) -> None:
        assert self._manager is not None
        self._manager.capture_size(descriptor)

    def _replay_size(self, descriptor: Any, mode: CUDAGraphMode) -> None:
        self._runner._dummy_run(descriptor.num_tokens, uniform_decode=True, skip_eplb=True)

    def _forget(self, descriptor: Any) -> None:
        assert self._manager is not None
        self._manager.forget(descriptor)

    def replays(self) -> dict[int, int]:
        return {} if self._manager is None else dict(self._manager.replays)

    def destroy(self) -> None:
        if self._manager is not None and self._manager.graphs:
            torch_npu.npu.synchronize()
            self._manager.graphs.clear()
