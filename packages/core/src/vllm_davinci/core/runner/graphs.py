"""Graphs of the V2 runner: vLLM's manager selects them, torch_npu's graphs hold them."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
import torch_npu
from vllm.compilation.counter import compilation_counter
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.distributed.parallel_state import get_pp_group
from vllm.platforms import current_platform
from vllm.v1.worker.gpu.cudagraph_utils import (
    BatchExecutionDescriptor,
    CudaGraphManager,
    ModelCudaGraphManager,
)
from vllm.v1.worker.gpu.lora_utils import create_lora_capture_hook
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator
from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.cudagraph_utils import (
    SpeculatorCudaGraphManager,
)

from vllm_davinci.core.device.soc import GraphLimits
from vllm_davinci.core.fused_moe.layer_counts import layer_counts
from vllm_davinci.core.graph.capture import GraphCapture, without_garbage_collection
from vllm_davinci.core.graph.host_lengths import HostLengths
from vllm_davinci.core.graph.ranks import least_of_all_ranks
from vllm_davinci.core.graph.wrapper import Group, distinct, parts
from vllm_davinci.core.log import init_logger
from vllm_davinci.core.runner.model_state import NPUModelState

logger = init_logger(__name__)

CreateForward = Callable[..., Callable[[CUDAGraphMode], None]]


@dataclass(frozen=True)
class _Captured:
    """One size's graph. replayed: recorded after each replay; before it nothing may change."""

    graph: Any
    groups: list[Group]
    replayed: Any


class _OnNPU(CudaGraphManager):
    """Mix-in for vLLM's graph managers: captures and replays on torch_npu.

    Launches that depend on the step's lengths are updated before each replay, on a stream of its
    own.
    """

    graphs: dict[BatchExecutionDescriptor, _Captured]
    state: NPUModelState  # holds the metadata of the captured or replayed step
    replays: Counter[int]  # tokens of a graph -> steps
    _create_forward: CreateForward
    _update_stream: Any = None
    _updated: Any = None

    def capture(self, create_forward_fn: CreateForward, *args: Any, **kwargs: Any) -> None:
        """Stores the factory of a size's forward; `capture_size` calls it."""
        self._create_forward = create_forward_fn

    def capture_size(self, descriptor: BatchExecutionDescriptor) -> None:
        self._create_forward(descriptor, warmup=True)(CUDAGraphMode.NONE)
        forward = self._create_forward(descriptor, warmup=False)
        if self._update_stream is None:
            self._update_stream, self._updated = torch_npu.npu.Stream(), torch_npu.npu.Event()
        metadata = self._metadata()
        graph = torch_npu.npu.NPUGraph()
        groups = [Group(ubatch, layer, HostLengths()) for ubatch, layer, _ in distinct(metadata)]
        for group in groups:
            metadata[group.ubatch][group.layer_name].host_lengths = group.host_lengths
        try:
            with torch_npu.npu.graph(graph, pool=self.pool):
                # Experts read the mode: the host must not wait for their row counts.
                forward(CUDAGraphMode.FULL)
        finally:
            for group in groups:
                metadata[group.ubatch][group.layer_name].host_lengths = None
        self.graphs[descriptor] = _Captured(graph, groups, torch_npu.npu.Event())
        self._graphs_captured = True
        compilation_counter.num_cudagraph_captured += 1

    def run_fullgraph(self, desc: BatchExecutionDescriptor) -> Any:
        """Replays a graph with the lengths of the newest step."""
        captured, metadata = self.graphs[desc], self._metadata()
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

    def _metadata(self) -> list[dict[str, Any]]:
        """Metadata of the newest step or drafter's pass, by layer; per ubatch if it is split."""
        return parts(self.state.newest_metadata)

    def forget(self, descriptor: BatchExecutionDescriptor) -> None:
        """Drops the graph of a size, if it exists.

        torch_npu refuses to capture into a pool that has memory but no graph left.
        """
        self.graphs.pop(descriptor, None)
        if not self.graphs:
            self.pool = current_platform.graph_pool_handle()

    def clear(self) -> None:
        """Drops all graphs."""
        for descriptor in list(self.graphs):
            self.forget(descriptor)

    def use_sizes(self) -> None:
        """Pads steps only to the configured sizes; without sizes, all steps are eager."""
        self.cudagraph_mode = self.compilation_config.cudagraph_mode
        self._candidates.clear()
        self._capture_descs.clear()
        self._init_candidates()


