"""Models an engine's steps by every schedule that it could follow, for the option `step_costs`."""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Sequence
from typing import Any

from vllm_davinci.meta.dry_run.this_process import become_rank

# Tokens of the steps with prefills that are compared where the command names none, and requests of
# those in which all decode.
SIZES = (128, 256, 512, 1024, 2048, 4096, 8192, 16384)
DECODES = (1, 4, 16, 32, 64, 128, 256)
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
    from vllm_davinci.meta.dry_run.exploration import Exploration
    from vllm_davinci.meta.dry_run.workload import Workload

    of_request = max(1, most_tokens // max(DECODES))
    room = Workload(max(DECODES), max(DECODES), (of_request,), (8,))
    engine, arguments = start_engine(
        options.model, room, options.routing, with_schedules(engine_arguments), machine
    )
    return Exploration(engine, arguments, machine)


def explore(explored: Any, sizes: Sequence[int]) -> dict[str, Any]:
    """Durations of steps by schedule, and the options with which split steps are the fastest."""
    from vllm_davinci.meta.dry_run.exploration import Schedule, least, named

    asked = explored.prefill_sizes(sizes)
    steps = []
    for size in asked:
        whole = {
            name: explored.prefill_ps(size, Schedule(method))
            for name, method in named(explored.methods("whole")).items()
        }
        split = whole
        if explored.can_split:
            split = {
                name: explored.prefill_ps(size, Schedule(method, is_split=True))
                for name, method in named(explored.methods("split")).items()
            }
        steps.append({"tokens": size, "by_method": {"whole": whole, "split": split}})
    options = _options_of_splits(explored, steps) if explored.can_split else {}
    for step in steps:
        step["whole"] = least(step["by_method"]["whole"])
        step["split"] = least(step["by_method"]["split"])
    gains = any(step["split"] < step["whole"] for step in steps)
    if explored.can_split:
        options = {"dbo.enabled": gains, **(options if gains else {})}
    return {"steps": steps, "decodes": _decodes(explored), "options": options}


def _options_of_splits(explored: Any, steps: list[dict[str, Any]]) -> dict[str, Any]:
    """The options with which large split steps are the fastest; `steps` get their durations."""
    from vllm_davinci.meta.dry_run.exploration import Schedule, least, named

    methods = named(explored.methods("split"))

    large = [step for step in steps if step["tokens"] >= _LARGE] or steps[-1:]

    def duration(step: dict[str, Any], share: float | None, cores: int | None) -> int:
        known = step["by_method"]["split"]
        method = methods[min(known, key=known.__getitem__)]
        taken: int = explored.prefill_ps(step["tokens"], Schedule(method, True, share, cores))
        return taken

    best: tuple[float | None, int | None] = (None, None)
    fastest = [least(step["by_method"]["split"]) for step in large]
    for share, cores in itertools.product(_FIRST_SHARES, _NORM_VECTOR_CORES):
        if (share, cores) == (None, None):
            continue
        found = [duration(step, share, cores) for step in large]
        if sum(a / b for a, b in zip(found, fastest, strict=True)) < len(large):
            best, fastest = (share, cores), found
    if best != (None, None):
        for step in steps:
            step["by_method"]["split"] = {
                name: explored.prefill_ps(step["tokens"], Schedule(method, True, *best))
                for name, method in methods.items()
            }
    return {
        "dbo.split": "token",
        "dbo.first_share": best[0],
        "dbo.norm_vector_cores": best[1],
    }


def _decodes(explored: Any) -> list[dict[str, Any]]:
    from vllm_davinci.meta.dry_run.exploration import named

    sizes = explored.decode_sizes(DECODES)
    columns = {}
    for name, method in named(explored.methods("decodes")).items():
        explored.decodes_by(method, sizes)
        columns[name] = [explored.decode_ps(size) for size in sizes]
    return [
        {"tokens": size, "by_method": {name: each[row] for name, each in columns.items()}}
        for row, size in enumerate(sizes)
    ]


def with_schedules(engine_arguments: list[str]) -> list[str]:
    """The options of an engine that may split steps anywhere, and decides nothing by costs."""
    parser = argparse.ArgumentParser(prog="vllm-davinci dry-run", allow_abbrev=False)
    parser.add_argument("--additional-config", type=json.loads, default={})
    known, others = parser.parse_known_args(engine_arguments)
    config = {**known.additional_config, "step_costs": None}
    dbo = {"enabled": True, **config.get("dbo", {}), "split": "token"}
    return [*others, f"--additional-config={json.dumps({**config, 'dbo': dbo})}"]
