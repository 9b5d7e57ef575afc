"""Host time to launch one decode layer of DeepSeek-V3: torch_npu calls against our stages.

The layer is the norm before attention, MLA preprocess, attention over the latent cache with the
values' up projection, the output projection, the norm before the experts, the router, and routed
experts, in the sizes of DeepSeek-V3 on one device. Both sides launch the same operators of CANN in
the same order. On the virtual NPU they do no arithmetic (VNPU_COMPUTE=0) and the weights are
reserved, never touched, so what is left is the host's work. Each value of TASK_QUEUE_ENABLE has a
process of its own (torch_npu reads it once), in which both sides run in turns. Times are processor
time of the launching thread: other programs on the machine do not count.
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
from typing import Any

from result import Kind, Result, Row

AT_MOST = 0.40
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
                    at_most=AT_MOST if name == "layer" else None,
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

    from kernels.decode_layer import Layer, composed, ours
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
    layer = Layer(num_tokens)
    sides = {"composed": composed(layer), "ours": ours(layer)}

    def whole(stages: dict[str, Callable[..., Any]]) -> torch.Tensor:
        normed, _ = stages["norm"](layer.x, layer.input_norm)
        attended = stages["attend"](*stages["preprocess"](normed))
        projected = torch.mm(attended, layer.o_weight)
        normed, _ = stages["norm"](projected, layer.post_norm)
        logits = torch.mm(normed, layer.router).float()
        return stages["experts"](normed, logits)

    with torch.inference_mode():
        absorbed_and_rope = sides["ours"]["preprocess"](layer.x)
        logits = torch.mm(layer.x, layer.router).float()
        calls: dict[str, Callable[[dict[str, Callable[..., Any]]], Any]] = {
            "norm": lambda stages: stages["norm"](layer.x, layer.input_norm),
            "MLA preprocess": lambda stages: stages["preprocess"](layer.x),
            "attention": lambda stages: stages["attend"](*absorbed_and_rope),
            "experts": lambda stages: stages["experts"](layer.x, logits),
            "layer": whole,
        }
        counts = []
        found = {}
        for side, stages in sides.items():
            before = launch_count()
            with Calls() as counter:
                whole(stages)
            stage_calls = [name for name in counter.names if name.startswith("vllm_davinci")]
            launches = len(counter.names) - len(stage_calls) + launch_count() - before
            found[side] = (len(counter.names), launches)
        counts = [
            ("layer, calls from Python", "calls", found["ours"][0], found["composed"][0]),
            ("layer, launches on the device", "launches", found["ours"][1], found["composed"][1]),
        ]
        times: dict[str, dict[str, list[float]]] = {}
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
            times[name] = {
                side: statistics.quantiles(values, n=4) for side, values in measured.items()
            }
    return {"times": times, "counts": counts}


if __name__ == "__main__":
    print(json.dumps(_measure(*map(int, sys.argv[1:4]))))
