"""One rank of `collectives`: `python -m vllm_davinci.verify.collective_process`.

The variables RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT identify it. Rank 0 prints JSON.
"""

import json
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from vllm_davinci.verify.ranks import ANSWER

SIZES = (1 << 10, 64 << 10, 1 << 20, 16 << 20)
"""Sizes of a rank's operand, in bytes."""
REPETITIONS = 4
LIMIT = timedelta(seconds=120)


def main() -> dict[str, Any]:
    import torch
    import torch.distributed as dist
    from torch_npu import npu

    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    npu.set_device(rank)
    dist.init_process_group("hccl", timeout=LIMIT)
    found: dict[str, Any] = {}
    for size in SIZES:
        for name, (run, right) in _collectives(rank, ranks, size).items():
            run()
            wrong = torch.tensor([0.0 if right() else 1.0], device="npu")
            counts = [torch.zeros_like(wrong) for _ in range(ranks)]
            dist.all_gather(counts, wrong)
            found[f"{name}, {size >> 10} KiB"] = {
                "wrong": [at for at, each in enumerate(counts) if float(each)],
                "seconds": _seconds(run),
            }
    dist.barrier()
    dist.destroy_process_group()
    return found


def _collectives(
    rank: int, ranks: int, size: int
) -> dict[str, tuple[Callable[[], object], Callable[[], bool]]]:
    """Collective -> a function that runs it, and one that checks its result."""
    import torch
    import torch.distributed as dist

    count = size // 2
    own = torch.full((count,), float(rank + 1), dtype=torch.bfloat16, device="npu")
    total = float(ranks * (ranks + 1) // 2)
    summed = own.clone()
    gathered = own.new_empty(count * ranks)
    part = own.new_empty(count // ranks)
    exchanged = own.new_empty(count // ranks * ranks)
    even = own[: count // ranks * ranks]

    def reduce() -> None:
        summed.copy_(own)
        dist.all_reduce(summed)

    def each_rank(x: Any) -> bool:
        parts = x.view(ranks, -1).float()
        wanted = torch.arange(1, ranks + 1, device="npu").float()
        return bool((parts == wanted[:, None]).all())

    return {
        "all_reduce": (reduce, lambda: bool((summed == total).all())),
        "all_gather": (
            lambda: dist.all_gather_into_tensor(gathered, own),
            lambda: each_rank(gathered),
        ),
        "reduce_scatter": (
            lambda: dist.reduce_scatter_tensor(part, even),
            lambda: bool((part == total).all()),
        ),
        "all_to_all": (
            lambda: dist.all_to_all_single(exchanged, even),
            lambda: each_rank(exchanged),
        ),
    }


def _seconds(run: Callable[[], object]) -> float:
    from torch_npu import npu

    events = [npu.Event(enable_timing=True) for _ in range(2)]
    npu.synchronize()
    events[0].record()
    for _ in range(REPETITIONS):
        run()
    events[1].record()
    npu.synchronize()
    return float(events[0].elapsed_time(events[1])) / 1e3 / REPETITIONS


if __name__ == "__main__":
    answer = main()
    if os.environ["RANK"] == "0":
        print(ANSWER + json.dumps(answer), flush=True)
