"""vLLM's graph managers, with torch_npu's graphs."""

from collections import Counter
from collections.abc import Callable, Iterable
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
import torch_npu
from vllm.compilation.counter import compilation_counter
from vllm.config import CUDAGraphMode
from vllm.platforms import current_platform
from vllm.v1.worker.gpu.cudagraph_utils import (
    BatchExecutionDescriptor,
    CudaGraphManager,
    ModelCudaGraphManager,
)
from vllm.v1.worker.gpu.lora_utils import create_lora_capture_hook
from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.cudagraph_utils import (
    SpeculatorCudaGraphManager,
)

from vllm_davinci.core.device.torch_cuda_names import current_stream, stream
from vllm_davinci.core.graph.host_lengths import HostLengths
from vllm_davinci.core.graph.metadata import Group, distinct, parts, widths_of
from vllm_davinci.core.graph.ranks import least_of_all_ranks
from vllm_davinci.core.log import init_logger
from vllm_davinci.core.runner.model_state import NPUModelState

logger = init_logger(__name__)

CreateForward = Callable[..., Callable[[CUDAGraphMode], None]]


@dataclass(frozen=True)
class _Captured:
    """A graph of one size.

    replayed: event of its newest replay; no update may come before
    width:    blocks of each request that it reads; None if it does not depend on them
    """

    graph: Any
    groups: list[Group]
    replayed: Any
    width: int | None


class _OnNPU(CudaGraphManager):
    """Mix-in for vLLM's graph managers: captures and replays on torch_npu.

    Launches that depend on a step's lengths are updated before each replay, on an update stream.
    """

    graphs: dict[BatchExecutionDescriptor, list[_Captured]]  # ascending by width
    state: NPUModelState  # holds the metadata of the captured or replayed step
    replays: Counter[int]  # tokens of a graph -> number of replays
    _create_forward: CreateForward
    _update_stream: Any = None
    _updated: Any = None

    def capture(self, create_forward_fn: CreateForward, *args: Any, **kwargs: Any) -> None:
        """Stores the factory of a size's forward; `capture_size` calls it."""
        self._create_forward = create_forward_fn

    def capture_size(self, descriptor: BatchExecutionDescriptor) -> None:
        self._create_forward(descriptor, warmup=True)(CUDAGraphMode.NONE)
        if self._update_stream is None:
            self._update_stream, self._updated = torch_npu.npu.Stream(), torch_npu.npu.Event()
        widths = self._widths()
        self.graphs[descriptor] = [self._captured(descriptor, width) for width in widths]
        self._graphs_captured = True
        compilation_counter.num_cudagraph_captured += 1

    def _widths(self) -> tuple[int | None, ...]:
        """Widths of the newest step's graphs, ascending."""
        each = [widths_of(metadata) for _, _, metadata in distinct(self._metadata())]
        return max(each, key=len, default=(None,))

    def _captured(self, descriptor: BatchExecutionDescriptor, width: int | None) -> _Captured:
        forward = self._create_forward(descriptor, warmup=False)
        metadata = self._metadata()
        graph = torch_npu.npu.NPUGraph()
        groups = [Group(ubatch, layer, HostLengths()) for ubatch, layer, _ in distinct(metadata)]
        for group in groups:
            of_group = metadata[group.ubatch][group.layer_name]
            of_group.host_lengths = group.host_lengths
            if width is not None:
                of_group.width = width
        try:
            with torch_npu.npu.graph(graph, pool=self.pool):
                # Experts read the mode: the host must not wait for their row counts.
                forward(CUDAGraphMode.FULL)
        finally:
            for group in groups:
                metadata[group.ubatch][group.layer_name].host_lengths = None
        return _Captured(graph, groups, torch_npu.npu.Event(), width)

    def run_fullgraph(self, desc: BatchExecutionDescriptor) -> Any:
        """Replays a graph with the lengths of the newest step."""
        for captured in self._to_replay(desc):
            self._replay(captured)
        self.replays[desc.num_tokens] += 1

    def _to_replay(self, desc: BatchExecutionDescriptor) -> list[_Captured]:
        """The narrowest graph that holds the newest step."""
        graphs = self.graphs[desc]
        if len(graphs) == 1:
            return graphs
        steps = [each for _, _, each in distinct(self._metadata())]
        longest: int = max((getattr(each, "num_blocks", 0) for each in steps), default=0)
        return [next(each for each in graphs if each.width is None or each.width >= longest)]

    def _replay(self, captured: _Captured) -> None:
        metadata = self._metadata()
        main, updates = current_stream(), self._update_stream
        with stream(updates):
            updates.wait_event(captured.replayed)
            for group in captured.groups:
                of_group = metadata[group.ubatch][group.layer_name]
                if captured.width is not None:
                    of_group.width = captured.width
                lengths_q, lengths_kv = of_group.step_lengths()
                group.host_lengths.update(lengths_q, lengths_kv, updates)
            self._updated.record(updates)
        main.wait_event(self._updated)
        captured.graph.replay()
        captured.replayed.record(main)

    def _metadata(self) -> list[dict[str, Any]]:
        """Metadata of the newest step or drafter's pass, by layer; per ubatch if it is split."""
        return parts(self.state.newest_metadata)

    def forget(self, descriptor: BatchExecutionDescriptor) -> None:
        """Drops the graph of a size, if it exists.

        torch_npu refuses to capture into a pool that has memory but no graph.
        """
        self.graphs.pop(descriptor, None)
        if not self.graphs:
            self.pool = current_platform.graph_pool_handle()

    def clear(self) -> None:
        """Drops all graphs; steps are eager until others are captured."""
        for descriptor in list(self.graphs):
            self.forget(descriptor)
        self._graphs_captured = False

    def use_sizes(self) -> None:
        """Pads steps only to the configured sizes; without sizes, all steps are eager."""
        self.cudagraph_mode = self.compilation_config.cudagraph_mode
        self._candidates.clear()
        self._capture_descs.clear()
        self._init_candidates()


