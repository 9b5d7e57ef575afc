"""Runs vLLM's engine in this process, as one rank among phantoms."""

from __future__ import annotations

import atexit
import re
import time
from typing import TYPE_CHECKING, Any

import torch
from pydantic import ValidationError
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    MambaSpec,
    SlidingWindowSpec,
    iter_layer_specs,
)

from vllm_davinci.core.config.parsing import get_config
from vllm_davinci.core.config.step_costs import engine_of_costs
from vllm_davinci.core.errors import CoreError
from vllm_davinci.planner.dry_run.engine_arguments import PhantomEngineArgs, parse
from vllm_davinci.planner.dry_run.executor import PhantomExecutor
from vllm_davinci.planner.dry_run.report import DryRun, MemoryPlan
from vllm_davinci.planner.dry_run.sampled_prompt import sample
from vllm_davinci.planner.dry_run.workload import Workload, serve
from vllm_davinci.planner.errors import DryRunError
from vllm_davinci.vnpu.timing import Machine

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def start_engine(
    model: str, workload: Workload, routing: str, engine_arguments: list[str], machine: Machine
) -> tuple[LLMEngine, PhantomEngineArgs]:
    """Starts an engine with room for the workload. Raises DryRunError with what to change."""
    arguments = _engine_arguments(model, workload, routing, engine_arguments, machine)
    try:
        engine = LLMEngine.from_engine_args(arguments, UsageContext.LLM_CLASS)
        # Otherwise vLLM ends the engine at interpreter exit, after torch has destroyed its groups,
        # with a traceback behind our message.
        atexit.register(engine.engine_core.shutdown)
        return engine, arguments
    except torch.OutOfMemoryError as error:
        raise DryRunError(
            f"weights, KV cache and the buffers of the start do not fit into "
            f"{machine.memory_bytes / 2**30:.0f} GiB of each {machine.chip}: "
            f"{str(error).splitlines()[0]} Use more ranks, a quantized checkpoint, a chip with "
            "more memory, or a lower --kv-cache-memory-bytes where that is given."
        ) from error
    except ValidationError as error:
        said = "; ".join(each["msg"].removeprefix("Value error, ") for each in error.errors())
        raise DryRunError(_too_long(said, workload) or said) from error
    except (CoreError, ValueError) as error:
        raise DryRunError(str(error)) from error


def run_workload(
    model: str, workload: Workload, routing: str, engine_arguments: list[str], machine: Machine
) -> DryRun:
    """Runs the requests step by step. Raises DryRunError with what to change."""
    begin = time.monotonic()
    engine, arguments = start_engine(model, workload, routing, engine_arguments, machine)
    start_seconds = time.monotonic() - begin
    executor, config = executor_of(engine), engine.vllm_config
    prompt = None
    try:
        if workload.sampled_chunks is not None:
            longest = max(workload.prompt_tokens)
            prompt = sample(
                engine, executor, longest, workload.sampled_chunks, arguments.hides_host
            )
        steps, served = serve(engine, executor, workload, arguments.hides_host)
    except torch.OutOfMemoryError as error:
        # vLLM plans with the peak memory of tensors, without fragmentation.
        raise DryRunError(
            f"a step of {sum(executor.scheduled.values())} tokens does not fit beside the KV cache "
            f"that vLLM has planned: {str(error).splitlines()[0]} Lower --max-num-batched-tokens "
            "or --gpu-memory-utilization."
        ) from error
    return DryRun(
        machine=machine,
        model=model,
        world_size=arguments.world_size,
        decode_tokens=1 + config.num_speculative_tokens,
        layout=arguments.layout,
        engine=arguments.layout.of_whole(engine_of_costs(config, get_config(config))),
        memory=_memory_plan(executor, config, machine),
        steps=steps,
        # Requests that begin with the last token of their prompt have no other times.
        served={
            name: value for name, value in served.to_json().items() if not prompt or "tpot" in name
        },
        prompt=prompt,
        start_seconds=start_seconds,
    )


def _engine_arguments(
    model: str, workload: Workload, routing: str, engine_arguments: list[str], machine: Machine
) -> PhantomEngineArgs:
    # All at once, so that the steps are the requested ones.
    defaults = [
        f"--model={model}",
        f"--max-model-len={workload.longest}",
        f"--max-num-seqs={workload.concurrency}",
        f"--max-num-batched-tokens={max(workload.largest_prompts(), 64)}",
        "--no-enable-prefix-caching",
        "--skip-tokenizer-init",
    ]
    return PhantomEngineArgs.for_machine(parse(defaults, engine_arguments), routing, machine)


def _too_long(said: str, workload: Workload) -> str:
    """Advice if a request is longer than the model's context; empty for other errors of vLLM."""
    most = re.search(r"max_position_embeddings=(\d+)", said)
    if most is None or f"max_model_len ({workload.longest})" not in said:
        return ""
    return (
        f"--prompt-tokens and --output-tokens: a request has {workload.longest} tokens, and the "
        f"model {most[1]} positions. Lower one of the two."
    )


def executor_of(engine: LLMEngine) -> PhantomExecutor:
    core: Any = engine.engine_core
    executor = core.engine_core.model_executor
    assert isinstance(executor, PhantomExecutor)
    return executor


def _memory_plan(executor: PhantomExecutor, config: VllmConfig, machine: Machine) -> MemoryPlan:
    worker: Any = executor.driver_worker.worker
    cache = config.cache_config
    planned: KVCacheConfig = worker.model_runner.kv_cache_config
    tokens = planned.num_blocks * cache.block_size
    if len(planned.kv_cache_groups) > 1:  # whose blocks hold different parts of the context
        tokens = cache.kv_cache_size_tokens or 0
    token_bytes, request_bytes = _cache_of_requests(planned)
    return MemoryPlan(
        total_bytes=machine.memory_bytes,
        weight_bytes=int(worker.model_runner.model_memory_usage),
        activation_bytes=int(getattr(worker, "peak_activation_memory", 0) or 0),
        other_bytes=int(getattr(worker, "non_torch_memory", 0) or 0),
        graph_bytes=worker.graph_bytes,
        piece_bytes=worker.piece_bytes,
        cache_bytes=worker.available_kv_cache_memory_bytes,
        cache_tokens=tokens,
        token_bytes=token_bytes,
        request_bytes=request_bytes,
        profiled_bytes=worker.profiled_bytes,
        largest_steps=worker.largest_steps,
    )


def _cache_of_requests(planned: KVCacheConfig) -> tuple[int, int]:
    """Cache bytes per token, and per request for its windows and states."""
    if not planned.kv_cache_tensors:
        return 0, 0
    block_bytes = planned.kv_cache_tensors[0].size / planned.num_blocks
    of_token, of_request = 0.0, 0.0
    for group in planned.kv_cache_groups:
        spec = next(iter(iter_layer_specs(group.kv_cache_spec)))
        if isinstance(spec, SlidingWindowSpec):
            of_request += block_bytes * (-(-spec.num_retained_tokens // spec.block_size) + 1)
        elif isinstance(spec, MambaSpec):
            of_request += block_bytes
        else:
            of_token += block_bytes / spec.block_size
    return round(of_token), round(of_request)
