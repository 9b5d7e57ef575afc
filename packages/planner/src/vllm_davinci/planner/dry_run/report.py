"""Result of a dry-run: memory plan and steps, with modelled times."""

import dataclasses
import resource
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from vllm_davinci.planner.dry_run.layout import Layout
from vllm_davinci.planner.dry_run.sampled_prompt import SampledPrompt
from vllm_davinci.planner.dry_run.sensitivity import print_sensitivity
from vllm_davinci.planner.dry_run.step import Step, median_step
from vllm_davinci.vnpu.timing import Machine, Report

_GIB = 2**30
_MS = 10**9  # picoseconds
_TOKENS = 1024  # of a request whose memory is printed


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """Memory of one device in bytes, as vLLM planned it.

    other_bytes:  buffers outside torch, such as those of collectives
    graph_bytes:  graphs with their workspaces
    piece_bytes:  fragmentation between tensors
    cache_tokens: capacity of the KV cache; with windows and states, in requests of --max-model-len
                  tokens
    token_bytes:  of the cache, for each token of a request
    request_bytes: of the cache, for a request's windows and states between two steps
    profiled_bytes: peak of vLLM's profile run, a whole step without attention
    largest_steps: peak of the largest step of each kind, run with that cache
    """

    total_bytes: int
    weight_bytes: int
    activation_bytes: int
    other_bytes: int
    graph_bytes: int
    piece_bytes: int
    cache_bytes: int
    cache_tokens: int
    token_bytes: int
    request_bytes: int
    profiled_bytes: int
    largest_steps: Mapping[str, int]


