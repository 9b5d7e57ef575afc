"""Host cost of one operator call on the virtual NPU, compared with torch's CPU device.

Each operator works on 64 to 4096 elements, so that its arithmetic takes almost no time. *enqueue*
is a call that does not wait, *enqueue + sync* one that waits for the device. Two child processes
measure, one for each value of TASK_QUEUE_ENABLE (torch_npu reads it once per process).
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from result import Kind, Result, Row

MOST_ENQUEUE_US = 12.0
BOUND = (
    "python dispatch of the call, torch_npu's own path (allocation of the output, conversion of "
    "the arguments, two look-ups of parameters per call), then the operator itself in ATen"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--calls", type=int, default=4000, help="number of calls per operator")
    parser.add_argument("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> Result:
    rows = []
    for queue in ("0", "1"):
        child = subprocess.run(
            [sys.executable, __file__, str(args.calls), str(args.seed)],
            env={
                **os.environ,
                "TASK_QUEUE_ENABLE": queue,
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": str(Path(__file__).resolve().parents[1]),
            },
            stdout=subprocess.PIPE,
            text=True,
            timeout=300,
            check=True,
        )
        figures = json.loads(child.stdout.splitlines()[-1])
        for name, sides in figures.items():
            for what in ("enqueue", "enqueue + sync"):
                rows.append(
                    Row(
                        name=f"{name}, {what}, TASK_QUEUE_ENABLE={queue}",
                        unit="us",
                        ours=sides["npu"][what][1],
                        baseline=sides["cpu"]["enqueue"][1],
                        kind=Kind.MEASURED,
                        quartiles=(sides["npu"][what][0], sides["npu"][what][2]),
                    )
                )
            rows.append(
                Row(
                    name=f"{name}, enqueue, TASK_QUEUE_ENABLE={queue}, goal",
                    unit="us",
                    ours=sides["npu"]["enqueue"][1],
                    kind=Kind.MEASURED,
                    at_most=MOST_ENQUEUE_US,
                )
            )
    return Result(
        ours="torch_npu on vnpu",
        baseline="torch on the CPU",
        rows=rows,
        settings={"threads": 1},
        device="vnpu, policy eager",
        bounded_by=BOUND,
    )


def _quartiles(call: Callable[[], object], calls: int) -> tuple[float, float, float]:
    for _ in range(calls // 10):
        call()
    times = []
    for _ in range(40):
        begin = time.perf_counter()
        for _ in range(calls // 40):
            call()
        times.append((time.perf_counter() - begin) / (calls // 40) * 1e6)
    low, median, high = statistics.quantiles(times, n=4)
    return low, median, high


def _measure(calls: int, seed: int) -> dict[str, dict[str, dict[str, tuple[float, float, float]]]]:
    import torch
    import torch_npu

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    figures: dict[str, dict[str, dict[str, tuple[float, float, float]]]] = {}
    for device in ("cpu", "npu"):
        a, b, weight = (torch.randn(64, 64).to(device) for _ in range(3))
        gamma = torch.ones(64).to(device)
        index = torch.tensor([5, 1, 60]).to(device)

        def rms_norm(x: torch.Tensor = a, g: torch.Tensor = gamma, on: str = device) -> object:
            if on == "npu":
                return torch_npu.npu_rms_norm(x, g, 1e-6)
            return torch.nn.functional.rms_norm(x, (64,), g, 1e-6)

        operators: dict[str, Callable[[], object]] = {
            "add": lambda a=a, b=b: torch.add(a, b),
            "matmul": lambda a=a, weight=weight: torch.mm(a, weight),
            "rms_norm": rms_norm,
            "index": lambda a=a, index=index: a[index],
        }
        for name, call in operators.items():
            side = figures.setdefault(name, {}).setdefault(device, {})
            side["enqueue"] = _quartiles(call, calls)
            if device == "npu":
                torch.npu.synchronize()

                def call_and_wait(call: Callable[[], object] = call) -> None:
                    call()
                    torch.npu.synchronize()

                side["enqueue + sync"] = _quartiles(call_and_wait, calls)
    return figures


if __name__ == "__main__":
    print(json.dumps(_measure(int(sys.argv[1]), int(sys.argv[2]))))
