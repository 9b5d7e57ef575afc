"""`vllm-davinci pools`: how many engines for prefill and for decode does a load need?

vllm-davinci pools --prefill PREFILL.json --decode DECODE.json --requests-per-second 20 \\
    --prompt-tokens 2048 --output-tokens 256

Both files are reports of `vllm-davinci dry-run --json`: the first of a run that prefills, the
second of one that decodes as many requests at a time as an engine does. All times are modelled: no
NPU was involved.
"""

import argparse
import dataclasses
import json
import math
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from vllm_davinci.planner.errors import DryRunError

_PS = 10**12  # picoseconds per second


@dataclasses.dataclass(frozen=True)
class Load:
    """Requests of one shape.

    utilization: fraction of time that an engine computes; the rest absorbs uneven arrivals
    """

    requests_per_second: float
    prompt_tokens: int
    output_tokens: int
    utilization: float

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if value <= 0 or (name == "utilization" and value > 1):
                most = ", at most 1" if name == "utilization" else ""
                raise DryRunError(
                    f"--{name.replace('_', '-')} {value} is not valid. Expected a number above "
                    f"0{most}."
                )


@dataclasses.dataclass(frozen=True)
class Pool:
    """Identical engines of one kind; times are modelled.

    engines:           number that the load needs
    devices:           devices per engine
    tokens_per_second: rate of an engine that never waits
    step_seconds:      median step time
    busy:              fraction of time that each engine computes under the load
    """

    engines: int
    devices: int
    tokens_per_second: float
    step_seconds: float
    busy: float