@dataclasses.dataclass(frozen=True)
class DryRun:
    """The whole report.

    decode_tokens: tokens of a decode in a step: one, and its drafts
    prompt:        a prompt of which some chunks were modelled; None: `steps` have all chunks
    """

    machine: Machine
    model: str
    world_size: int
    decode_tokens: int
    layout: Layout
    engine: Mapping[str, Any]
    memory: MemoryPlan
    steps: Sequence[Step]
    served: Mapping[str, Any]
    prompt: SampledPrompt | None
    start_seconds: float

    def to_json(self) -> dict[str, Any]:
        return {
            "modelled": True,
            "machine": {
                "chip": self.machine.chip,
                "topology": self.machine.topology,
                "title": self.machine.title,
                "hash": self.machine.hash,
                "assumptions": [dataclasses.asdict(each) for each in self.machine.assumptions],
            },
            "model": self.model,
            "world_size": self.world_size,
            "decode_tokens": self.decode_tokens,
            "layout": dataclasses.asdict(self.layout),
            "engine": dict(self.engine),
            "memory": dataclasses.asdict(self.memory),
            "steps": [
                {
                    "tokens": list(step.tokens),
                    "modelled": dataclasses.asdict(step.modelled),
                    "exposed_communication_ps": step.modelled.exposed_communication_ps,
                    "overlap_bound_ps": step.modelled.overlap_bound_ps,
                    "wall_seconds": step.wall_seconds,
                    "brief": _brief(step.modelled),
                    "variants": {name: _brief(report) for name, report in step.variants.items()},
                }
                for step in self.steps
            ],
            "served": dict(self.served),
            "prompt": self.prompt and self.prompt.to_json(),
            "host": {
                "start_seconds": self.start_seconds,
                "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            },
        }


def _brief(report: Report) -> dict[str, int]:
    """The times from which ratios are computed."""
    return {
        "host_ps": report.host_ps,
        "communication_ps": report.communication_ps,
        "overlap_bound_ps": report.overlap_bound_ps,
        "resource_bound_ps": max(report.compute_alone_ps, *report.busy_ps.values()),
    }


def print_report(result: DryRun, console: Console) -> None:
    """Prints the report for people."""
    machine = result.machine
    console.print(
        f"{result.model} as rank 0 of {result.world_size} on {machine.title}.\n"
        "All times are modelled; nothing here was measured on an NPU.",
        markup=False,
    )
    console.print(_memory_table(result))
    console.print(_step_table(result))
    console.print(_use_table(result))
    _print_served(result, console)
    if result.prompt is not None:
        console.print(str(result.prompt), markup=False)
    print_sensitivity(_by_kind(result.steps), machine, console)
    console.print(
        f"{len(machine.assumptions)} figures of this machine are assumed, such as "
        f"{', '.join(a.figure for a in machine.assumptions[:3])}; --json lists them all.",
        markup=False,
    )
    wall = [step.wall_seconds for step in result.steps]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / _GIB
    console.print(
        f"This host: start-up {result.start_seconds:.1f} s, steps {min(wall, default=0):.3f} to "
        f"{max(wall, default=0):.3f} s, {peak:.2f} GiB of memory at most.",
        markup=False,
    )


def _memory_table(result: DryRun) -> Table:
    plan = result.memory
    memory = Table(title="memory of one device")
    memory.add_column("for")
    memory.add_column("GiB", justify="right")
    for name, count in (
        ("weights", plan.weight_bytes),
        ("activations, at most", plan.activation_bytes),
        ("buffers outside torch", plan.other_bytes),
        ("graphs", plan.graph_bytes),
        ("pieces between tensors", plan.piece_bytes),
        (f"KV cache ({plan.cache_tokens} tokens)", plan.cache_bytes),
        (f"  a request and its {_TOKENS} tokens", plan.request_bytes + _TOKENS * plan.token_bytes),
        ("all there is", plan.total_bytes),
    ):
        memory.add_row(name, f"{count / _GIB:.2f}")
    return memory


def _step_table(result: DryRun) -> Table:
    table = Table(title="steps, modelled ms")
    columns = ("step", "count", "total", "device", "compute", "communication", "exposed", "bound")
    for column in columns:
        table.add_column(column, justify="left" if column == "step" else "right")
    for kind, steps in _by_kind(result.steps).items():
        step = median_step(steps).modelled
        figures = (
            step.host_ps,
            step.any_ps,
            step.compute_ps,
            step.communication_ps,
            step.exposed_communication_ps,
            step.overlap_bound_ps,
        )
        table.add_row(kind, str(len(steps)), *(f"{ps / _MS:.3f}" for ps in figures))
    return table


def _use_table(result: DryRun) -> Table:
    use = Table(title="busy share of each resource, and of communication, in a step")
    busy = [n for n in _names(result.steps) if any(s.modelled.busy_ps[n] for s in result.steps)]
    for column in ("step", *busy, "communication", "tokens/s"):
        use.add_column(column, justify="left" if column == "step" else "right")
    for kind, steps in _by_kind(result.steps).items():
        chosen = median_step(steps)
        step = chosen.modelled
        shares = [step.busy_ps[name] / max(step.host_ps, 1) for name in busy]
        shares.append(step.communication_ps / max(step.host_ps, 1))
        speed = sum(chosen.tokens) / max(step.host_ps, 1) * 10**12
        use.add_row(kind, *(f"{share:.0%}" for share in shares), f"{speed:,.0f}")
    return use


def _print_served(result: DryRun, console: Console) -> None:
    layout, figures = result.layout, dict(result.served)
    table = Table(title="serving, modelled" + _of_rank(layout))
    table.add_column("figure")
    table.add_column("", justify="right")
    for name, value in figures.items():
        table.add_row(name, f"{value:,.3f}" if isinstance(value, float) else str(value))
    console.print(table)
    if layout.pipeline_parallel_size > 1:
        console.print(
            f"These are the steps of the first of {layout.pipeline_parallel_size} stages. A "
            "token passes all stages; with one batch per stage under way, a batch's tokens are "
            "complete after each step.",
            markup=False,
        )


def _of_rank(layout: Layout) -> str:
    ranks = layout.data_parallel_size
    return "" if ranks == 1 else f", of one of {ranks} data-parallel ranks alike"


def _by_kind(steps: Sequence[Step]) -> dict[str, list[Step]]:
    kinds: dict[str, list[Step]] = {}
    for step in steps:
        kinds.setdefault(step.kind, []).append(step)
    return kinds


def _names(steps: Sequence[Step]) -> list[str]:
    return list(steps[0].modelled.busy_ps) if steps else []
