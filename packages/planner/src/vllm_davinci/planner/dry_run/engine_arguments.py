"""Options of a dry-run's engine: those of `vllm serve`, for one rank among phantoms."""

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
# They make the worker one rank among phantoms.
_FIXED: dict[str, Any] = {
    "load_format": "dummy",
    "async_scheduling": False,
    "worker_cls": f"{_PACKAGE}.PhantomWorker",
}
# Of the parsed options: whether asynchronous scheduling was not turned off. Steps run one by one
# here, and the modelled host's clock says what it would have hidden.
HIDES_HOST = "hides_host"
# Options that say where the other ranks run and how they are reached, or how weights are read.
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
# Options of the engine that read texts, for which there is a tokenizer where there is a server.
_OF_TEXTS = ("reasoning_parser", "reasoning_parser_plugin")
# Executors of vLLM whose ranks a dry-run stands for.
_EXECUTORS = (None, "mp", "ray", "uni")


_BALANCE = (
    "expert load balancing moves the weights of real ranks: leave out {}, and state what it "
    "reaches with --routing (1 is balanced)."
)


class PhantomEngineArgs(AsyncEngineArgs):
    """vLLM's engine arguments, whose engine starts one data-parallel rank and one stage.

    Every decision of the configuration is made for the whole layout, as that of a real engine; the
    ranks that nobody starts leave it afterwards, and the worker is told of them.
    """

    layout = Layout()  # set by `for_machine`
    hides_host = True  # likewise: vLLM's own Python runs while the device does, as asked for

    @classmethod
    def for_machine(cls, parsed: Namespace, routing: str, machine: Machine) -> PhantomEngineArgs:
        """Raises DryRunError for layouts that the machine has no room for, and for options that
        need other ranks."""
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
        """Ranks among which whole experts are dealt out."""
        layout: Any = self  # has the sizes that are asked for
        return expert_layout(layout, parse_config(self.additional_config)).ep_size

    def _refuse_what_needs_ranks(self) -> None:
        if self.kv_transfer_config is not None:
            raise DryRunError(
                "a KV connector waits for another engine: leave out --kv-transfer-config, and "
                "dry-run the engines of prefills and of decodes by themselves."
            )
        if self.kv_offloading_size is not None:
            raise DryRunError(
                "a host's memory is not modelled: leave out --kv-offloading-size; what the device "
                "does with the tokens that it computes stays the same."
            )
        if self.enable_eplb:
            raise DryRunError(_BALANCE.format("--enable-eplb"))

    @property
    def world_size(self) -> int:
        """Ranks of the whole layout."""
        layout = self.layout
        return self.tensor_parallel_size * layout.data_parallel_size * layout.pipeline_parallel_size

    def create_engine_config(self, *args: Any, **options: Any) -> VllmConfig:
        """The configuration of the whole layout, without the ranks that nobody starts."""
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
    """Options of `vllm serve`; those that do nothing here are told of. Raises DryRunError.

    defaults:   options that those of the user, `given`, replace
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
            f"--distributed-executor-backend {executor} starts ranks that a dry-run does not stand "
            "for: leave it out."
        )
    if parsed.worker_cls != parser.get_default("worker_cls"):
        raise DryRunError("the worker of a dry-run is its own: leave out --worker-cls.")
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
    """All options; vLLM's parser warns of each that is there twice."""
    names = {_name(option) for option in given}
    return [*(option for option in defaults if _name(option) not in names), *given]


def _name(option: str) -> str:
    return option.split("=", 1)[0].replace("_", "-")
