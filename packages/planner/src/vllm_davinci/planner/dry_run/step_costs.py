"""Models an engine's steps by every possible schedule, for the option `step_costs`."""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_davinci.planner.dry_run.this_process import become_rank
from vllm_davinci.vnpu.environment_variables import VNPU_TIMING_VARIANTS
from vllm_davinci.vnpu.timing.variants import encode

if TYPE_CHECKING:
    from vllm_davinci.vnpu.timing import Machine

# Default sizes: tokens of prefill steps, and requests of decode steps.
SIZES = (128, 256, 512, 1024, 2048, 4096, 8192, 16384)
DECODES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
# Maximum tokens of a request that decodes in all of these steps in turn.
_DECODES_LENGTH = 256
# If two schedules come within _CLOSE of each other, sizes between are modelled too, until
# neighbours are within a factor of _NEIGHBOURS.
_CLOSE = 0.1
_NEIGHBOURS = 1.5
# Splits of steps from this size on are tuned by the choices below.
_LARGE = 2048
_FIRST_SHARES = (None, 0.53, 0.57, 0.6)
_NORM_VECTOR_CORES = (None, 8)
# Prefetched bytes per weight that are tried; 18 MiB is the option's default.
_PREFETCH_BYTES = (18 << 20, 36 << 20, 54 << 20, 90 << 20)
# Minimum gain, as a share, for a choice other than the option's default.
_WORTH = 0.002
# Figures whose high ends let sequence parallelism gain least: two collectives take longest compared
# with one, and norms of a shard save least compared with norms of all tokens. "_latency" is each
# tier's.
_AGAINST = frozenset(
    {"collective_static", "_latency", "host_collective_launch", "host_event_call", "hbm_share"}
)
# Model types with MLA whose decodes can prefetch weights.
_LATENT = ("deepseek_v2", "deepseek_v3", "kimi_k2")


def measure(
    options: argparse.Namespace, engine_arguments: list[str], sizes: Sequence[int]
) -> dict[str, Any]:
    """Content of the step-time table, in modelled picoseconds. Raises DryRunError."""
    explored = start(options, engine_arguments, max(sizes))
    found = {**explored.described(options.model), **explore(explored, sizes)}
    explored.close()
    return found


def start(options: argparse.Namespace, engine_arguments: list[str], most_tokens: int) -> Any:
    """Starts an Exploration with room for steps of most_tokens tokens. Raises DryRunError."""
    machine = become_rank(options)
    # Read when a device opens.
    os.environ[VNPU_TIMING_VARIANTS] = encode({"against sequence parallelism": _against(machine)})
    from vllm_davinci.planner.dry_run.engine import start_engine
    from vllm_davinci.planner.dry_run.executor import few_layers_warm_up
    from vllm_davinci.planner.dry_run.exploration import Exploration
    from vllm_davinci.planner.dry_run.workload import Workload

    room = Workload(max(DECODES), max(DECODES), (1,), (1,))
    arguments = with_room(options.model, engine_arguments, most_tokens)
    arguments = with_schedules(options.model, arguments)
    # Graphs are captured later, for each comparison.
    with few_layers_warm_up():
        engine, engine_args = start_engine(options.model, room, options.routing, arguments, machine)
    explored = Exploration(engine, engine_args, machine)
    explored.meet_ranks()
    return explored


def _against(machine: Machine) -> dict[str, int]:
    """The machine's figures at the ends of their ranges where sequence parallelism gains least."""
    return {
        name: high
        for name, (_, high) in machine.ranges.items()
        if name.removeprefix("tier").lstrip("0123456789") in _AGAINST
    }


def explore(explored: Any, sizes: Sequence[int]) -> dict[str, Any]:
    """Step times by schedule, and the options with which steps are the fastest."""
    from vllm_davinci.planner.dry_run.exploration import least

    asked = explored.prefill_sizes(sizes)
    if explored.can_shard:
        sharded, steps = _sharded(explored, asked)
    else:
        sharded, steps = {}, [_step(explored, size) for size in asked]
    steps = list(_with_sizes_between(explored, steps))
    options: dict[str, Any] = {}
    if explored.can_split:
        _choose_splits(explored, steps)
    for step in steps:
        step["whole"] = least(step["by_method"]["whole"])
        step["split"] = least(step["by_method"]["split"])
    gains = any(step["split"] < step["whole"] for step in steps)
    if explored.can_split:
        options = {"dbo.enabled": gains, **({"dbo.split": "token"} if gains else {})}
    decodes = _decodes(explored)
    if explored.can_prefetch:
        is_worth = any(row["prefetch_bytes"] for row in decodes)
        options["weight_prefetch_config.enabled"] = is_worth
    return {
        "steps": steps,
        "decodes": decodes,
        "options": {**sharded, **options},
        "sequence_parallel_over_ranges": True,  # as decided by _sharded
    }


