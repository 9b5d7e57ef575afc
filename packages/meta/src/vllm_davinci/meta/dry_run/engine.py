"""The engine of a dry-run: vLLM's own, in this process, as one rank among phantoms."""

from __future__ import annotations

import argparse
import dataclasses
import time
from typing import TYPE_CHECKING, Any

import torch
from vllm import LLM
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from vllm_davinci.meta.dry_run.executor import PhantomExecutor
from vllm_davinci.meta.dry_run.layout import Layout, busiest_rank
from vllm_davinci.meta.dry_run.report import DryRun, MemoryPlan
from vllm_davinci.meta.dry_run.serving import fixed_arguments
from vllm_davinci.meta.dry_run.workload import Workload, serve
from vllm_davinci.meta.errors import DryRunError
from vllm_davinci.vnpu.timing import Machine

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def run_workload(
    model: str, workload: Workload, routing: str, engine_arguments: list[str], machine: Machine
) -> DryRun:
    """Runs the requests step by step. Raises DryRunError with what to change."""
    begin = time.monotonic()
    arguments = _engine_options(model, workload, engine_arguments)
    layout = _take_layout(arguments, routing)
    world_size = (
        arguments.tensor_parallel_size * layout.data_parallel_size * layout.pipeline_parallel_size
    )
    machine.require_ranks(world_size)
    layout.tell()
    try:
        fields = dataclasses.fields(arguments)
        llm = LLM(**{field.name: getattr(arguments, field.name) for field in fields})
    except torch.OutOfMemoryError as error:
        raise DryRunError(
            f"weights, KV cache and the buffers of the start do not fit into "
            f"{machine.memory_bytes / 2**30:.0f} GiB of each {machine.chip}: "
            f"{str(error).splitlines()[0]} Use more ranks, a quantized checkpoint, a chip with "
            "more memory, or a lower --kv-cache-memory-bytes where that is given."
        ) from error
    except ValueError as error:
        raise DryRunError(str(error)) from error
    start_seconds = time.monotonic() - begin
    config = llm.llm_engine.vllm_config
    executor = _executor_of(llm)
    try:
        steps, served = serve(llm.llm_engine, executor, workload)
    except torch.OutOfMemoryError as error:
        # What vLLM plans with is the memory of tensors at most, without what lies between them.
        raise DryRunError(
            f"a step of {sum(executor.scheduled.values())} tokens does not fit beside the KV cache "
            f"that vLLM has planned: {str(error).splitlines()[0]} Lower --max-num-batched-tokens "
            "or --gpu-memory-utilization, or set PYTORCH_NPU_ALLOC_CONF=expandable_segments:True."
        ) from error
    return DryRun(
        machine=machine,
        model=model,
        world_size=world_size,
        layout=layout,
        memory=_memory_plan(executor, config, machine),
        steps=steps,
        served=served.to_json(),
        start_seconds=start_seconds,
    )


def _engine_options(model: str, workload: Workload, engine_arguments: list[str]) -> EngineArgs:
    parser = EngineArgs.add_cli_args(
        FlexibleArgumentParser(prog="vllm-davinci dry-run", exit_on_error=False)
    )
    # Everything at once, so that steps are the ones that were asked for.
    ours = [
        f"--max-model-len={workload.longest}",
        f"--max-num-seqs={workload.concurrency}",
        f"--max-num-batched-tokens={max(workload.largest_prompts(), 64)}",
        "--no-enable-prefix-caching",
        "--skip-tokenizer-init",
    ]
    try:
        parsed = parser.parse_args(["--model", model, *ours, *engine_arguments, *fixed_arguments()])
    except argparse.ArgumentError as error:
        raise DryRunError(str(error)) from error
    return EngineArgs.from_cli_args(parsed)


def _take_layout(arguments: EngineArgs, routing: str) -> Layout:
    """Leaves the engine one data-parallel rank and one stage. Raises DryRunError for the rest that
    needs other ranks."""
    if arguments.kv_transfer_config is not None:
        raise DryRunError(
            "a KV connector waits for another engine: leave out --kv-transfer-config, and dry-run "
            "the engines of prefills and of decodes by themselves."
        )
    if arguments.enable_eplb:
        raise DryRunError(
            "expert load balancing moves the weights of real ranks: leave out --enable-eplb, and "
            "state what it reaches with --routing (1 is balanced)."
        )
    if arguments.speculative_config is not None:
        raise DryRunError(
            "speculative decoding depends on which drafts are accepted: leave out "
            "--speculative-config."
        )
    expert_ranks = arguments.tensor_parallel_size * arguments.data_parallel_size
    layout = Layout(
        data_parallel_size=arguments.data_parallel_size,
        pipeline_parallel_size=arguments.pipeline_parallel_size,
        busiest=busiest_rank(routing, expert_ranks),
    )
    arguments.additional_config = layout.options(arguments.additional_config or {})
    arguments.data_parallel_size = 1
    arguments.data_parallel_size_local = None
    arguments.pipeline_parallel_size = 1
    return layout


def _executor_of(llm: LLM) -> PhantomExecutor:
    core: Any = llm.llm_engine.engine_core
    executor = core.engine_core.model_executor
    assert isinstance(executor, PhantomExecutor)
    return executor


def _memory_plan(executor: PhantomExecutor, config: VllmConfig, machine: Machine) -> MemoryPlan:
    worker: Any = executor.driver_worker.worker
    cache = config.cache_config
    blocks = cache.num_gpu_blocks or 0
    return MemoryPlan(
        total_bytes=machine.memory_bytes,
        weight_bytes=int(worker.model_runner.model_memory_usage),
        activation_bytes=int(getattr(worker, "peak_activation_memory", 0) or 0),
        other_bytes=int(getattr(worker, "non_torch_memory", 0) or 0),
        graph_bytes=worker.graph_bytes,
        piece_bytes=worker.piece_bytes,
        cache_bytes=worker.available_kv_cache_memory_bytes,
        cache_tokens=blocks * cache.block_size,
    )
