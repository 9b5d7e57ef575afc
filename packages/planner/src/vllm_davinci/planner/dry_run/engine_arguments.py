"""Parses a dry-run's options of `vllm serve`, for one rank among phantoms."""

from __future__ import annotations

import sys
from argparse import ArgumentError, Namespace
from collections.abc import Iterable, Sequence
from dataclasses import fields
from functools import cache
from typing import Any

from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.common.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from vllm_davinci.core.config.described import described_only
from vllm_davinci.core.config.parsing import parse_config
from vllm_davinci.core.fused_moe.expert_layout import expert_layout
from vllm_davinci.planner.dry_run.layout import BALANCED, Layout, busiest_rank
from vllm_davinci.planner.errors import DryRunError
from vllm_davinci.vnpu.timing import Machine

_PACKAGE = "vllm_davinci.planner.dry_run.executor"
# Fixed options, which make the worker one rank among phantoms.
_FIXED: dict[str, Any] = {
    "load_format": "dummy",
    "async_scheduling": False,
    "worker_cls": f"{_PACKAGE}.PhantomWorker",
}
# Name of a parsed option, true unless asynchronous scheduling is off. A dry-run's steps are
# synchronous; its modelled host clock excludes the time that asynchronous scheduling would hide.
HIDES_HOST = "hides_host"
# Options about the location of other ranks, or about reading weights.
_WITHOUT_EFFECT = (
    "headless",
    "data_parallel_size_local",
    "data_parallel_rank",
    "data_parallel_start_rank",
    "data_parallel_address",
    "data_parallel_rpc_port",
    "data_parallel_backend",
    "data_parallel_hybrid_lb",
    "data_parallel_external_lb",
    "nnodes",
    "node_rank",
    "master_addr",
    "master_port",
    "distributed_executor_backend",
    "distributed_timeout_seconds",
    "model_loader_extra_config",
    "download_dir",
    "safetensors_load_strategy",
    "profiler_config",
    "load_format",
)
# Engine options that read text; only a server has a tokenizer for them.
_OF_TEXTS = ("reasoning_parser", "reasoning_parser_plugin")
# vLLM's executors that a dry-run can replace.
_EXECUTORS = (None, "mp", "ray", "uni")


_BALANCE = (
    "{} moves weights between real ranks and is not modelled: leave it out, and state the "
    "balance it reaches with --routing (1 is balanced)."
)


class PhantomEngineArgs(AsyncEngineArgs):
    """vLLM's engine arguments for an engine that starts one data-parallel rank and one stage.

    The configuration is resolved for the whole layout, as in a real engine. Then the ranks that do
    not exist are removed from it and passed to the worker separately.
    """

    layout = Layout()  # set by `for_machine`
    hides_host = True  # set by `for_machine`: vLLM's own Python overlaps with the device

    @classmethod
    def for_machine(cls, parsed: Namespace, routing: str, machine: Machine) -> PhantomEngineArgs:
        """Builds the arguments. Raises DryRunError for layouts too large for the machine, and for
        options that need other ranks."""
        arguments: PhantomEngineArgs = cls.from_cli_args(parsed)
        arguments._refuse_what_needs_ranks()
        arguments.hides_host = getattr(parsed, HIDES_HOST)
        ranks = arguments.tensor_parallel_size * arguments.data_parallel_size
        machine.require_ranks(ranks * arguments.pipeline_parallel_size)
        is_balanced = routing == BALANCED
        arguments.layout = Layout(
            data_parallel_size=arguments.data_parallel_size,
            pipeline_parallel_size=arguments.pipeline_parallel_size,
            busiest=1.0 if is_balanced else busiest_rank(routing, arguments._expert_ranks()),
        )
        return arguments

    def _expert_ranks(self) -> int:
        """Number of ranks among which whole experts are distributed."""
        layout: Any = self  # has the requested sizes
        return expert_layout(layout, parse_config(self.additional_config)).ep_size

    def _refuse_what_needs_ranks(self) -> None:
        if self.kv_transfer_config is not None:
            raise DryRunError(
                "--kv-transfer-config needs another engine: leave it out, and dry-run the "
                "engines of prefills and of decodes separately."
            )
        if self.kv_offloading_size is not None:
            raise DryRunError(
                "--kv-offloading-size is not modelled, as host memory is not: leave it out; the "
                "device's work per computed token stays the same."
            )
        if self.enable_eplb:
            raise DryRunError(_BALANCE.format("--enable-eplb"))

    @property
    def world_size(self) -> int:
        """Number of ranks in the whole layout."""
        layout = self.layout
        return self.tensor_parallel_size * layout.data_parallel_size * layout.pipeline_parallel_size

    def create_engine_config(self, *args: Any, **options: Any) -> VllmConfig:
        """The configuration, resolved for the whole layout, then reduced to one rank."""
        with described_only():
            config = super().create_engine_config(*args, **options)
        if config.parallel_config.enable_eplb:
            raise DryRunError(_BALANCE.format("eplb_config of --additional-config"))
        self.layout.tell()
        self.layout.leave_one_rank(config.parallel_config)
        config.parallel_config.distributed_executor_backend = f"{_PACKAGE}.PhantomExecutor"
        return config


@cache
def _parser() -> FlexibleArgumentParser:
    return make_arg_parser(FlexibleArgumentParser(prog="vllm-davinci dry-run", exit_on_error=False))


def parse(defaults: Sequence[str], given: Sequence[str], has_server: bool = False) -> Namespace:
    """Parses options of `vllm serve`; prints those without effect to stderr. Raises DryRunError.

    defaults:   options that the user's options, `given`, override
    has_server: whether options of the front end have an effect
    """
    parser = _parser()
    try:
        parsed = parser.parse_args(_without_replaced(defaults, given))
    except ArgumentError as error:
        raise DryRunError(str(error)) from error
    executor = parsed.distributed_executor_backend
    if executor not in _EXECUTORS:
        raise DryRunError(
            f"--distributed-executor-backend {executor} is not supported by dry-run: leave it out."
        )
    if parsed.worker_cls != parser.get_default("worker_cls"):
        raise DryRunError("--worker-cls is set by dry-run itself: leave it out.")
    engine = {field.name for field in fields(AsyncEngineArgs)}
    front_end = {name for name in vars(parsed) if name not in engine}
    unused = {*_WITHOUT_EFFECT, *(() if has_server else (*front_end, *_OF_TEXTS))}
    _tell_of(name for name in unused if getattr(parsed, name) != parser.get_default(name))
    for name in (*_WITHOUT_EFFECT, *(() if has_server else _OF_TEXTS)):
        setattr(parsed, name, parser.get_default(name))
    setattr(parsed, HIDES_HOST, parsed.async_scheduling is not False)
    for name, value in _FIXED.items():
        setattr(parsed, name, value)
    return parsed


def _tell_of(without_effect: Iterable[str]) -> None:
    named = sorted(f"--{name.replace('_', '-')}" for name in without_effect)
    if named:
        print(
            f"vllm-davinci dry-run: {', '.join(named)} {'does' if len(named) == 1 else 'do'} "
            "nothing here: one rank runs, and no weights are read.",
            file=sys.stderr,
        )


def _without_replaced(defaults: Sequence[str], given: Sequence[str]) -> list[str]:
    """Merges the options; vLLM's parser warns of duplicates."""
    names = {_name(option) for option in given}
    return [*(option for option in defaults if _name(option) not in names), *given]


def _name(option: str) -> str:
    return option.split("=", 1)[0].replace("_", "-")
