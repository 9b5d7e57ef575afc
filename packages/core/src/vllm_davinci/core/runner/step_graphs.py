"""Captures a runner's steps once per size, as far as device resources allow."""

import gc
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch_npu
import vllm.envs as envs
from vllm.compilation.counter import compilation_counter
from vllm.compilation.monitor import set_cudagraph_capturing_enabled
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.distributed.parallel_state import get_pp_group, is_global_first_rank
from vllm.platforms import current_platform
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator
from vllm.v1.worker.workspace import lock_workspace

from vllm_davinci.core.config.parsing import get_config
from vllm_davinci.core.device.memory import format_bytes
from vllm_davinci.core.device.soc import GraphLimits
from vllm_davinci.core.errors import DeviceError
from vllm_davinci.core.fused_moe.layer_counts import layer_counts
from vllm_davinci.core.graph.plan import CapturePlan, GraphMemory, plan_capture
from vllm_davinci.core.graph.ranks import least_of_all_ranks
from vllm_davinci.core.graph.small_kv_cache import small_kv_cache
from vllm_davinci.core.log import init_logger
from vllm_davinci.core.runner.graphs import NPUDraftGraphManager, NPUGraphManager

logger = init_logger(__name__)


class DraftPassGraphs:
    """Graphs of a drafter model, by kind of pass.

    managers:  one per kind of pass that has graphs
    drafter:   its `capture` captures them
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
            manager.replays.clear()  # replays before this were trials
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


class StepGraphs:
    """The graphs of one runner's steps: sizes, resources and numbers of replays.

    runner: NPUModelRunner, which creates a new graph manager for each KV cache
    limits: of the device
    """

    def __init__(self, runner: Any, vllm_config: VllmConfig, limits: GraphLimits) -> None:
        self._runner = runner
        self._vllm_config = vllm_config
        self._compilation = vllm_config.compilation_config
        self._limits = limits
        self.of_drafter: DraftPassGraphs | None = None  # None if no drafter can be captured
        self._memory: GraphMemory | None = None  # measured by `profile_memory`
        self._workspace_bytes = 0
        self.plan: CapturePlan | None = None  # plan of the captured graphs
        self.captured_bytes = 0  # device memory of the captured graphs

    @property
    def _manager(self) -> NPUGraphManager | None:
        manager: NPUGraphManager | None = self._runner.cudagraph_manager
        return manager

    def measure_workspaces(self) -> None:
        """Records the most workspace bytes per stream that torch_npu has allocated since the last
        call.
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
                for descriptor in self._descriptors()[:2]:
                    before = _free_bytes()
                    if self._capture_on_all_ranks(descriptor) is None:
                        workspaces = max(workspaces, release_workspaces())
                        taken.append(before - _free_bytes())
        finally:
            set_cudagraph_capturing_enabled(False)
            compilation_counter.num_cudagraph_captured = captured_before
        return GraphMemory(taken[0], taken[-1], workspaces) if taken else None

    @contextmanager
    def _own_pool(self) -> Iterator[None]:
        """Captures graphs inside into a separate pool and drops them afterwards."""
        manager, runner = self._manager, self._runner
        assert manager is not None
        pool, manager.pool = manager.pool, current_platform.graph_pool_handle()
        try:
            with without_garbage_collection(), runner.maybe_setup_dummy_loras(runner.lora_config):
                manager.take_forward(runner)
                yield
        finally:
            manager.clear()
            manager.pool = pool

    def _descriptors(self) -> list[BatchExecutionDescriptor]:
        """The requested graphs, largest first."""
        asked = {} if self._manager is None else self._manager._capture_descs
        return list(asked.get(CUDAGraphMode.FULL, []))

    def capture(self) -> int:
        """Captures every size, the largest first. Returns the bytes of device memory it took.

        All ranks capture the same sizes: a size that one rank cannot capture is dropped by all.
        Raises DeviceError in that case if the options require it.
        """
        runner, manager = self._runner, self._manager
        if manager is None or not manager.needs_capture():
            return 0
        self._query_len = manager.decode_query_len
        with runner.maybe_setup_dummy_loras(runner.lora_config):
            manager.take_forward(runner)
            return self._capture_sizes(manager)

    def _capture_sizes(self, manager: NPUGraphManager) -> int:
        begin = time.perf_counter()
        self.of_drafter = self._drafter_to_capture()
        before = _free_bytes()
        self.plan = plan = self._plan(before)
        logger.info_once("Graph mode, plan of a rank: %s.", plan.told())
        if not plan.sizes and (asked := self._sizes()):
            self._give_up(dict.fromkeys(asked, plan.notes[-1]))
        self.use_sizes(list(plan.sizes))
        captured: list[int] = []
        failed: dict[int, str] = {}
        set_cudagraph_capturing_enabled(True)
        with without_garbage_collection():
            for descriptor in self._descriptors():
                failure = self._capture_on_all_ranks(descriptor)
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
        manager.replays.clear()  # replays before this were trials
        lock_workspace()
        logger.info_once(
            "Graph mode: %d graphs captured in %.1f s, %s of device memory.",
            len(captured),
            time.perf_counter() - begin,
            format_bytes(self.captured_bytes),
        )
        return self.captured_bytes

    def _sizes(self) -> list[int]:
        """Token counts of the requested graphs, ascending."""
        return sorted({each.num_tokens for each in self._descriptors()})

    def _drafter_to_capture(self) -> DraftPassGraphs | None:
        """The graphs of the drafter's passes; None if they run eagerly."""
        drafter, asked = self._runner.speculator, self._vllm_config.speculative_config
        managers = getattr(drafter, "graph_managers", [])
        if not managers or asked is None or asked.enforce_eager:
            return None
        return DraftPassGraphs(managers, drafter, self._query_len, self._run_decodes)

    def _run_decodes(self, num_tokens: int) -> None:
        self._runner._dummy_run(num_tokens, uniform_decode=True, skip_eplb=True)

    def _plan(self, available_bytes: int) -> CapturePlan:
        """Plans the same sizes on all ranks. available_bytes: device memory left on this rank"""
        runner, sizes = self._runner, self._sizes()
        is_first = get_pp_group().is_first_rank
        layers = layer_counts(runner.get_model(), runner.kv_cache_config, is_first)
        ubatches_of = runner.splitter.ubatches_of_graph
        split = {size: count for size in sizes if (count := ubatches_of(size)) > 1}
        plan = plan_capture(self._vllm_config, sizes, layers, split, self._memory)
        if self.of_drafter is not None:
            plan = plan.with_drafts(self.of_drafter.graphs_per_size)
        plan = plan.within(self._limits, available_bytes)
        fewest = least_of_all_ranks(len(plan.sizes))
        return plan.with_most(fewest, f"another rank has room for {fewest}")

    def use_sizes(self, sizes: list[int]) -> None:
        """Pads steps only to these sizes; without sizes, all steps are eager."""
        compilation = self._compilation
        compilation.cudagraph_capture_sizes = sorted(sizes)
        compilation.max_cudagraph_capture_size = max(sizes, default=0)
        if not sizes:
            compilation.cudagraph_mode = CUDAGraphMode.NONE
        assert self._manager is not None
        self._manager.use_sizes()

    def _capture_on_all_ranks(self, descriptor: BatchExecutionDescriptor) -> str | None:
        """The reason why some rank could not capture or replay the size; None if all could.

        A device allocates a graph's streams and events at the first replay.
        """
        manager = self._manager
        assert manager is not None
        failure: str | None = None
        for attempt in (manager.capture_size, self._replay_size):
            try:
                attempt(descriptor)
                torch.accelerator.synchronize()
            except RuntimeError as error:
                failure = f"{type(error).__name__}: {error}"
                logger.exception("The graph of %d tokens was not captured.", descriptor.num_tokens)
            if not least_of_all_ranks(failure is None):
                manager.forget(descriptor)
                return failure or "another rank could not; see its log"
        return None

    def _replay_size(self, descriptor: BatchExecutionDescriptor) -> None:
        assert self._manager is not None
        self._manager.on_trial = descriptor
        try:
            self._run_decodes(descriptor.num_tokens)
        finally:
            self._manager.on_trial = None

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
        return {} if self._manager is None else dict(self._manager.replays)

    def destroy(self) -> None:
        """Drops the graphs; none of them may be running."""
        if self._manager is not None and self._manager.graphs:
            torch_npu.npu.synchronize()
            self._manager.clear()
        if self.of_drafter is not None:
            self.of_drafter.clear()


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Disables garbage collection: a finalizer could call the device during a capture."""
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
