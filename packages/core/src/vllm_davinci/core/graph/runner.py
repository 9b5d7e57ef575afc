"""vLLM's runner, whose steps of decodes replay captured graphs."""

import time
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch_npu
from vllm.compilation.counter import compilation_counter
from vllm.compilation.cuda_graph import CUDAGraphWrapper
from vllm.compilation.monitor import set_cudagraph_capturing_enabled
from vllm.config import CUDAGraphMode, set_current_vllm_config
from vllm.distributed.parallel_state import (
    get_pp_group,
    get_world_group,
    is_global_first_rank,
)
from vllm.forward_context import BatchDescriptor
from vllm.platforms import current_platform
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.workspace import lock_workspace

from vllm_davinci.core.config.parsing import get_config
from vllm_davinci.core.device.memory import format_bytes
from vllm_davinci.core.device.soc import GraphLimits
from vllm_davinci.core.errors import DeviceError
from vllm_davinci.core.graph.plan import CapturePlan, GraphMemory, LayerCounts, plan_capture
from vllm_davinci.core.graph.wrapper import NPUGraphWrapper
from vllm_davinci.core.log import init_logger

logger = init_logger(__name__)


class GraphRunner(GPUModelRunner):
    """Captures the sizes that vLLM's dispatcher asks for, within the device's limits."""

    model: Any

    graph_limits = GraphLimits(streams=1984, events=65536)  # of this device; set by the worker
    capture_plan: CapturePlan | None = None  # of the graphs that there are
    captured_bytes = 0  # of device memory that they have taken
    _graph_memory: GraphMemory | None = None  # as `profile_graph_memory` has found it
    _workspace_bytes = 0

    def load_model(self, load_dummy_weights: bool = False, **options: Any) -> None:
        super().load_model(load_dummy_weights, **options)
        if isinstance(self.model, CUDAGraphWrapper):
            # vLLM's own, which names torch.cuda's graphs.
            self.model = NPUGraphWrapper(
                self.get_model(), self.vllm_config, forward=self._forward_of_graph
            )

    def _forward_of_graph(self, **inputs: Any) -> Any:
        """The part of a step that a graph holds."""
        return self.get_model()(**inputs)

    def profile_run(self, *args: Any, **kwargs: Any) -> None:
        """vLLM's; keeps the bytes of the workspaces that torch_npu gives each stream beside it.

        vLLM does not count them: it measures after they have been given back.
        """
        super().profile_run(*args, **kwargs)
        self._workspace_bytes = _release_workspaces()

    def profile_graph_memory(self) -> GraphMemory:
        """Captures the two largest sizes over a small KV cache and drops them again.

        Operators ask for workspaces, which differ by chip and by release of CANN, and each stream
        of a graph has its own: what they come to is only known from a capture. Sizes that cannot be
        captured are left to `capture_model`, which says so.
        """
        workspaces = self._workspace_bytes
        if self.compilation_config.cudagraph_mode == CUDAGraphMode.NONE:
            return GraphMemory(0, 0, workspaces)
        if not self._has_room_for_trial():
            return GraphMemory(0, 0, workspaces)
        taken: list[int] = []
        model = self.model
        assert isinstance(model, NPUGraphWrapper)
        pool, model.graph_pool = model.graph_pool, current_platform.graph_pool_handle()
        captured_before = compilation_counter.num_cudagraph_captured
        set_cudagraph_capturing_enabled(True)
        try:
            with self._freeze_gc():
                for mode, descriptors in self.cudagraph_dispatcher.get_capture_descs():
                    for descriptor in descriptors[:2]:
                        before = _free_bytes()
                        if self._capture_on_all_ranks(descriptor, mode) is None:
                            workspaces = max(workspaces, _release_workspaces())
                            taken.append(before - _free_bytes())
        finally:
            set_cudagraph_capturing_enabled(False)
            compilation_counter.num_cudagraph_captured = captured_before
            model.clear_graphs()
            model.graph_pool = pool
            for keys in self.cudagraph_dispatcher.cudagraph_keys.values():
                keys.clear()
            self.cudagraph_dispatcher.keys_initialized = False
            self._cleanup_profiling_kv_cache()
        if taken:
            self._graph_memory = GraphMemory(taken[0], taken[-1], workspaces)
        return self._graph_memory or GraphMemory(0, 0, workspaces)

    def _has_room_for_trial(self) -> bool:
        """Allocates a small KV cache. A device without room for it has none for a real one."""
        try:
            with set_current_vllm_config(self.vllm_config):
                self._init_minimal_kv_cache_for_profiling()
            is_there = True
        except torch.OutOfMemoryError:
            is_there = False
        if _least_of_all_ranks(is_there):
            return True
        self._cleanup_profiling_kv_cache()
        return False

    def capture_model(self) -> int:
        """Captures every size, the largest first. Returns the bytes of device memory it took.

        All ranks capture the same sizes: one that a rank cannot capture is given up by all.
        Raises DeviceError for it when the options say so.
        """
        if self.compilation_config.cudagraph_mode == CUDAGraphMode.NONE:
            return 0
        begin = time.perf_counter()
        before = _free_bytes()
        self.capture_plan = plan = self._plan(before)
        logger.info_once("Graph mode, plan of a rank: %s.", plan.told())
        if not plan.sizes and (asked := self._sizes()):
            self._give_up(dict.fromkeys(asked, plan.notes[-1]))
        self._use_sizes(list(plan.sizes))
        captured: list[int] = []
        failed: dict[int, str] = {}
        set_cudagraph_capturing_enabled(True)
        with self._freeze_gc():
            for mode, descriptors in self.cudagraph_dispatcher.get_capture_descs():
                for descriptor in descriptors:
                    failure = self._capture_on_all_ranks(descriptor, mode)
                    if failure is None:
                        captured.append(descriptor.num_tokens)
                    else:
                        failed[descriptor.num_tokens] = failure
        set_cudagraph_capturing_enabled(False)
        if failed:
            self._give_up(failed)
            self._use_sizes(captured)
        self.captured_bytes = before - _free_bytes()
        if isinstance(self.model, NPUGraphWrapper):
            self.model.replays.clear()  # those so far were no steps
        lock_workspace()
        logger.info_once(
            "Graph mode: %d graphs captured in %.1f s, %s of device memory.",
            len(captured),
            time.perf_counter() - begin,
            format_bytes(self.captured_bytes),
        )
        return self.captured_bytes

    def _sizes(self) -> list[int]:
        """Tokens of the graphs that the dispatcher asks for, ascending."""
        descriptors = (of for _, of in self.cudagraph_dispatcher.get_capture_descs())
        return sorted({each.num_tokens for of_mode in descriptors for each in of_mode})

    def _plan(self, available_bytes: int) -> CapturePlan:
        """The same sizes on all ranks. available_bytes: of this one's device memory."""
        sizes = self._sizes()
        plan = plan_capture(
            self.vllm_config,
            sizes,
            self._layer_counts(),
            self._ubatches(sizes),
            self._graph_memory,
        )
        plan = plan.within(self.graph_limits, available_bytes)
        fewest = _least_of_all_ranks(len(plan.sizes))
        return plan.with_most(fewest, f"another rank has room for {fewest}")

    def _layer_counts(self) -> LayerCounts:
        """Layers of this rank, by what a capture takes for them."""
        groups = self.kv_cache_config.kv_cache_groups
        return LayerCounts(
            attention=sum(len(group.layer_names) for group in groups),
            embeds=get_pp_group().is_first_rank,
        )

    def _ubatches(self, sizes: Iterable[int]) -> dict[int, int]:
        """Of sizes whose steps are captured as ubatches, how many."""
        return {}

    def _use_sizes(self, sizes: list[int]) -> None:
        """Makes the dispatcher pad steps to these sizes alone; without any, all are eager."""
        compilation, dispatcher = self.compilation_config, self.cudagraph_dispatcher
        compilation.cudagraph_capture_sizes = sorted(sizes)
        compilation.max_cudagraph_capture_size = max(sizes, default=0)
        if not sizes:
            compilation.cudagraph_mode = CUDAGraphMode.NONE
        for keys in dispatcher.cudagraph_keys.values():
            keys.clear()
        dispatcher.initialize_cudagraph_keys(
            compilation.cudagraph_mode, self.uniform_decode_query_len
        )

    def _capture_on_all_ranks(self, descriptor: BatchDescriptor, mode: CUDAGraphMode) -> str | None:
        """Why some rank could not capture the size, or replay it; None if all could.

        A device gives a graph its streams and events at the first replay.
        """

        def capture() -> None:
            self._warmup_and_capture(descriptor, cudagraph_runtime_mode=mode)

        def replay() -> None:
            self._dummy_run(
                descriptor.num_tokens,
                cudagraph_runtime_mode=mode,
                uniform_decode=descriptor.uniform,
                skip_eplb=True,
                remove_lora=False,
                num_active_loras=descriptor.num_active_loras,
            )

        failure: str | None = None
        for attempt in (capture, replay):
            try:
                attempt()
                torch.accelerator.synchronize()
            except RuntimeError as error:
                failure = f"{type(error).__name__}: {error}"
                logger.exception("The graph of %d tokens was not captured.", descriptor.num_tokens)
            if not _least_of_all_ranks(failure is None):
                assert isinstance(self.model, NPUGraphWrapper)
                self.model.forget(descriptor)
                return failure or "another rank could not; see its log"
        return None

    def _give_up(self, failed: dict[int, str]) -> None:
        """Says which sizes are not there, or ends the start. failed: tokens -> why."""
        reasons = "; ".join(f"{size} tokens: {why}" for size, why in failed.items())
        if get_config(self.vllm_config).torchair_graph_config.on_capture_failure == "stop":
            raise DeviceError(
                f"Not all graphs were captured: {reasons}. Ask for fewer or smaller sizes "
                "(--cudagraph-capture-sizes), lower --gpu-memory-utilization, or start with "
                "--enforce-eager."
            )
        if is_global_first_rank():
            logger.warning(
                "Graph mode goes on without some sizes, whose steps run in larger ones or eagerly: "
                "%s. Fewer or smaller sizes (--cudagraph-capture-sizes) or a lower "
                "--gpu-memory-utilization make room.",
                reasons,
            )

    def graph_replays(self) -> dict[int, int]:
        """Tokens of a graph -> steps that replayed it; empty without graphs."""
        return dict(self.model.replays) if isinstance(self.model, NPUGraphWrapper) else {}

    def shutdown(self) -> None:
        if isinstance(self.model, NPUGraphWrapper):
            torch_npu.npu.synchronize(self.device)  # a graph is not destroyed while it runs
            self.model.clear_graphs()
        super().shutdown()


def _least_of_all_ranks(value: int) -> int:
    """The smallest of what the ranks of this engine give."""
    world = get_world_group()
    if world.world_size == 1:
        return value
    least = torch.tensor(value, dtype=torch.int64)
    dist.all_reduce(least, op=dist.ReduceOp.MIN, group=world.cpu_group)
    return int(least)


def _free_bytes() -> int:
    """Free memory of the device, once nothing is cached."""
    torch.accelerator.synchronize()
    torch.accelerator.empty_cache()
    return int(torch.accelerator.get_memory_info()[0])


def _release_workspaces() -> int:
    """Gives back what torch_npu caches. Returns the bytes that its allocator does not count.

    Those are workspaces, one for each stream, which later steps take again.
    """
    torch.accelerator.synchronize()
    before = torch.accelerator.get_memory_info()[0] + torch.accelerator.memory_reserved()
    after = _free_bytes() + torch.accelerator.memory_reserved()
    return int(after - before)
