"""Host time to launch one decode layer of DeepSeek-V3: torch_npu calls and our stages.

The layer has DeepSeek-V3's sizes on one device, in bf16, and with W8A8_DYNAMIC projections and
experts: norm, MLA preprocess, attention over the cache with the values' up projection, output
projection, norm, router, routed experts. Both sides launch the same CANN operators in the same
order. The virtual NPU does no arithmetic (VNPU_COMPUTE=0) and weights are only reserved, so that
the host's work alone is measured. Each value of TASK_QUEUE_ENABLE has its own process, because
torch_npu reads it once; both sides take turns in it. Times are processor time of the launching
thread, without other programs.
"""

import argparse

from child import measured
from result import Kind, Result, Row

AT_MOST = {"layer": 0.40, "W8A8_DYNAMIC layer": 0.40}
LIMIT_S = 300.0
BOUND = (
    "per stage: python and torch's dispatcher once, one allocation of scratch memory, and for each "
    "operator its descriptors, phase one and phase two in the device library"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, default=16, help="requests in the decode step")
    parser.add_argument("--rounds", type=int, default=60, help="rounds, each with both sides")
    parser.add_argument("--layers", type=int, default=20, help="layers in a row on each side")


def run(args: argparse.Namespace) -> Result:
    rows = []
    options = {key: getattr(args, key) for key in ("tokens", "rounds", "layers")}
    for queue in ("0", "1"):
        more = {"TASK_QUEUE_ENABLE": queue, "VNPU_COMPUTE": "0", "OMP_NUM_THREADS": "1"}
        figures = measured("kernels.launch_process", options, LIMIT_S, more)
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
        ours="torch.ops.vllm_davinci",
        baseline="composed torch_npu calls",
        rows=rows,
        device="vnpu, policy eager, VNPU_COMPUTE=0",
        bounded_by=BOUND,
    )
