"""Captures a runner's model once per size, as far as device resources allow."""

import gc
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch_npu
import vllm.envs as envs
from vllm.compilation.counter import compilation_counter
from vllm.compilation.monitor import set_cudagraph_capturing_enabled
from vllm.config import CUDAGraphMode
from vllm.distributed.parallel_state import is_global_first_rank
from vllm.forward_context import BatchDescriptor
from vllm.platforms import current_platform
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher
from vllm.v1.worker.workspace import lock_workspace

from vllm_davinci.core.config.parsing import get_config
from vllm_davinci.core.device.memory import format_bytes
from vllm_davinci.core.device.soc import GraphLimits
from vllm_davinci.core.errors import DeviceError
from vllm_davinci.core.graph.plan import CapturePlan, GraphMemory, LayerCounts, plan_capture
from vllm_davinci.core.graph.ranks import least_of_all_ranks
from vllm_davinci.core.graph.small_kv_cache import RunnerWithCache, small_kv_cache
from vllm_davinci.core.graph.wrapper import NPUGraphWrapper
from vllm_davinci.core.log import init_logger

logger = init_logger(__name__)


class CapturableRunner(RunnerWithCache, Protocol):
    """The members of vLLM's runner that a capture uses; its methods are called in this order.

    cudagraph_dispatcher:     lists requested sizes and chooses one for each step
    uniform_decode_query_len: tokens of a decoding request
    """

    cudagraph_dispatcher: CudagraphDispatcher
    uniform_decode_query_len: int

    def _warmup_and_capture(self, desc: BatchDescriptor, **options: Any) -> None: ...
    def _dummy_run(self, num_tokens: int, **options: Any) -> Any: ...


class DrafterGraphs(Protocol):
    """Graphs of a drafter's passes, in addition to those of the target's steps."""

    @property
    def graphs_per_size(self) -> int:
        """Kinds of passes: the first of a step, and later ones with two or more drafts."""

    def capture(self, sizes: list[int]) -> dict[int, str]:
        """Captures the passes of these numbers of requests; a size that fails is eager.

        Returns tokens of the first pass -> why it could not be captured.
        """

    def replays(self) -> dict[int, int]:
        """Tokens of a graph -> passes that replayed it."""

    def clear(self) -> None:
        """Drops the graphs; none of them may be running."""


