"""Host time to launch one decode layer of DeepSeek-V3: torch_npu calls against our stages.

The layer is the norm before attention, MLA preprocess, attention over its cache with the
values' up projection, the output projection, the norm before the experts, the router, and routed
experts, in the sizes of DeepSeek-V3 on one device; in bf16, and with W8A8_DYNAMIC projections and
experts. Both sides launch the same operators of CANN in the same order. On the virtual NPU they do
no arithmetic (VNPU_COMPUTE=0) and the weights are reserved, never touched, so what is left is the
host's work. Each value of TASK_QUEUE_ENABLE has a process of its own (torch_npu reads it once), in
which both sides run in turns. Times are processor time of the launching thread: other programs on
the machine do not count.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from result import Kind, Result, Row

AT_MOST = {"layer": 0.40, "W8A8_DYNAMIC layer": 0.40}
LIMIT_S = 300.0
BOUND = (
    "per stage: python and torch's dispatcher once, one allocation of scratch memory, and for each "
    "operator its descriptors, phase one and phase two in the device library"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, default=16, help="requests in the decode step")
    parser.add_argument("--rounds", type=int, default=60, help="rounds; both sides in each")
    parser.add_argument("--layers", type=int, default=20, help="layers in a row on each side")


def run(args: argparse.Namespace) -> Result:
    rows = []
    for queue in ("0", "1"):
        child = subprocess.run(
            [sys.executable, __file__, str(args.tokens), str(args.rounds), str(args.layers)],
            env={
                **os.environ,
                "TASK_QUEUE_ENABLE": queue,
                "VNPU_COMPUTE": "0",
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": str(Path(__file__).resolve().parents[1]),
            },
            stdout=subprocess.PIPE,
            text=True,
            timeout=LIMIT_S,
            check=True,
        )
        figures = json.loads(child.stdout.splitlines()[-1])
        for name, sides in figures["times"].items():
            low, median, high = sides["ours"]
            rows.append(
                Row(
                    name=f"{name}, host time, TASK_QUEUE_ENABLE={queue}",
                    unit="us",
                    ours=median,
                    baseline=sides["composed"][1],
                    kind=Kind.MEASURED,
                    quartiles=(low, high),
                    at_most=AT_MOST.get(name),
                )
            )
        if queue == "0":
            rows += [
                Row(name, unit, ours, Kind.COUNTED, baseline=baseline)
                for name, unit, ours, baseline in figures["counts"]
            ]
    return Result(
        benchmark="kernels/launch",
        ours="torch.ops.vllm_davinci",
        baseline="composed torch_npu calls",
        rows=rows,
        settings={"tokens": args.tokens, "rounds": args.rounds, "layers": args.layers},
        seed=0,
        device="vnpu, policy eager, VNPU_COMPUTE=0",
        bounded_by=BOUND,
    )


def _measure(num_tokens: int, rounds: int, layers: int) -> dict[str, Any]:
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    from kernels import decode_layer, decode_layer_w8a8
    from kernels.decode_layer import Stages
    from vllm_davinci.kernels._C import launch_count

    class Calls(TorchDispatchMode):
        """Collects the calls that reach the device: all but views and allocations."""

        def __init__(self) -> None:
            super().__init__()
            self.names: list[str] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            returns = func._schema.returns
            is_view = any(r.alias_info and not r.alias_info.is_write for r in returns)
            is_cast = func.name().startswith("aten::to.")  # the layer's casts change the dtype
            if is_cast or not (is_view or "empty" in func.name()):
                self.names.append(func.name())
            return func(*args, **(kwargs or {}))

    torch.set_num_threads(1)
    counts: list[tuple[str, str, int, int]] = []
    times: dict[str, dict[str, list[float]]] = {}

    def measure(prefix: str, module: ModuleType, layer: decode_layer.Layer) -> None:
        sides: dict[str, Stages] = {"composed": module.composed(layer), "ours": module.ours(layer)}

        def whole(stages: Stages) -> torch.Tensor:
            normed, _ = stages["norm"](layer.x)
            attended = stages["attend"](*stages["preprocess"](normed))
            normed, _ = stages["post_norm"](stages["project"](attended))
            logits = torch.mm(normed, layer.router).float()
            return stages["experts"](normed, logits)

        rows, _ = sides["ours"]["norm"](layer.x)
        absorbed_and_rope = sides["ours"]["preprocess"](rows)
        logits = torch.mm(layer.x, layer.router).float()
        calls: dict[str, Callable[[Stages], Any]] = {
            "norm": lambda stages: stages["norm"](layer.x),
            "MLA preprocess": lambda stages: stages["preprocess"](rows),
            "attention": lambda stages: stages["attend"](*absorbed_and_rope),
            "experts": lambda stages: stages["experts"](layer.x, logits),
            "layer": whole,
        }
        found = {}
        for side, stages in sides.items():
            before = launch_count()
            with Calls() as counter:
                whole(stages)
            stage_calls = [name for name in counter.names if name.startswith("vllm_davinci")]
            launches = len(counter.names) - len(stage_calls) + launch_count() - before
            found[side] = (len(counter.names), launches)
        for index, (unit, where) in enumerate(
            (("calls", "calls from Python"), ("launches", "launches on the device"))
        ):
            ours, baseline = found["ours"][index], found["composed"][index]
            counts.append((f"{prefix}layer, {where}", unit, ours, baseline))
        for name, call in calls.items():
            measured: dict[str, list[float]] = {side: [] for side in sides}
            for turn in range(rounds + 5):  # the first ones fill caches
                for side, stages in sides.items():
                    torch.npu.synchronize()
                    begin = time.thread_time()
                    for _ in range(layers):
                        call(stages)
                    elapsed = (time.thread_time() - begin) / layers * 1e6
                    if turn >= 5:
                        measured[side].append(elapsed)
            times[prefix + name] = {
                side: statistics.quantiles(values, n=4) for side, values in measured.items()
            }

    with torch.inference_mode():
        measure("", decode_layer, decode_layer.Layer(num_tokens))
        measure("W8A8_DYNAMIC ", decode_layer_w8a8, decode_layer_w8a8.W8A8Layer(num_tokens))
    return {"times": times, "counts": counts}


if __name__ == "__main__":
    print(json.dumps(_measure(*map(int, sys.argv[1:4]))))