class NPUGraphManager(ModelCudaGraphManager, _OnNPU):
    """The graphs of a model's steps.

    on_trial: descriptor of the graph being tried, which all steps replay. By themselves dummy steps
    would select only one of a size's graphs with adapters
    """

    on_trial: BatchExecutionDescriptor | None = None

    @classmethod
    def taking_over(cls, manager: ModelCudaGraphManager, state: NPUModelState) -> "NPUGraphManager":
        """Converts the object to this class. state: holds the metadata of each step"""
        manager.__class__ = cls
        assert isinstance(manager, cls)
        manager.state, manager.replays = state, Counter()
        return manager

    def dispatch(self, *args: Any, **kwargs: Any) -> BatchExecutionDescriptor:
        return self.on_trial or super().dispatch(*args, **kwargs)

    def _to_replay(self, desc: BatchExecutionDescriptor) -> list[_Captured]:
        """All graphs of the trial size: a first replay allocates a graph's streams and events."""
        return self.graphs[desc] if self.on_trial else super()._to_replay(desc)

    def _metadata(self) -> list[dict[str, Any]]:
        return parts(self.state.as_run)

    def take_forward(self, runner: Any) -> None:
        """Stores the forwards that vLLM captures, for all sizes. runner: vLLM's"""
        ranks = runner.pcp_manager
        self.capture(
            runner.model,
            runner.model_state,
            runner.input_buffers if ranks is None else ranks.input_buffers,
            runner.intermediate_tensors,
            runner.block_tables,
            runner.attn_groups,
            runner.kv_cache_config,
            pcp_manager=ranks,
            has_lora=runner.lora_config is not None,
            use_aux_hidden_state_outputs=runner.use_aux_hidden_state_outputs,
            lora_capture_hook=create_lora_capture_hook(runner.lora_config, runner),
        )


class _CapturedWhenAsked(_OnNPU):
    """A manager that captures as soon as vLLM passes it the factory of forwards.

    failed: maps a number of tokens to the reason why some rank could not capture its graph
    """

    failed: dict[int, str]

    def capture(self, create_forward_fn: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        super().capture(create_forward_fn)
        for descriptor in self._capture_descs.get(CUDAGraphMode.FULL, []):
            failure = self._failure(descriptor)
            if not least_of_all_ranks(failure is None):
                self.forget(descriptor)
                self.failed[descriptor.num_tokens] = failure or "another rank could not"

    def _failure(self, descriptor: BatchExecutionDescriptor) -> str | None:
        try:
            self.capture_size(descriptor)
            torch.accelerator.synchronize()
        except RuntimeError as error:
            logger.exception(
                "The drafter's graph of %d tokens was not captured.", descriptor.num_tokens
            )
            return f"{type(error).__name__}: {error}"
        return None


class NPUDraftGraphManager(SpeculatorCudaGraphManager, _CapturedWhenAsked):
    """Graphs of one kind of drafter pass."""

    @classmethod
    def taking_over(
        cls, manager: SpeculatorCudaGraphManager, state: NPUModelState
    ) -> "NPUDraftGraphManager":
        """Gives the manager this class and its own sizes. state: see `NPUGraphManager`"""
        manager.__class__ = cls
        assert isinstance(manager, cls)
        manager.state, manager.replays, manager.failed = state, Counter(), {}
        manager.compilation_config = copy(manager.compilation_config)
        manager.compilation_config.cudagraph_mode = manager.cudagraph_mode
        manager.use_requests([])
        return manager

    def use_requests(self, counts: Iterable[int]) -> None:
        """Allows only these numbers of requests, to which passes are padded."""
        sizes = sorted(count * self.decode_query_len for count in counts)
        self.compilation_config.cudagraph_capture_sizes = sizes
        self.compilation_config.max_cudagraph_capture_size = max(sizes, default=0)
        self.use_sizes()
