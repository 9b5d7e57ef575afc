"""vLLM's runner, whose steps of decodes replay captured graphs."""

import time
from typing import Any

import torch
import torch.distributed as dist
import torch_npu
from vllm.compilation.cuda_graph import CUDAGraphWrapper
from vllm.compilation.monitor import set_cudagraph_capturing_enabled
from vllm.config import CUDAGraphMode
from vllm.distributed.parallel_state import get_world_group, is_global_first_rank
from vllm.forward_context import BatchDescriptor
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.workspace import lock_workspace

from vllm_davinci.core.config.parsing import get_config
from vllm_davinci.core.device.soc import GraphLimits
from vllm_davinci.core.errors import DeviceError
from vllm_davinci.core.graph.plan import CapturePlan, plan_capture
from vllm_davinci.core.graph.wrapper import NPUGraphWrapper
from vllm_davinci.core.log import init_logger

logger = init_logger(__name__)


class GraphRunner(GPUModelRunner):
    """Captures the sizes that vLLM's dispatcher asks for, within the device's limits."""

    model: Any

    # Of captured graphs on this device, and what the largest decode step needs; set by the worker.
    graph_limits = GraphLimits(streams=1984, events=65536)
    decode_memory_bytes: int | None = None

    def load_model(self, load_dummy_weights: bool = False) -> None:
        super().load_model(load_dummy_weights)
        if isinstance(self.model, CUDAGraphWrapper):
            # vLLM's own, which names torch.cuda's graphs.
            self.model = NPUGraphWrapper(self.get_model(), self.vllm_config)

    def capture_model(self) -> int:
        """Captures every size, the largest first. Returns the bytes of device memory it took.

        All ranks capture the same sizes: one that a rank cannot capture is given up by all.
        Raises DeviceError for it when the options say so.
        """
        if self.compilation_config.cudagraph_mode == CUDAGraphMode.NONE:
            return 0
        begin = time.perf_counter()
        self._keep_sizes(self._plan())
        torch.accelerator.synchronize()
        torch.accelerator.empty_cache()
        before = torch.accelerator.get_memory_info()[0]
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
        torch.accelerator.synchronize()
        taken = before - torch.accelerator.get_memory_info()[0]
        lock_workspace()
        logger.info_once(
            "Graph mode: %d graphs captured in %.1f s, %.1f MiB of device memory.",
            len(captured),
            time.perf_counter() - begin,
            taken / (1 << 20),
        )
        return int(taken)

    def _plan(self) -> CapturePlan:
        sizes = {
            descriptor.num_tokens
            for _, descriptors in self.cudagraph_dispatcher.get_capture_descs()
            for descriptor in descriptors
        }
        num_layers = sum(len(group.layer_names) for group in self.kv_cache_config.kv_cache_groups)
        plan = plan_capture(self.vllm_config, sorted(sizes), num_layers, self.decode_memory_bytes)
        return plan.within(self.graph_limits)

    def _keep_sizes(self, plan: CapturePlan) -> None:
        logger.info_once("Graph mode, plan of a rank: %s.", plan.told())
        self._use_sizes(list(plan.sizes))

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
        """Why the size was not captured on some rank; None if it was on all."""
        failure: str | None = None
        try:
            self._warmup_and_capture(descriptor, cudagraph_runtime_mode=mode)
            torch.accelerator.synchronize()
        except RuntimeError as error:
            failure = f"{type(error).__name__}: {error}"
            logger.exception("The graph of %d tokens was not captured.", descriptor.num_tokens)
        world = get_world_group()
        if world.world_size > 1:
            is_captured = torch.tensor(failure is None, dtype=torch.int32)
            dist.all_reduce(is_captured, op=dist.ReduceOp.MIN, group=world.cpu_group)
            if not is_captured and failure is None:
                failure = "another rank could not; see its log"
        if failure is not None and isinstance(self.model, NPUGraphWrapper):
            self.model.forget(descriptor)
        return failure

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
