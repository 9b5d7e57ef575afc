"""Measures for launch.py in one process."""

import statistics
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kernels import decode_layer, decode_layer_w8a8
from kernels.decode_layer import Layer, Stages
from vllm_davinci.kernels._C import launch_count

Sides = dict[str, Stages]
FIRST_ROUNDS = 5  # warm up caches


class Calls(TorchDispatchMode):
    """Collects the calls that reach the device: not views or allocations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
        returns = func._schema.returns
        is_view = any(r.alias_info and not r.alias_info.is_write for r in returns)
        is_cast = func.name().startswith("aten::to.")  # the layer's casts change the dtype only
        if is_cast or not (is_view or "empty" in func.name()):
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def whole(layer: Layer, stages: Stages) -> torch.Tensor:
    normed, _ = stages["norm"](layer.x)
    attended = stages["attend"](*stages["preprocess"](normed))
    normed, _ = stages["post_norm"](stages["project"](attended))
    logits = torch.mm(normed, layer.router).float()
    output: torch.Tensor = stages["experts"](normed, logits)
    return output


def calls_and_launches(layer: Layer, stages: Stages) -> tuple[int, int]:
    """Counts calls from Python, and launches on the device."""
    before = launch_count()
    with Calls() as counter:
        whole(layer, stages)
    stage_calls = [name for name in counter.names if name.startswith("vllm_davinci")]
    launches = len(counter.names) - len(stage_calls) + launch_count() - before
    return len(counter.names), launches


def calls_of(layer: Layer, ours: Stages) -> dict[str, Callable[[Stages], Any]]:
    """Returns the calls to time, by name."""
    rows, _ = ours["norm"](layer.x)
    absorbed_and_rope = ours["preprocess"](rows)
    logits = torch.mm(layer.x, layer.router).float()

    def run(stages: Stages) -> torch.Tensor:
        return whole(layer, stages)

    return {
        "norm": lambda stages: stages["norm"](layer.x),
        "MLA preprocess": lambda stages: stages["preprocess"](rows),
        "attention": lambda stages: stages["attend"](*absorbed_and_rope),
        "experts": lambda stages: stages["experts"](layer.x, logits),
        "layer": run,
    }


def times_us(
    call: Callable[[Stages], Any], sides: Sides, rounds: int, layers: int
) -> dict[str, list[float]]:
    """Returns quartiles of microseconds per call for each side; the sides take turns."""
    measured: dict[str, list[float]] = {side: [] for side in sides}
    for turn in range(rounds + FIRST_ROUNDS):
        for side, stages in sides.items():
            torch.npu.synchronize()
            begin = time.thread_time()
            for _ in range(layers):
                call(stages)
            elapsed = (time.thread_time() - begin) / layers * 1e6
            if turn >= FIRST_ROUNDS:
                measured[side].append(elapsed)
    return {side: statistics.quantiles(values, n=4) for side, values in measured.items()}


def measure(options: dict[str, int]) -> dict[str, Any]:
    torch.set_num_threads(1)
    num_tokens = options["tokens"]
    counts: list[tuple[str, str, int, int]] = []
    times: dict[str, dict[str, list[float]]] = {}

    def compare(prefix: str, module: ModuleType, layer: Layer) -> None:
        sides: Sides = {"composed": module.composed(layer), "ours": module.ours(layer)}
        calls = calls_of(layer, sides["ours"])
        found = {side: calls_and_launches(layer, stages) for side, stages in sides.items()}
        for index, (unit, where) in enumerate(
            (("calls", "calls from Python"), ("launches", "launches on the device"))
        ):
            ours, baseline = found["ours"][index], found["composed"][index]
            counts.append((f"{prefix}layer, {where}", unit, ours, baseline))
        for name, call in calls.items():
            times[prefix + name] = times_us(call, sides, options["rounds"], options["layers"])

    with torch.inference_mode():
        compare("", decode_layer, decode_layer.Layer(num_tokens))
        compare("W8A8_DYNAMIC ", decode_layer_w8a8, decode_layer_w8a8.W8A8Layer(num_tokens))
    return {"times": times, "counts": counts}
