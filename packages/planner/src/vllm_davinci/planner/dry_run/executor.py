"""Runs one worker in this process, as rank 0 of the whole group."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
import torch_npu
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed.parallel_state import get_pp_group
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.outputs import AsyncModelRunnerOutput

from vllm_davinci.core.config.parsing import get_config
from vllm_davinci.core.fused_moe.expert_layout import expert_layout
from vllm_davinci.core.ubatch.largest_steps import largest_steps
from vllm_davinci.core.worker import NPUWorker
from vllm_davinci.planner.dry_run import phantom_group
from vllm_davinci.planner.dry_run.layout import Layout
from vllm_davinci.planner.dry_run.priced_dispatch import price_dispatch
from vllm_davinci.planner.dry_run.sampled_tokens import (
    AcceptedDrafts,
    SampledTokens,
    StepOutput,
    output_of_last_stage,
)
from vllm_davinci.planner.dry_run.stack import stack_of
from vllm_davinci.planner.errors import DryRunError
from vllm_davinci.vnpu.timing import set_routed_share

# Number of layers for warm-up and graph capture; None: all.
_WARMED_LAYERS: ContextVar[int | None] = ContextVar("warmed_layers", default=None)


@contextmanager
def few_layers_warm_up() -> Iterator[None]:
    """Inside the block, engines start with graphs of one layer, which must not be replayed."""
    token = _WARMED_LAYERS.set(1)
    try:
        yield
    finally:
        _WARMED_LAYERS.reset(token)


class PhantomExecutor(UniProcExecutor):
    """Executor of the engine, which vLLM finds by its name.

    scheduled: number of tokens by request in the newest step
    """

    scheduled: dict[str, int]

    def _init_executor(self) -> None:
        self.scheduled = {}
        super()._init_executor()

    def execute_model(self, scheduler_output: SchedulerOutput, non_block: bool = False) -> Any:
        self.scheduled = dict(scheduler_output.num_scheduled_tokens)
        return super().execute_model(scheduler_output, non_block)


class PhantomWorker(NPUWorker):
    """Worker with the configuration of the whole layout; --worker-cls names it."""

    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        layout = Layout.told()
        config = copy.copy(vllm_config)
        config.parallel_config = copy.copy(vllm_config.parallel_config)
        layout.restore(config.parallel_config, config.model_config.is_moe)
        self._layout = layout
        self.largest_steps: dict[str, int] = {}  # bytes of each step beside weights and cache
        self._sampled = SampledTokens()
        self._tokens: dict[str, list[int]] = {}  # of the newest step
        super().__init__(config, *args, **kwargs)

    def init_device(self) -> None:
        phantom_group.start(self.parallel_config.world_size_across_dp)
        with set_current_vllm_config(self.vllm_config):
            super().init_device()
        if self.model_config.is_moe:
            layout = expert_layout(self.parallel_config, get_config(self.vllm_config))
            set_routed_share(*self._layout.routed_share(layout.ep_size))

    def compile_or_warm_up_model(self) -> Any:
        runner: Any = self.model_runner
        count, stack = _WARMED_LAYERS.get(), stack_of(runner.get_model(), runner.prefetches)
        with nullcontext() if count is None or stack is None else stack.only(count):
            times = super().compile_or_warm_up_model()
        self._run_largest_steps(runner.graphs.captured_bytes)
        return times

    def _run_largest_steps(self, captured_bytes: int) -> None:
        """Runs the largest steps with the cache, the graphs, and memory for planned graphs that
        were not captured.

        Raises DryRunError if one does not fit.
        """
        # Steps allocate the workspaces themselves.
        graph_bytes = max(0, self.graph_bytes - self.workspace_bytes - captured_bytes)
        graphs = torch.empty(graph_bytes, dtype=torch.uint8, device=self.device)
        before = torch.accelerator.memory_allocated()
        slots = self.num_kv_cache_blocks() * self.cache_config.block_size
        for step in largest_steps(self.model_runner, slots):
            torch_npu.npu.reset_peak_memory_stats()
            try:
                with set_current_vllm_config(self.vllm_config):
                    step.run(self.model_runner)
            except torch.OutOfMemoryError as error:
                raise DryRunError(
                    f"a step of {step} does not fit beside vLLM's planned KV cache: "
                    f"{str(error).splitlines()[0]} Lower --max-num-batched-tokens, "
                    "--gpu-memory-utilization, or --kv-cache-memory-bytes if given."
                ) from error
            self.largest_steps[str(step)] = torch.accelerator.max_memory_allocated() - before
        del graphs
        torch.accelerator.empty_cache()

    def _step_guard(self) -> None:
        """Returns none: phantom ranks do not fail."""

    def load_model(self, **kwargs: Any) -> None:
        with set_current_vllm_config(self.vllm_config):
            super().load_model(**kwargs)
        runner: Any = self.model_runner
        if runner.computed_tokens is not None:
            runner.computed_tokens.__class__ = AcceptedDrafts
        self.tried_method = price_dispatch(runner.get_model(), self._layout)

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        self._tokens = self._sampled.of_step(scheduler_output)
        drafts = self.model_runner.computed_tokens
        if isinstance(drafts, AcceptedDrafts):
            drafts.scheduled = scheduler_output.num_scheduled_tokens
        return super().execute_model(scheduler_output)

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> Any:
        output = super().sample_tokens(grammar_output)
        if isinstance(output, AsyncModelRunnerOutput):
            return StepOutput(output, self._tokens)
        if output is None or get_pp_group().is_last_rank:
            return output
        return output_of_last_stage(self._tokens)