@dataclasses.dataclass(frozen=True)
class Pools:
    """Both pools, and the transfers between them.

    decode_requests:    mean number of requests in the decode pool
    decode_batch:       requests in each step of its report, over all data-parallel ranks
    cache_requests:     requests that a decode engine's KV cache holds
    transfer_bytes:     bytes of keys and values of a request's prompt
    transfer_bytes_per_second: bytes per second between the pools
    """

    load: Load
    prefill: Pool
    decode: Pool
    decode_requests: float
    decode_batch: int
    cache_requests: int
    transfer_bytes: float
    transfer_bytes_per_second: float

    def to_json(self) -> dict[str, Any]:
        return {"modelled": True, **dataclasses.asdict(self)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = __doc__
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    for kind, what in (("prefill", "prompts"), ("decode", "a token of each request")):
        parser.add_argument(
            f"--{kind}",
            type=Path,
            required=True,
            metavar="FILE",
            help=f"a dry-run's report (--json) with steps of {what}",
        )
    parser.add_argument("--requests-per-second", type=float, required=True, metavar="N")
    parser.add_argument("--prompt-tokens", type=int, required=True, metavar="N")
    parser.add_argument("--output-tokens", type=int, required=True, metavar="N")
    parser.add_argument(
        "--utilization",
        type=float,
        default=0.8,
        metavar="SHARE",
        help="share of time that an engine computes; the rest covers uneven arrivals (default: "
        "%(default)s, assumed)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """Exit status 0 with an answer, 2 for unusable files or numbers."""
    try:
        load = Load(
            options.requests_per_second,
            options.prompt_tokens,
            options.output_tokens,
            options.utilization,
        )
        pools = plan(_report_of(options.prefill), _report_of(options.decode), load)
    except DryRunError as error:
        Console(stderr=True).print(f"vllm-davinci pools: {error}", markup=False, soft_wrap=True)
        return 2
    if options.json:
        print(json.dumps(pools.to_json(), indent=2))
    else:
        _print(pools, Console())
    return 0


def plan(prefill: Mapping[str, Any], decode: Mapping[str, Any], load: Load) -> Pools:
    """The pools that a load needs. Raises DryRunError if a report lacks such steps.

    prefill, decode: reports of dry-runs
    """
    prompts = _prompt_steps(prefill)
    if not prompts:
        raise DryRunError(
            "The --prefill report has no prefill step. Run it again with --prompt-tokens above "
            "1 and, for example, --output-tokens 1."
        )
    decodes, batch = _decode_steps(decode)
    if not decodes:
        raise DryRunError(
            "The --decode report has no decode step. Run it again with --output-tokens 2 or more."
        )
    ranks = _data_parallel(decode)
    first = _pool(prefill, prompts, load.requests_per_second * load.prompt_tokens, load)
    # The prefill pool computes the first token, from the prompt's last position.
    rate = load.requests_per_second * max(load.output_tokens - 1, 0)
    second = _pool(decode, decodes, rate, load)
    memory = decode["memory"]
    token_bytes = memory["cache_bytes"] / max(memory["cache_tokens"], 1)
    token_bytes *= _devices(decode) / ranks
    request_bytes = token_bytes * load.prompt_tokens
    return Pools(
        load=load,
        prefill=first,
        decode=second,
        decode_requests=rate * second.step_seconds,
        decode_batch=batch * ranks,
        cache_requests=ranks
        * int(memory["cache_tokens"] // (load.prompt_tokens + load.output_tokens)),
        transfer_bytes=request_bytes,
        transfer_bytes_per_second=request_bytes * load.requests_per_second,
    )


def _pool(
    report: Mapping[str, Any], steps: list[Mapping[str, Any]], rate: float, load: Load
) -> Pool:
    """The engines needed for `rate` tokens per second in such steps."""
    tokens = sum(sum(step["tokens"]) for step in steps)
    seconds = sum(_seconds(step) for step in steps)
    of_engine = tokens / seconds * _data_parallel(report)
    engines = max(math.ceil(rate / (of_engine * load.utilization)), 1)
    return Pool(
        engines=engines,
        devices=_devices(report),
        tokens_per_second=of_engine,
        step_seconds=statistics.median(map(_seconds, steps)),
        busy=rate / (of_engine * engines),
    )


def _prompt_steps(report: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    most = report["decode_tokens"]
    return [step for step in report["steps"] if step["tokens"] and min(step["tokens"]) > most]


def _decode_steps(report: Mapping[str, Any]) -> tuple[list[Mapping[str, Any]], int]:
    """The decode steps of the largest batch, and its size."""
    most = report["decode_tokens"]
    found = [step for step in report["steps"] if step["tokens"] and max(step["tokens"]) <= most]
    batch = max((len(step["tokens"]) for step in found), default=0)
    return [step for step in found if len(step["tokens"]) == batch], batch


def _seconds(step: Mapping[str, Any]) -> float:
    return max(int(step["modelled"]["host_ps"]), 1) / _PS


def _devices(report: Mapping[str, Any]) -> int:
    return int(report["world_size"])


def _data_parallel(report: Mapping[str, Any]) -> int:
    return int(report["layout"]["data_parallel_size"])


def _report_of(file: Path) -> dict[str, Any]:
    try:
        report = json.loads(file.read_text(encoding="utf-8"))
        if not report["modelled"]:
            raise KeyError("modelled")
        report["steps"], report["memory"]["cache_tokens"], report["layout"]["data_parallel_size"]
        report["decode_tokens"]
        if report["layout"]["pipeline_parallel_size"] != 1:
            raise DryRunError(
                f"{file}: the report covers one of {report['layout']['pipeline_parallel_size']} "
                "pipeline stages. Make one with --pipeline-parallel-size 1."
            )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DryRunError(
            f"{file} is not a dry-run report ({error!r}). `vllm-davinci dry-run --json FILE` "
            "writes one."
        ) from None
    return dict(report)


def _print(pools: Pools, console: Console) -> None:
    load = pools.load
    console.print(
        f"{load.requests_per_second:g} requests/s of {load.prompt_tokens} prompt and "
        f"{load.output_tokens} output tokens, engines busy at most {load.utilization:.0%} of the "
        "time.\nAll times are modelled; nothing here was measured on an NPU.",
        markup=False,
    )
    table = Table(title="pools, modelled")
    for column in ("pool", "engines", "devices", "of each: tokens/s", "step, ms", "busy"):
        table.add_column(column, justify="left" if column == "pool" else "right")
    for name, pool in (("prefill", pools.prefill), ("decode", pools.decode)):
        table.add_row(
            name,
            str(pool.engines),
            str(pool.engines * pool.devices),
            f"{pool.tokens_per_second:,.0f}",
            f"{pool.step_seconds * 1000:.3f}",
            f"{pool.busy:.0%}",
        )
    console.print(table)
    console.print(
        f"Decode requests: {pools.decode_requests:.1f} in all; an engine has "
        f"{pools.decode_batch} in a step, and its KV cache holds "
        f"{pools.cache_requests}.\nBetween the pools: {pools.transfer_bytes / 2**20:.1f} MiB of "
        f"keys and values for each request, {pools.transfer_bytes_per_second / 1e9:.2f} GB/s in "
        "all.",
        markup=False,
    )
    if pools.cache_requests < pools.decode_batch:
        console.print(
            "A decode engine's KV cache holds fewer requests of this length than the "
            f"{pools.decode_batch} in its report's steps: run the report with as many as it "
            "holds.",
            markup=False,
        )