class NPUGraphManager(ModelCudaGraphManager, _OnNPU):
    """The graphs of a model's steps.

    on_trial: what is captured, whose graph all steps are to replay: with adapters a size has
              several, of which a dummy step would come to one
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

    def _metadata(self) -> list[dict[str, Any]]:
        return parts(self.state.as_run)

    def take_forward(self, runner: Any) -> None:
        """Gets the content of each size's graph from vLLM. runner: vLLM's"""
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


class _CapturedWhenAsked(_OnNPU):
    """A manager that captures as soon as it gets the factory of forwards.

    failed: tokens -> the reason why some rank could not capture a graph
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
        """Converts the object to this class, with its own sizes. state: see `NPUGraphManager`"""
        manager.__class__ = cls
        assert isinstance(manager, cls)
        manager.state, manager.replays, manager.failed = state, Counter(), {}
        manager.compilation_config = copy(manager.compilation_config)
        manager.compilation_config.cudagraph_mode = manager.cudagraph_mode
        manager.use_requests([])
        return manager

    def use_requests(self, counts: Iterable[int]) -> None:
        """Pads passes only to these numbers of requests."""
        sizes = sorted(count * self.decode_query_len for count in counts)
        self.compilation_config.cudagraph_capture_sizes = sizes
        self.compilation_config.max_cudagraph_capture_size = max(sizes, default=0)
        self.use_sizes()


class DraftPassGraphs:
    """Graphs of a drafter model, by kind of pass.

    managers:  of the kinds of passes with graphs
    drafter:   captures them
    query_len: tokens per request in the target's step
    run_step:  tokens -> runs a decode step without requests, and its drafter
    """

    def __init__(
        self,
        managers: list[NPUDraftGraphManager],
        drafter: BaseSpeculator,
        query_len: int,
        run_step: Callable[[int], Any],
    ) -> None:
        self._managers = managers
        self._drafter = drafter
        self._query_len = query_len
        self._run_step = run_step

    @property
    def graphs_per_size(self) -> int:
        return len(self._managers)

    def capture(self, sizes: list[int]) -> dict[int, str]:
        self._use(sizes)
        self._drafter.capture()
        failures = {count: self._failure(count) for count in sizes}
        failed = {count: why for count, why in failures.items() if why is not None}
        if failed:
            self._use([count for count in sizes if count not in failed])
        for manager in self._managers:
            manager.replays.clear()  # replays so far were no steps
        return {count * self._query_len: f"of the drafter, {why}" for count, why in failed.items()}

    def _use(self, counts: list[int]) -> None:
        for manager in self._managers:
            manager.use_requests(counts)

    def _failure(self, count: int) -> str | None:
        """The reason why some rank has no graph for this number of requests; None if all have."""
        for manager in self._managers:
            if count * manager.decode_query_len in manager.failed:
                return manager.failed[count * manager.decode_query_len]
        failure: str | None = None
        try:
            self._run_step(count * self._query_len)
            torch.accelerator.synchronize()
        except RuntimeError as error:
            logger.exception("A drafter's graph of %d requests was not replayed.", count)
            failure = f"{type(error).__name__}: {error}"
        if not least_of_all_ranks(failure is None):
            return failure or "another rank could not; see its log"
        if any(not each.replays[count * each.decode_query_len] for each in self._managers):
            return "its passes never reached a graph"
        return None

    def replays(self) -> dict[int, int]:
        return dict(sum((manager.replays for manager in self._managers), Counter()))

    def clear(self) -> None:
        for manager in self._managers:
            manager.clear()


class StepGraphs(GraphCapture):
    """The graphs of steps: sizes, resources, and numbers of replays.

    runner: creates a new graph manager for each KV cache
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
            ubatches = runner.plans.splitter.ubatches_of_graph
            return self.capture(layers, ubatches, self._drafter_to_capture())

    def _drafter_to_capture(self) -> DraftPassGraphs | None:
        """The graphs of the drafter's passes; None if they run eagerly."""
        runner: Any = self._runner
        drafter, asked = runner.speculator, self._vllm_config.speculative_config
        managers = getattr(drafter, "graph_managers", [])
        if not managers or asked.enforce_eager:
            return None
        return DraftPassGraphs(managers, drafter, self._query_len, self._run_decodes)

    def _run_decodes(self, num_tokens: int) -> None:
        self._runner._dummy_run(num_tokens, uniform_decode=True, skip_eplb=True)

    @contextmanager
    def _own_pool(self) -> Iterator[None]:
        manager = self._manager
        assert manager is not None
        pool, manager.pool = manager.pool, current_platform.graph_pool_handle()
        runner: Any = self._runner
        try:
            with (
                without_garbage_collection(),
                runner.maybe_setup_dummy_loras(runner.lora_config),
            ):
                manager.take_forward(runner)
                yield
        finally:
            manager.clear()
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
        self._manager.use_sizes()

    def _capture_size(self, descriptor: Any, mode: CUDAGraphMode) -> None:
        assert self._manager is not None
        self._manager.capture_size(descriptor)

    def _replay_size(self, descriptor: Any, mode: CUDAGraphMode) -> None:
        assert self._manager is not None
        self._manager.on_trial = descriptor
        try:
            self._run_decodes(descriptor.num_tokens)
        finally:
            self._manager.on_trial = None

    def _forget(self, descriptor: Any) -> None:
        assert self._manager is not None
        self._manager.forget(descriptor)

    def replays(self) -> dict[int, int]:
        return {} if self._manager is None else dict(self._manager.replays)

    def destroy(self) -> None:
        if self._manager is not None and self._manager.graphs:
            torch_npu.npu.synchronize()
            self._manager.clear()
        if self.of_drafter is not None:
            self.of_drafter.clear()
