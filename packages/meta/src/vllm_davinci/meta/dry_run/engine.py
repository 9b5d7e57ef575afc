"""The engine of a dry-run: vLLM's own, in this process, as one rank among phantoms."""

from __future__ import annotations

import argparse
import dataclasses
import time
from typing import TYPE_CHECKING, Any

import torch
from vllm import LLM, SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from vllm_davinci.meta.dry_run.executor import PhantomExecutor, PhantomWorker
from vllm_davinci.meta.dry_run.report import DryRun, MemoryPlan, Step
from vllm_davinci.meta.errors import DryRunError
from vllm_davinci.vnpu.timing import (
    Machine,
    read_report,
    restart_timeline,
    set_routed_share,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# A token that is no special one of any model that we know; what it is does not matter.
_PROMPT_TOKEN = 100


def run_workload(
    options: argparse.Namespace, engine_arguments: list[str], machine: Machine
) -> DryRun:
    """Runs the requests step by step. Raises DryRunError with what to change."""
    begin = time.monotonic()
    arguments = _engine_options(options, engine_arguments)
    _require_supported(arguments)
    world_size = arguments.tensor_parallel_size * arguments.pipeline_parallel_size
    machine.require_ranks(world_size)
    try:
        fields = dataclasses.fields(arguments)
        llm = LLM(**{field.name: getattr(arguments, field.name) for field in fields})
    except torch.OutOfMemoryError as error:
        raise DryRunError(
            f"the weights do not fit into {machine.memory_bytes / 2**30:.0f} GiB of each "
            f"{machine.chip}: {str(error).splitlines()[0]} Use more ranks, a quantized "
            "checkpoint or a chip with more memory."
        ) from error
    except ValueError as error:
        raise DryRunError(str(error)) from error
    start_seconds = time.monotonic() - begin
    config = llm.llm_engine.vllm_config
    executor = _executor_of(llm)
    _share_rows(config)
    steps = _steps_of(llm, executor, options)
    return DryRun(
        machine=machine,
        model=options.model,
        world_size=world_size,
        memory=_memory_plan(executor, config, machine),
        steps=steps,
        start_seconds=start_seconds,
    )


def _engine_options(options: argparse.Namespace, engine_arguments: list[str]) -> EngineArgs:
    parser = EngineArgs.add_cli_args(
        FlexibleArgumentParser(prog="vllm-davinci dry-run", exit_on_error=False)
    )
    # Everything at once, so that steps are the ones that were asked for.
    longest = options.prompt_tokens + options.output_tokens
    ours = [
        f"--max-model-len={longest}",
        f"--max-num-seqs={options.requests}",
        f"--max-num-batched-tokens={max(options.requests * options.prompt_tokens, 64)}",
        "--no-enable-prefix-caching",
        "--no-async-scheduling",
    ]
    fixed = [
        "--load-format=dummy",
        "--skip-tokenizer-init",
        f"--distributed-executor-backend={_name_of(PhantomExecutor)}",
        f"--worker-cls={_name_of(PhantomWorker)}",
    ]
    try:
        parsed = parser.parse_args(["--model", options.model, *ours, *engine_arguments, *fixed])
    except argparse.ArgumentError as error:
        raise DryRunError(str(error)) from error
    return EngineArgs.from_cli_args(parsed)


def _name_of(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _require_supported(arguments: EngineArgs) -> None:
    """Refuses what needs something that only another rank knows."""
    if arguments.pipeline_parallel_size > 1:
        raise DryRunError(
            "pipeline parallelism waits for hidden states of a phantom rank: leave out "
            "--pipeline-parallel-size, and dry-run one stage with fewer layers "
            "(--hf-overrides '{\"num_hidden_layers\": N}')."
        )
    if arguments.data_parallel_size > 1:
        raise DryRunError(
            "data parallelism is not available in dry-runs yet: leave out --data-parallel-size "
            "and give the requests of one data-parallel rank."
        )
    if arguments.kv_transfer_config is not None or arguments.enable_eplb:
        raise DryRunError(
            "KV connectors and expert load balancing need real ranks: leave them out."
        )


def _executor_of(llm: LLM) -> PhantomExecutor:
    core: Any = llm.llm_engine.engine_core
    executor = core.engine_core.model_executor
    assert isinstance(executor, PhantomExecutor)
    return executor


def _share_rows(config: VllmConfig) -> None:
    """Balanced routing: of the rows of all experts, a rank has its equal part."""
    parallel = config.parallel_config
    if config.model_config.is_moe and parallel.enable_expert_parallel:
        set_routed_share(1, parallel.tensor_parallel_size * parallel.data_parallel_size)


def _steps_of(llm: LLM, executor: PhantomExecutor, options: argparse.Namespace) -> list[Step]:
    engine = llm.llm_engine
    params = SamplingParams(
        max_tokens=options.output_tokens, ignore_eos=True, temperature=0.0, detokenize=False
    )
    for number in range(options.requests):
        prompt: Any = {"prompt_token_ids": [_PROMPT_TOKEN] * options.prompt_tokens}
        engine.add_request(str(number), prompt, params)
    steps = []
    restart_timeline()
    before = read_report()
    while engine.has_unfinished_requests():
        host = time.monotonic()
        executor.scheduled = {}
        engine.step()
        wall_seconds = time.monotonic() - host
        after = read_report()
        steps.append(Step(tuple(executor.scheduled.values()), after - before, wall_seconds))
        before = after
    return steps


def _memory_plan(executor: PhantomExecutor, config: VllmConfig, machine: Machine) -> MemoryPlan:
    worker: Any = executor.driver_worker.worker
    cache = config.cache_config
    blocks = cache.num_gpu_blocks or 0
    return MemoryPlan(
        total_bytes=machine.memory_bytes,
        weight_bytes=int(worker.model_runner.model_memory_usage),
        activation_bytes=int(getattr(worker, "peak_activation_memory", 0) or 0),
        other_bytes=int(getattr(worker, "non_torch_memory", 0) or 0),
        cache_bytes=int(getattr(worker, "available_kv_cache_memory_bytes", 0) or 0),
        cache_tokens=blocks * cache.block_size,
    )