class GraphCapture:
    """The graphs of one runner: sizes, resources and numbers of replays.

    runner: runs the steps that are captured
    limits: of the device
    """

    def __init__(self, runner: CapturableRunner, limits: GraphLimits) -> None:
        self._runner = runner
        self._vllm_config = runner.vllm_config
        self._compilation = runner.vllm_config.compilation_config
        self._dispatcher = runner.cudagraph_dispatcher
        self._query_len = runner.uniform_decode_query_len
        self._limits = limits
        self._wrapper: NPUGraphWrapper | None = None  # without graphs
        self.of_drafter: DrafterGraphs | None = None  # without a drafter that can be captured
        self._memory: GraphMemory | None = None  # measured by `profile_memory`
        self._workspace_bytes = 0
        self.plan: CapturePlan | None = None  # of the captured graphs
        self.captured_bytes = 0  # bytes of device memory that they take

    def wrap(self, model: Any, forward: Callable[..., Any]) -> NPUGraphWrapper:
        """Wraps the model for full graphs. forward: the part of a step that a graph holds"""
        self._wrapper = NPUGraphWrapper(model, self._vllm_config, forward=forward)
        return self._wrapper

    def measure_workspaces(self) -> None:
        """Records the most workspace bytes that torch_npu has allocated per stream since.

        vLLM does not count them: it measures after they have been released.
        """
        self._workspace_bytes = max(self._workspace_bytes, release_workspaces())

    def profile_memory(self) -> GraphMemory:
        """Captures the two largest sizes over a small KV cache and drops them again.

        Workspaces differ by chip and CANN release, and each stream of a graph has its own, so only
        a capture shows their size. Sizes that cannot be captured are left to `capture`, which
        reports them.
        """
        workspaces = self._workspace_bytes
        if self._compilation.cudagraph_mode == CUDAGraphMode.NONE:
            return GraphMemory(0, 0, workspaces)
        with small_kv_cache(self._runner) as is_there:
            if is_there:
                self._memory = self._captured_memory(workspaces)
        return self._memory or GraphMemory(0, 0, workspaces)

    def _captured_memory(self, workspaces: int) -> GraphMemory | None:
        taken: list[int] = []
        captured_before = compilation_counter.num_cudagraph_captured
        set_cudagraph_capturing_enabled(True)
        try:
            with self._own_pool():
                for mode, descriptors in self._descriptors():
                    for descriptor in descriptors[:2]:
                        before = _free_bytes()
                        if self._capture_on_all_ranks(descriptor, mode) is None:
                            workspaces = max(workspaces, release_workspaces())
                            taken.append(before - _free_bytes())
        finally:
            set_cudagraph_capturing_enabled(False)
            compilation_counter.num_cudagraph_captured = captured_before
        return GraphMemory(taken[0], taken[-1], workspaces) if taken else None

    @contextmanager
    def _own_pool(self) -> Iterator[None]:
        """Captures graphs inside into a separate pool and drops them afterwards."""
        model = self._wrapper
        assert model is not None
        pool, model.graph_pool = model.graph_pool, current_platform.graph_pool_handle()
        try:
            with without_garbage_collection():
                yield
        finally:
            model.clear_graphs()
            model.graph_pool = pool
            for keys in self._dispatcher.cudagraph_keys.values():
                keys.clear()
            self._dispatcher.keys_initialized = False

    def _descriptors(self) -> Iterable[tuple[CUDAGraphMode, list[Any]]]:
        """The requested graphs by mode, largest first."""
        descriptors: Iterable[tuple[CUDAGraphMode, list[Any]]] = (
            self._dispatcher.get_capture_descs()
        )
        return descriptors

    def capture(
        self,
        layers: LayerCounts,
        ubatches_of: Callable[[int], int],
        drafter: DrafterGraphs | None = None,
    ) -> int:
        """Captures every size, the largest first. Returns the bytes of device memory it took.

        layers:      of this rank
        ubatches_of: tokens -> number of ubatches in the graph of that size
        drafter:     graphs of its passes, captured afterwards; None if they run eagerly
        All ranks capture the same sizes: a size that one rank cannot capture is dropped by all.
        Raises DeviceError in that case if the options require it.
        """
        if self._compilation.cudagraph_mode == CUDAGraphMode.NONE:
            return 0
        begin = time.perf_counter()
        self.of_drafter = drafter
        before = _free_bytes()
        self.plan = plan = self._plan(before, layers, ubatches_of)
        logger.info_once("Graph mode, plan of a rank: %s.", plan.told())
        if not plan.sizes and (asked := self._sizes()):
            self._give_up(dict.fromkeys(asked, plan.notes[-1]))
        self.use_sizes(list(plan.sizes))
        captured: list[int] = []
        failed: dict[int, str] = {}
        set_cudagraph_capturing_enabled(True)
        with without_garbage_collection():
            for mode, descriptors in self._descriptors():
                for descriptor in descriptors:
                    failure = self._capture_on_all_ranks(descriptor, mode)
                    if failure is None:
                        captured.append(descriptor.num_tokens)
                    else:
                        failed[descriptor.num_tokens] = failure
            if self.of_drafter is not None:
                sizes = dict.fromkeys(size // self._query_len for size in captured)
                failed |= self.of_drafter.capture(list(sizes))
        set_cudagraph_capturing_enabled(False)
        if failed:
            self._give_up(failed)
            self.use_sizes(captured)
        self.captured_bytes = before - _free_bytes()
        self._count_from_here()
        lock_workspace()
        logger.info_once(
            "Graph mode: %d graphs captured in %.1f s, %s of device memory.",
            len(captured),
            time.perf_counter() - begin,
            format_bytes(self.captured_bytes),
        )
        return self.captured_bytes

    def _count_from_here(self) -> None:
        """Excludes replays so far, which were no steps, from the count."""
        if self._wrapper is not None:
            self._wrapper.replays.clear()

    def _sizes(self) -> list[int]:
        """Token counts of the requested graphs, ascending."""
        descriptors = (of for _, of in self._descriptors())
        return sorted({each.num_tokens for of_mode in descriptors for each in of_mode})

    def _plan(
        self, available_bytes: int, layers: LayerCounts, ubatches_of: Callable[[int], int]
    ) -> CapturePlan:
        """Plans the same sizes on all ranks. available_bytes: device memory left on this rank"""
        sizes = self._sizes()
        split = {size: count for size in sizes if (count := ubatches_of(size)) > 1}
        plan = plan_capture(self._vllm_config, sizes, layers, split, self._memory)
        if self.of_drafter is not None:
            plan = plan.with_drafts(self.of_drafter.graphs_per_size)
        plan = plan.within(self._limits, available_bytes)
        fewest = least_of_all_ranks(len(plan.sizes))
        return plan.with_most(fewest, f"another rank has room for {fewest}")

    def use_sizes(self, sizes: list[int]) -> None:
        """Pads steps only to these sizes; without sizes, all steps are eager."""
        compilation, dispatcher = self._compilation, self._dispatcher
        compilation.cudagraph_capture_sizes = sorted(sizes)
        compilation.max_cudagraph_capture_size = max(sizes, default=0)
        if not sizes:
            compilation.cudagraph_mode = CUDAGraphMode.NONE
        for keys in dispatcher.cudagraph_keys.values():
            keys.clear()
        dispatcher.initialize_cudagraph_keys(compilation.cudagraph_mode, self._query_len)

    def _capture_on_all_ranks(self, descriptor: Any, mode: CUDAGraphMode) -> str | None:
        """The reason why some rank could not capture or replay the size; None if all could.

        A device allocates a graph's streams and events at the first replay.
        """
        failure: str | None = None
        for attempt in (self._capture_size, self._replay_size):
            try:
                attempt(descriptor, mode)
                torch.accelerator.synchronize()
            except RuntimeError as error:
                failure = f"{type(error).__name__}: {error}"
                logger.exception("The graph of %d tokens was not captured.", descriptor.num_tokens)
            if not least_of_all_ranks(failure is None):
                self._forget(descriptor)
                return failure or "another rank could not; see its log"
        return None

    def _capture_size(self, descriptor: Any, mode: CUDAGraphMode) -> None:
        self._runner._warmup_and_capture(descriptor, cudagraph_runtime_mode=mode)

    def _replay_size(self, descriptor: Any, mode: CUDAGraphMode) -> None:
        self._runner._dummy_run(
            descriptor.num_tokens,
            cudagraph_runtime_mode=mode,
            uniform_decode=descriptor.uniform,
            skip_eplb=True,
            remove_lora=False,
            num_active_loras=descriptor.num_active_loras,
        )

    def _forget(self, descriptor: Any) -> None:
        """Drops a graph that not all ranks have."""
        assert self._wrapper is not None
        self._wrapper.forget(descriptor)

    def _give_up(self, failed: dict[int, str]) -> None:
        """Logs the sizes that failed, or raises an error. failed: tokens -> reason"""
        reasons = "; ".join(f"{size} tokens: {why}" for size, why in failed.items())
        if get_config(self._vllm_config).torchair_graph_config.on_capture_failure == "stop":
            raise DeviceError(
                f"Not all graphs were captured: {reasons}. Request fewer or smaller sizes "
                "(--cudagraph-capture-sizes), lower --gpu-memory-utilization, or start with "
                "--enforce-eager."
            )
        if is_global_first_rank():
            logger.warning(
                "Graph mode continues without some sizes, whose steps run in larger ones or "
                "eagerly: %s. Fewer or smaller sizes (--cudagraph-capture-sizes) or a lower "
                "--gpu-memory-utilization make room.",
                reasons,
            )

    def replays(self) -> dict[int, int]:
        """Tokens of a graph -> steps that replayed it; empty without graphs."""
        return {} if self._wrapper is None else dict(self._wrapper.replays)

    def destroy(self) -> None:
        """Drops the graphs; none of them may be running."""
        if self._wrapper is not None:
            torch_npu.npu.synchronize()
            self._wrapper.clear_graphs()
        if self.of_drafter is not None:
            self.of_drafter.clear()


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Disables the garbage collector: a finalizer could call the device in a capture.

    vLLM's `freeze_gc_for_cudagraph_capture` also unfreezes the heap at its end, so that each later
    full collection of the start traverses a million objects of imported modules.
    """
    was_enabled = gc.isenabled()
    gc.collect()
    if not envs.VLLM_ENABLE_CUDAGRAPH_GC:
        gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _free_bytes() -> int:
    """Free memory of the device, with empty caches."""
    torch.accelerator.synchronize()
    torch.accelerator.empty_cache()
    return int(torch.accelerator.get_memory_info()[0])


def release_workspaces() -> int:
    """Releases torch_npu's caches. Returns the bytes that its allocator does not count.

    These are workspaces, one per stream, which later steps allocate again.
    """
    torch.accelerator.synchronize()
    before = torch.accelerator.get_memory_info()[0] + torch.accelerator.memory_reserved()
    after = _free_bytes() + torch.accelerator.memory_reserved()
    return int(after - before)
