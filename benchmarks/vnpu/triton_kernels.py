"""Triton kernels on the virtual NPU.

Compares a launch with torch's smallest operator in one process, and vLLM's kernels at a step's size
(8 rows of 151,936 logits) with Triton's interpreter in separate processes.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

from child import measured
from result import Kind, Result, Row

ROWS, VOCABULARY, BLOCK = 8, 151_936, 1024
INTERPRETED = {"TRITON_INTERPRET": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
ALONE = {
    "VNPU_TRITON": "1",
    "VLLM_PLUGINS": "",
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
}
LIMIT_S = 600


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--calls", type=int, default=2000, help="number of launches")


def run(args: argparse.Namespace) -> Result:
    here, interpreted = (
        measured("vnpu.triton_kernels", args.calls, LIMIT_S, {**ALONE, **each})
        for each in ({}, INTERPRETED)
    )
    rows = [
        Row(
            name="launch of a kernel, beside torch.add",
            unit="us",
            ours=here.pop("kernel"),
            baseline=here.pop("torch.add"),
            kind=Kind.MEASURED,
        )
    ]
    rows += [
        Row(name=name, unit="us", ours=time_us, baseline=interpreted[name], kind=Kind.MEASURED)
        for name, time_us in here.items()
    ]
    return Result(
        ours="on the virtual NPU",
        baseline="torch.add; of vLLM's kernels: Triton's interpreter",
        rows=rows,
        settings={"threads": 1},
        device="vnpu, policy eager",
        bounded_by="a launch: Triton's own dispatch; large kernels: their loops, in one thread",
    )


def _median_us(call: Callable[[], object], calls: int) -> float:
    times = []
    unmeasured = (calls + 9) // 10 if calls > 1 else 0
    for number in range(unmeasured + calls):
        begin = time.perf_counter()
        call()
        if number >= unmeasured:
            times.append((time.perf_counter() - begin) * 1e6)
    return statistics.median(times)


def measure(calls: int) -> dict[str, float]:
    import torch
    from vllm.triton_utils import tl, triton
    from vllm.v1.worker.gpu.sample.gumbel import _gumbel_sample_kernel
    from vllm.v1.worker.gpu.sample.logprob import _ranks_kernel

    @triton.jit
    def add_kernel(x_ptr, y_ptr, out_ptr, block: tl.constexpr):  # type: ignore[no-untyped-def]
        lanes = tl.arange(0, block)
        tl.store(out_ptr + lanes, tl.load(x_ptr + lanes) + tl.load(y_ptr + lanes))

    is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    device = "cpu" if is_interpreted else "npu"
    torch.manual_seed(0)
    figures: dict[str, float] = {}
    if not is_interpreted:
        x, y, out = (torch.randn(64, 64).to(device) for _ in range(3))
        figures["torch.add"] = _median_us(lambda: torch.add(x, y, out=out), calls)
        figures["kernel"] = _median_us(lambda: add_kernel[(1,)](x, y, out, block=4096), calls)
    blocks = -(-VOCABULARY // BLOCK)

    def zeros(*shape: int, dtype: Any = torch.float32) -> torch.Tensor:
        return torch.zeros(*shape, dtype=dtype, device=device)

    logits = torch.randn(ROWS, VOCABULARY).to(device)
    slots = torch.arange(ROWS).to(device)
    drawn = (zeros(ROWS, blocks, dtype=torch.int64), blocks, zeros(ROWS, blocks), blocks)
    given = (*drawn, None, 0, 0, None, None, 0, logits, VOCABULARY, slots, slots, slots)
    options = {"BLOCK_SIZE": BLOCK, "IS_DRAFTING": False, "APPLY_TEMPERATURE": True}
    options |= {"USE_FP64": False, "PER_TOKEN_COL": False}
    figures["_gumbel_sample_kernel"] = _median_us(
        lambda: _gumbel_sample_kernel[(ROWS, blocks)](
            *given, torch.ones(ROWS).to(device), VOCABULARY, **options
        ),
        1 if is_interpreted else 5,
    )
    out = zeros(ROWS, dtype=torch.int64)
    figures["_ranks_kernel"] = _median_us(
        lambda: _ranks_kernel[(ROWS,)](out, logits, VOCABULARY, slots, VOCABULARY, BLOCK_SIZE=8192),
        1 if is_interpreted else 10,
    )
    return figures