def _sharded(explored: Any, sizes: Sequence[int]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The fastest options of sequence parallelism, and the steps with them.

    It is used from the smallest size from which all larger steps are faster with it, both with the
    stated figures and with all ranges at the ends that let it gain least.
    """
    from vllm_davinci.planner.dry_run.step import OWN

    def measured(num_tokens: int | None) -> list[dict[str, dict[str, Any]]]:
        explored.shard_from(num_tokens)
        return [_step_on_each(explored, size) for size in sizes]

    def is_faster(step: dict[str, Any], other: dict[str, Any]) -> bool:
        return all(
            min(_schedules(step[machine]).values()) < min(_schedules(other[machine]).values())
            for machine in step
        )

    plain, sharded = measured(None), measured(1)
    num_plain = len(sizes)
    while num_plain and is_faster(sharded[num_plain - 1], plain[num_plain - 1]):
        num_plain -= 1
    first = sizes[num_plain] if num_plain < len(sizes) else None
    explored.shard_from(first)
    chosen: dict[str, Any] = {"sequence_parallel.enabled": first is not None}
    if first is not None:
        chosen["sequence_parallel.min_tokens"] = first
    return chosen, [step[OWN] for step in plain[:num_plain] + sharded[num_plain:]]


def _step(explored: Any, size: int) -> dict[str, Any]:
    """Times of a step of `size` tokens with each dispatch method."""
    from vllm_davinci.planner.dry_run.step import OWN

    return _step_on_each(explored, size)[OWN]


def _step_on_each(explored: Any, size: int) -> dict[str, dict[str, Any]]:
    """Times of a step of `size` tokens with each dispatch method, by machine."""
    from vllm_davinci.planner.dry_run.exploration import Schedule, named

    def measured(steps: str, is_split: bool) -> dict[str, dict[str, int]]:
        return {
            name: explored.prefill_on_each(size, Schedule(method, is_split))
            for name, method in named(explored.methods(steps)).items()
        }

    def on(machine: str) -> dict[str, Any]:
        by_kind = {kind: {name: times[machine] for name, times in found.items()}
                   for kind, found in (("whole", whole), ("split", split))}  # fmt: skip
        if not explored.can_split:
            by_kind["split"] = by_kind["whole"]
        return {"tokens": size, "by_method": by_kind}

    whole = measured("whole", is_split=False)
    split = measured("split", is_split=True) if explored.can_split else whole
    return {machine: on(machine) for machine in next(iter(whole.values()))}


def _with_sizes_between(explored: Any, steps: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The steps, with further sizes between them where decisions are close.

    Step times are not linear in size: they stay flat while host or memory bounds them, then rise.
    An error of interpolation matters only if it changes a decision.
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
    """True if the fastest schedule may change between two sizes."""
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


def _choose_splits(explored: Any, steps: list[dict[str, Any]]) -> None:
    """Chooses for each large step the fastest first share and norm cores of its split, and sets its
    times to those with them."""
    from vllm_davinci.planner.dry_run.exploration import Schedule, named

    methods = named(explored.methods("split"))
    large = [step for step in steps if step["tokens"] >= _LARGE] or steps[-1:]
    for step in steps:
        step["first_share"] = step["norm_vector_cores"] = None
    for step in large:
        known = step["by_method"]["split"]
        fastest = min(known, key=known.__getitem__)
        tried = {
            each: explored.prefill_ps(step["tokens"], Schedule(methods[fastest], True, *each))
            for each in itertools.product(_FIRST_SHARES, _NORM_VECTOR_CORES)
            if each != (None, None)
        }
        share, cores = chosen = min(tried, key=tried.__getitem__)
        if tried[chosen] > (1 - _WORTH) * known[fastest]:
            continue
        step["first_share"], step["norm_vector_cores"] = share, cores
        step["by_method"]["split"] = {
            name: tried[chosen]
            if name == fastest
            else explored.prefill_ps(step["tokens"], Schedule(method, True, *chosen))
            for name, method in methods.items()
        }


def _decodes(explored: Any) -> list[dict[str, Any]]:
    from vllm_davinci.planner.dry_run.exploration import named

    sizes, methods = explored.decode_sizes(DECODES), named(explored.methods("decodes"))
    explored.prefetch(0)
    columns = {name: explored.decodes_ps(method, sizes) for name, method in methods.items()}
    rows: list[dict[str, Any]] = [
        {"tokens": each, "by_method": {name: column[each] for name, column in columns.items()}}
        for each in next(iter(columns.values()))
    ]
    if explored.can_prefetch:
        _choose_prefetch(explored, rows, sizes)
    return rows


def _choose_prefetch(explored: Any, rows: list[dict[str, Any]], sizes: Sequence[int]) -> None:
    """Chooses for each decode step the prefetched bytes per weight, and sets its time.

    All use the dispatch method that is the fastest for most sizes.
    """
    from vllm_davinci.planner.dry_run.exploration import named

    preferred = [min(row["by_method"], key=row["by_method"].__getitem__) for row in rows]
    name = statistics.mode(preferred)
    method = named(explored.methods("decodes"))[name]
    plain = {row["tokens"]: row["by_method"][name] for row in rows}
    found = {0: plain}
    for most in _PREFETCH_BYTES:
        explored.prefetch(most)
        found[most] = explored.decodes_ps(method, sizes)
    for row in rows:
        tokens = row["tokens"]
        most = min(found, key=lambda each: found[each][tokens])
        if found[most][tokens] > (1 - _WORTH) * plain[tokens]:
            most = 0
        row["prefetch_bytes"] = most
        row["by_method"][name] = found[most][tokens]


def with_room(model: str, engine_arguments: list[str], most_tokens: int) -> list[str]:
    """The options, with room for steps of most_tokens tokens unless they set limits."""
    from vllm_davinci.planner.dry_run.exploration import LONGEST_PROMPT

    longest = _text_config(model).get("max_position_embeddings") or LONGEST_PROMPT
    length = max(min(most_tokens, LONGEST_PROMPT) + 8, _DECODES_LENGTH)
    room = {
        "--max-model-len": min(longest, length),
        "--max-num-batched-tokens": max(most_tokens, 2 * max(DECODES)),
    }
    given = {option.partition("=")[0].replace("_", "-") for option in engine_arguments}
    return [
        *(f"{name}={value}" for name, value in room.items() if name not in given),
        *engine_arguments,
    ]


def with_schedules(model: str, engine_arguments: list[str]) -> list[str]:
    """The options of an engine that may split steps anywhere and uses no step-time table.

    Prefix caching is off, because all prompts are alike.
    """
    parser = argparse.ArgumentParser(prog="vllm-davinci dry-run", allow_abbrev=False)
    parser.add_argument("--additional-config", type=json.loads, default={})
    known, others = parser.parse_known_args(engine_arguments)
    # Without the option `overlap`, steps are split if the engine can.
    config = {"overlap": "auto", **known.additional_config, "step_costs": None}
    may_split = {} if config["overlap"] == "auto" else {"enabled": True}
    config["dbo"] = {**may_split, **config.get("dbo", {}), "split": "token"}
    if _has_latent_attention(model):
        config["weight_prefetch_config"] = {
            "enabled": True, **config.get("weight_prefetch_config", {})
        }  # fmt: skip
    kept = [option for option in others if option.replace("_", "-") != "--enable-prefix-caching"]
    return [*kept, "--no-enable-prefix-caching", f"--additional-config={json.dumps(config)}"]


def _has_latent_attention(model: str) -> bool:
    """True for models whose decodes can prefetch weights."""
    text = _text_config(model)
    is_sparse = text.get("index_topk") is not None
    return text.get("model_type") in _LATENT and bool(text.get("kv_lora_rank")) and not is_sparse


def _text_config(model: str) -> dict[str, Any]:
    config = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))
    found: dict[str, Any] = config.get("text_config", config)
    return found
