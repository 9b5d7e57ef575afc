"""Models an engine's steps by every schedule that it could follow, for the option `step_costs`."""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

from vllm_davinci.meta.dry_run.this_process import become_rank

# Tokens of the steps with prefills that are compared where the command names none, and requests of
# those in which all decode.
SIZES = (128, 256, 512, 1024, 2048, 4096, 8192, 16384)
DECODES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
# Where two schedules come within this share of each other, sizes between are modelled too, until
# they are so near to each other.
_CLOSE = 0.1
_NEIGHBOURS = 1.5
# Steps from this size on decide about the options that all split steps share.
_LARGE = 2048
_FIRST_SHARES = (None, 0.53, 0.57)
_NORM_VECTOR_CORES = (None, 8)


def measure(
    options: argparse.Namespace, engine_arguments: list[str], sizes: Sequence[int]
) -> dict[str, Any]:
    """Content of the file of `step_costs`, in modelled picoseconds. Raises DryRunError."""
    explored = start(options, engine_arguments, max(sizes))
    found = {**explored.described(options.model), **explore(explored, sizes)}
    explored.close()
    return found


def start(options: argparse.Namespace, engine_arguments: list[str], most_tokens: int) -> Any:
    """An Exploration of an engine with room for steps of so many tokens. Raises DryRunError."""
    machine = become_rank(options)
    from vllm_davinci.meta.dry_run.engine import start_engine
    from vllm_davinci.meta.dry_run.executor import few_layers_warm_up
    from vllm_davinci.meta.dry_run.exploration import Exploration
    from vllm_davinci.meta.dry_run.workload import Workload

    of_request = max(1, most_tokens // max(DECODES))
    room = Workload(max(DECODES), max(DECODES), (of_request,), (8,))
    # Graphs are captured when they are compared.
    with few_layers_warm_up():
        engine, arguments = start_engine(
            options.model, room, options.routing, with_schedules(engine_arguments), machine
        )
    return Exploration(engine, arguments, machine)


def explore(explored: Any, sizes: Sequence[int]) -> dict[str, Any]:
    """Durations of steps by schedule, and the options with which split steps are the fastest."""
    from vllm_davinci.meta.dry_run.exploration import least

    asked = explored.prefill_sizes(sizes)
    if explored.can_shard:
        sharded, steps = _sharded(explored, asked)
    else:
        sharded, steps = {}, [_step(explored, size) for size in asked]
    steps = list(_with_sizes_between(explored, steps))
    options = _options_of_splits(explored, steps) if explored.can_split else {}
    for step in steps:
        step["whole"] = least(step["by_method"]["whole"])
        step["split"] = least(step["by_method"]["split"])
    gains = any(step["split"] < step["whole"] for step in steps)
    if explored.can_split:
        options = {"dbo.enabled": gains, **(options if gains else {})}
    return {"steps": steps, "decodes": _decodes(explored), "options": {**sharded, **options}}


def _sharded(explored: Any, sizes: Sequence[int]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The options of sequence parallelism with which steps are the fastest, and the steps by them.

    From the smallest size on of which it makes all larger ones faster, whole or as ubatches.
    """

    def measured(num_tokens: int | None) -> list[dict[str, Any]]:
        explored.shard_from(num_tokens)
        return [_step(explored, size) for size in sizes]

    def least(step: dict[str, Any]) -> int:
        return min(_schedules(step).values())

    plain, sharded = measured(None), measured(1)
    num_plain = len(sizes)
    while num_plain and least(sharded[num_plain - 1]) < least(plain[num_plain - 1]):
        num_plain -= 1
    first = sizes[num_plain] if num_plain < len(sizes) else None
    explored.shard_from(first)
    chosen: dict[str, Any] = {"sequence_parallel.enabled": first is not None}
    if first is not None:
        chosen["sequence_parallel.min_tokens"] = first
    return chosen, plain[:num_plain] + sharded[num_plain:]


def _step(explored: Any, size: int) -> dict[str, Any]:
    """Durations of a step of so many tokens, by each way to the experts."""
    from vllm_davinci.meta.dry_run.exploration import Schedule, named

    def measured(steps: str, is_split: bool) -> dict[str, int]:
        return {
            name: explored.prefill_ps(size, Schedule(method, is_split))
            for name, method in named(explored.methods(steps)).items()
        }

    whole = measured("whole", is_split=False)
    split = measured("split", is_split=True) if explored.can_split else whole
    return {"tokens": size, "by_method": {"whole": whole, "split": split}}


def _with_sizes_between(explored: Any, steps: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The steps, and others between them as far as decisions between these are close.

    Durations are no straight lines: what the host or memory bounds stays, and then rises. An error
    of interpolation matters where it turns a decision.
    """
    yield from steps[:1]
    for before, after in itertools.pairwise(steps):
        size = round(math.sqrt(before["tokens"] * after["tokens"]))
        if after["tokens"] > _NEIGHBOURS * before["tokens"] and _is_close(before, after):
            between = _step(explored, size)
            yield from list(_with_sizes_between(explored, [before, between, after]))[1:]
        else:
            yield after


def _is_close(before: dict[str, Any], after: dict[str, Any]) -> bool:
    """Whether another schedule than the fastest of one of both may be the fastest between them."""
    ordered = [
        sorted((ps, name) for name, ps in _schedules(step).items()) for step in (before, after)
    ]
    if ordered[0][0][1] != ordered[1][0][1]:
        return True
    return any(each[1][0] < (1 + _CLOSE) * each[0][0] for each in ordered if len(each) > 1)


def _schedules(step: dict[str, Any]) -> dict[tuple[str, str], int]:
    by_method = step["by_method"]
    kinds = ("whole",) if by_method["split"] is by_method["whole"] else ("whole", "split")
    return {(kind, name): ps for kind in kinds for name, ps in by_method[kind].items()}


def _options_of_splits(explored: Any, steps: list[dict[str, Any]]) -> dict[str, Any]:
    """The options with which large split steps are the fastest; `steps` get their durations, and
    the share of their first ubatch, which each has for itself."""
    from vllm_davinci.meta.dry_run.exploration import Schedule, least, named

    methods = named(explored.methods("split"))
    large = [step for step in steps if step["tokens"] >= _LARGE] or steps[-1:]

    def shares(step: dict[str, Any], cores: int | None) -> dict[float | None, int]:
        known = step["by_method"]["split"]
        method = methods[min(known, key=known.__getitem__)]
        return {
            share: least(known)
            if (share, cores) == (None, None)
            else explored.prefill_ps(step["tokens"], Schedule(method, True, share, cores))
            for share in _FIRST_SHARES
        }

    by_cores = {cores: [shares(step, cores) for step in large] for cores in _NORM_VECTOR_CORES}
    plain = [least(step["by_method"]["split"]) for step in large]

    def relative(cores: int | None) -> float:
        return sum(least(a) / b for a, b in zip(by_cores[cores], plain, strict=True))

    cores = min(by_cores, key=relative)
    chosen = {
        step["tokens"]: min(found, key=found.__getitem__)
        for step, found in zip(large, by_cores[cores], strict=True)
    }
    for step in steps:
        step["first_share"] = share = chosen.get(step["tokens"])
        if (share, cores) != (None, None):
            step["by_method"]["split"] = {
                name: explored.prefill_ps(step["tokens"], Schedule(method, True, share, cores))
                for name, method in methods.items()
            }
    return {"dbo.split": "token", "dbo.norm_vector_cores": cores}


def _decodes(explored: Any) -> list[dict[str, Any]]:
    from vllm_davinci.meta.dry_run.exploration import named

    sizes = explored.decode_sizes(DECODES)
    columns = {
        name: explored.decodes_ps(method, sizes)
        for name, method in named(explored.methods("decodes")).items()
    }
    tokens = next(iter(columns.values()))
    return [
        {"tokens": each, "by_method": {name: column[each] for name, column in columns.items()}}
        for each in tokens
    ]


def with_schedules(engine_arguments: list[str]) -> list[str]:
    """The options of an engine that may split steps anywhere, and decides nothing by costs."""
    parser = argparse.ArgumentParser(prog="vllm-davinci dry-run", allow_abbrev=False)
    parser.add_argument("--additional-config", type=json.loads, default={})
    known, others = parser.parse_known_args(engine_arguments)
    config = {**known.additional_config, "step_costs": None}
    dbo = {"enabled": True, **config.get("dbo", {}), "split": "token"}
    return [*others, f"--additional-config={json.dumps({**config, 'dbo': dbo})}"]
