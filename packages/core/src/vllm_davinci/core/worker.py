"""One process per NPU: device set-up, memory profile, warm-up."""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch_npu
import vllm.envs as envs
from vllm.config import ProfilerConfig, VllmConfig, set_current_vllm_config
from vllm.distributed.parallel_state import get_pp_group, get_world_group
from vllm.model_executor.model_loader import get_model_loader
from vllm.platforms.interface import set_assigned_physical_gpu_ids
from vllm.profiler.wrapper import TorchProfilerWrapper
from vllm.utils.gc_utils import freeze_gc_heap, maybe_attach_gc_debug_callback
from vllm.utils.mem_utils import MemorySnapshot
from vllm.utils.torch_utils import set_random_seed
from vllm.v1.utils import report_usage_stats
from vllm.v1.worker.gpu_worker import Worker, init_worker_distributed_environment
from vllm.v1.worker.startup_plan import maybe_save_startup_plan
from vllm.v1.worker.worker_base import CompilationTimes
from vllm.v1.worker.workspace import init_workspace_manager

from vllm_davinci.core import components
from vllm_davinci.core.components.fused_ops import choose_fused_ops, names_in_use
from vllm_davinci.core.config.environment_variables import ALLOCATOR
from vllm_davinci.core.config.parsing import get_config
from vllm_davinci.core.device.cpu_binding import bind_threads
from vllm_davinci.core.device.local_devices import logical_device, place_among_workers
from vllm_davinci.core.device.memory import (
    bytes_in_pieces,
    cache_bytes_of_a_request,
    check_given_cache,
    check_kv_cache_budget,
    discard_damaged_plans,
    leave_room_for_workspaces,
    memory_beside_buffers,
    restore_asked_share,
    use_expandable_segments,
)
from vllm_davinci.core.device.profiling import profiler_activities
from vllm_davinci.core.device.sleeping_memory import KV_CACHE, WEIGHTS, range_of, sleeping_memory
from vllm_davinci.core.device.timeline import name_streams
from vllm_davinci.core.distributed.engine_ring import EngineRing
from vllm_davinci.core.distributed.hccl_buffers import make_communicators
from vllm_davinci.core.distributed.host_address import name_host_address
from vllm_davinci.core.distributed.host_waits import limit_host_waits
from vllm_davinci.core.fused_moe.piece_plan import PARTS_OF_MEMORY, plan_pieces
from vllm_davinci.core.fused_moe.process_groups import groups_of_experts, init_expert_groups
from vllm_davinci.core.graph.ranks import least_of_all_ranks
from vllm_davinci.core.log import init_logger, progress
from vllm_davinci.core.platform import NPUPlatform
from vllm_davinci.core.process.engine_exit import (
    finish_teardown,
    leave_groups_at_exit,
    leave_interrupts_to_engine,
)
from vllm_davinci.core.process.liveness import end_with_other_engines, end_with_program
from vllm_davinci.core.process.step_guard import StepGuard
from vllm_davinci.core.runner.model_runner import NPUModelRunner
from vllm_davinci.core.sleep_mode.backend import NPUSleepModeBackend

logger = init_logger(__name__)


class NPUWorker(Worker):
    """vLLM's GPU worker on an NPU instead of CUDA."""

    local_rank: int
    profiler: Any
    _measured_kv_cache_bytes: int | None = None
    _workspaces = _bytes_beside_cache = 0  # bytes of the largest step
    # Memory that vLLM does not count: graphs with their workspaces, and gaps between tensors.
    graph_bytes = workspace_bytes = piece_bytes = 0
    peak_activation_memory: int
    profiled_bytes = 0  # peak of vLLM's own profile run
    _guard: StepGuard | None = None
    _ring: EngineRing | None = None

    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        asked = vllm_config.profiler_config
        vllm_config.profiler_config = ProfilerConfig()
        try:
            super().__init__(vllm_config, *args, **kwargs)
        finally:
            vllm_config.profiler_config = asked
        self.profiler_config = asked

    def init_device(self) -> None:
        """Selects the device, joins the process groups, measures memory, builds the runner."""
        end_with_program()
        leave_interrupts_to_engine()
        self.device = torch.device("npu", self._visible_device_index())
        torch.accelerator.set_device_index(self.device)
        use_expandable_segments(os.environ.get(ALLOCATOR.key, ""))
        restore_asked_share()
        # Without it torch_npu computes every GELU as tanh GELU, whatever the model requests.
        torch_npu.npu.use_compatible_impl(True)
        NPUPlatform.check_if_supports_dtype(self.model_config.dtype)
        name_host_address(self.parallel_config)
        self._free_bytes, _ = torch.accelerator.get_memory_info()
        # Before the memory snapshot, so that it includes the collectives' buffers.
        init_worker_distributed_environment(
            self.vllm_config,
            self.rank,
            self.distributed_init_method,
            self.local_rank,
            NPUPlatform.dist_backend,
        )
        init_expert_groups(self.vllm_config, NPUPlatform.dist_backend)
        self._guard = self._step_guard()
        self._ring = end_with_other_engines(self.parallel_config, self.rank)
        leave_groups_at_exit()
        self._guarded(self._init_device_in_groups)

    def _init_device_in_groups(self) -> None:
        make_communicators(self.vllm_config, self.device, groups_of_experts())
        set_random_seed(self.model_config.seed)
        # vLLM runs ten full collections in a start, 0.3 s each over all that is imported by now.
        freeze_gc_heap()
        torch.accelerator.empty_cache()
        self.init_snapshot = MemorySnapshot(device=self.device)
        loader = get_model_loader(self.load_config)
        self.requested_memory = memory_beside_buffers(
            self.init_snapshot,
            self.cache_config,
            loader.get_external_weight_memory(self.vllm_config),
            self._free_bytes - self.init_snapshot.free_memory,
        )
        config = get_config(self.vllm_config)
        if config.enable_cpu_binding:
            bind_threads(*place_among_workers(self.local_rank, self.parallel_config))
        init_workspace_manager(self.device, 1, num_lanes=config.dbo.num_ubatches)
        choose_fused_ops(config.enable_compiled_operators)
        name_streams()
        self.model_runner = NPUModelRunner(self.vllm_config, self.device)
        if self.rank == 0:
            report_usage_stats(self.vllm_config)

    def _step_guard(self) -> StepGuard | None:
        """Ends a step on all ranks if one of them fails; None with a single rank."""
        if dist.get_world_size() == 1:
            return None
        return StepGuard(self.parallel_config.data_parallel_index)

    def _load_model(self, *args: Any, **kwargs: Any) -> None:
        num_threads = torch.get_num_threads()
        super().load_model(*args, **kwargs)
        if components.active_device() is not None:
            # vLLM leaves the host one thread, which suffices for a chip. Virtual devices compute
            # with several.
            torch.set_num_threads(num_threads)
            logger.info("Threads that compute for virtual devices: %d", num_threads)
        # On the host, so that a rank which loads longer does not make a device time out.
        get_world_group().barrier()

    def _visible_device_index(self) -> int:
        """Index of this worker's device among those the process can see."""
        parallel = self.parallel_config
        self.local_rank = logical_device(
            self.local_rank, parallel, torch.accelerator.device_count()
        )
        assigned = parallel.assigned_physical_gpu_ids
        if assigned is None and parallel.nnodes_within_dp > 1:
            # Makes vLLM count this host's ranks of the engine instead of its devices.
            here = range(parallel.local_world_size)
            assigned = [NPUPlatform.device_id_to_physical_device_id(each) for each in here]
        if assigned is not None:
            set_assigned_physical_gpu_ids(assigned)
        return NPUPlatform.logical_device_id_to_visible_device_id(self.local_rank)

    def _maybe_get_memory_pool_context(self, tag: str) -> AbstractContextManager[None]:
        if self.model_config.enable_sleep_mode and tag in (WEIGHTS, KV_CACHE):
            return sleeping_memory().pool(tag)
        return nullcontext()

    def sleep(self, level: int = 1) -> None:
        backend = self.sleep_mode_backend
        assert isinstance(backend, NPUSleepModeBackend)
        backend.parameters = [range_of(each) for each in self.model_runner.model.parameters()]
        super().sleep(level)

    @torch.inference_mode()
    def _determine_available_memory(self) -> int:
        if envs.VLLM_ENABLE_STARTUP_PLAN:
            discard_damaged_plans(Path(envs.VLLM_CACHE_ROOT))
        needed_bytes, may_shrink = cache_bytes_of_a_request(self), self.model_config.is_moe
        for parts in PARTS_OF_MEMORY:
            if may_shrink:
                may_shrink = plan_pieces(
                    self.model_runner.get_model(),
                    self._bytes_beside_weights(),
                    get_config(self.vllm_config).expert_piece_tokens,
                    self.scheduler_config.max_num_batched_tokens,
                    parts,
                )
            available_bytes = self._bytes_for_cache()
            is_enough = least_of_all_ranks(available_bytes >= needed_bytes)
            if is_enough or not may_shrink:
                break
        self.available_kv_cache_memory_bytes = available_bytes
        check_kv_cache_budget(available_bytes, self)
        leave_room_for_workspaces(self._workspaces, available_bytes + self._bytes_beside_cache)
        return available_bytes

    def _bytes_for_cache(self) -> int:
        """Device memory left by the largest step of each kind and by graphs."""
        before = torch.accelerator.memory_allocated()
        torch_npu.npu.reset_peak_memory_stats()
        with progress(logger, "The profile run, a step of the largest size,", self.rank == 0):
            available_bytes: int = super().determine_available_memory()
        self.piece_bytes = bytes_in_pieces(torch.accelerator.memory_stats(self.device))
        self.profiled_bytes = torch.accelerator.max_memory_allocated() - before
        split_bytes = self.model_runner.measure_steps()
        graphs = self.model_runner.graphs.profile_memory()
        step_bytes = max(self.profiled_bytes, split_bytes)
        sizes = self.compilation_config.cudagraph_capture_sizes or ()
        graph_bytes = graphs.of_graphs(len(sizes))
        self._workspaces, self._bytes_beside_cache = graphs.workspaces, step_bytes + graph_bytes
        if self.cache_config.kv_cache_memory_bytes is not None:
            check_given_cache(self, self._bytes_beside_weights(), step_bytes)
            return available_bytes
        self.workspace_bytes = graphs.workspaces
        self.graph_bytes = graph_bytes + graphs.workspaces
        available_bytes -= self.graph_bytes + self.piece_bytes
        if split_bytes > self.peak_activation_memory:
            available_bytes -= split_bytes - self.peak_activation_memory
            self.peak_activation_memory = split_bytes
        self._measured_kv_cache_bytes = available_bytes
        return available_bytes

    def _bytes_beside_weights(self) -> int:
        """Number of bytes of device memory that the engine may still use, KV cache included."""
        torch.accelerator.empty_cache()
        free_bytes, _ = torch.accelerator.get_memory_info()
        fixed_bytes = self.cache_config.kv_cache_memory_bytes
        if fixed_bytes is not None:  # all other memory may be used
            return int(free_bytes - fixed_bytes)
        taken_bytes = self.init_snapshot.free_memory - free_bytes
        return int(self.requested_memory - taken_bytes)

    def _capture_and_warm_up(self) -> CompilationTimes:
        """Captures graphs, runs the largest decode batch and the sampler once, freezes the heap."""
        self.model_runner.capture_model()
        if get_pp_group().is_last_rank:
            max_num_reqs = min(
                self.scheduler_config.max_num_seqs, self.scheduler_config.max_num_batched_tokens
            )
            with set_current_vllm_config(self.vllm_config):
                hidden_states, last_hidden_states = self.model_runner._dummy_run(
                    num_tokens=max_num_reqs, skip_eplb=True
                )
            if self.model_runner.is_pooling_model:
                self.model_runner._dummy_pooler_run(hidden_states)
            else:
                self.model_runner._dummy_sampler_run(hidden_states=last_hidden_states)
        if self._measured_kv_cache_bytes is not None:
            maybe_save_startup_plan(self, self._measured_kv_cache_bytes)  # only if requested
        # Profiling and warm-up must not change the results of a seed.
        set_random_seed(self.model_config.seed, self.parallel_config.data_parallel_index)
        limit_host_waits()
        freeze_gc_heap()
        maybe_attach_gc_debug_callback()
        return CompilationTimes(
            language_model=self.compilation_config.compilation_time,
            encoder=self.compilation_config.encoder_compilation_time,
        )

    # --- start and steps: one rank's error stops all ------------------------------------------

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        self._guarded(self._load_model, *args, **kwargs)

    def determine_available_memory(self) -> int:
        return int(self._guarded(self._determine_available_memory))

    def initialize_from_config(self, *args: Any, **kwargs: Any) -> None:
        self._guarded(super().initialize_from_config, *args, **kwargs)

    def compile_or_warm_up_model(self) -> CompilationTimes:
        times: CompilationTimes = self._guarded(self._capture_and_warm_up)
        return times

    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        return self._guarded(super().execute_model, *args, **kwargs)

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        return self._guarded(super().sample_tokens, *args, **kwargs)

    def execute_dummy_batch(self) -> None:
        self._guarded(super().execute_dummy_batch)

    def _guarded(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._guard is None:
            return call(*args, **kwargs)
        return self._guard.output(self._guard.call(call, *args, **kwargs))

    def shutdown(self) -> None:
        if self._guard is not None:
            self._guard.close()
        if self._ring is not None:
            self._ring.close()
        finish_teardown()
        if self._guard is None or not self._guard.has_failed:
            super().shutdown()  # waits for the device, which raises if it has been stopped

    def compiled_operators(self) -> list[str]:
        """Names of the compiled operators that this worker's layers call."""
        return names_in_use()

    def overlap_decisions(self) -> dict[str, int]:
        """Reasons why steps were split or not: reason -> number of steps of this worker."""
        decisions: dict[str, int] = self.model_runner.splitter.counts()
        return decisions

    def graph_replays(self) -> dict[int, int]:
        """Tokens of a captured graph -> steps of this worker that replayed it."""
        return self.model_runner.graphs.replays()

    def draft_replays(self) -> dict[int, int]:
        """Tokens of a drafter's graph -> its passes that replayed it; empty if it runs eagerly."""
        of_drafter = self.model_runner.graphs.of_drafter
        return {} if of_drafter is None else of_drafter.replays()

    def num_kv_cache_blocks(self) -> int:
        """Number of KV cache blocks, including the null block."""
        return int(self.model_runner.kv_cache_config.num_blocks)

    def profile(
        self, is_start: bool = True, profile_prefix: str | None = None, **options: Any
    ) -> None:
        if is_start and self.profiler is None and self.profiler_config.profiler == "torch":
            trace_name = f"{profile_prefix or 'npu'}_rank{self.rank}"
            self.profiler = TorchProfilerWrapper(
                self.profiler_config,
                worker_name=trace_name,
                local_rank=self.local_rank,
                activities=profiler_activities(self.profiler_config.torch_profiler_activities),
            )
        super().profile(is_start=is_start, profile_prefix=profile_prefix, **options)
