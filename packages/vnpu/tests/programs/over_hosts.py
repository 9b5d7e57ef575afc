"""Runs every collective in every dtype on any number of hosts; prints a digest of each result.

The argument is the number of sizes per collective. RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT
are as in torchrun; LOCAL_RANK is the device's number on its host.
"""

import hashlib
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.set_num_threads(1)
torch.npu.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("hccl", timeout=timedelta(seconds=120))
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.int64, torch.int8)
# The last size takes several rounds, and reductions in several parts.
SIZES = (7, 1 << 14, (1 << 20) + 3)[: int(sys.argv[1])]


def values(size: int, dtype: torch.dtype, salt: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * salt + rank)
    if dtype.is_floating_point:
        return torch.randn(size, generator=generator).to(dtype).npu()
    return torch.randint(-9, 10, (size,), generator=generator).to(dtype).npu()


def tell(what: str, result: torch.Tensor) -> None:
    content = result.cpu().contiguous().view(torch.uint8).numpy().tobytes()
    print("RESULT", rank, what, hashlib.sha256(content).hexdigest()[:16], flush=True)


def reduce(name: str, size: int, dtype: torch.dtype) -> None:
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT):
        x = values(size, dtype, 1)
        dist.all_reduce(x, op)
        tell(f"all_reduce {op} {name}", x)
    x = values(size, dtype, 2)
    dist.reduce(x, world - 1)
    if rank == world - 1:
        tell(f"reduce {name}", x)
    x = torch.empty(size, dtype=dtype).npu()
    dist.reduce_scatter_single(x, values(size * world, dtype, 3))
    tell(f"reduce_scatter {name}", x)


def move(name: str, size: int, dtype: torch.dtype) -> None:
    x = torch.empty(size * world, dtype=dtype).npu()
    dist.all_gather_single(x, values(size, dtype, 4))
    tell(f"all_gather {name}", x)
    x = values(size, dtype, 5)
    dist.broadcast(x, world - 1)
    tell(f"broadcast {name}", x)
    x = torch.empty(size * world, dtype=dtype).npu()
    dist.all_to_all_single(x, values(size * world, dtype, 6))
    tell(f"all_to_all {name}", x)
    x = torch.empty(size, dtype=dtype).npu()
    parts = list(values(size * world, dtype, 7).chunk(world)) if rank == 0 else None
    dist.scatter(x, parts, src=0)
    tell(f"scatter {name}", x)


def move_unequal(size: int) -> None:
    sends = [size * (1 + (rank + to) % 3) for to in range(world)]
    gets = [size * (1 + (rank + of) % 3) for of in range(world)]
    x = torch.empty(sum(gets)).npu()
    dist.all_to_all_single(x, values(sum(sends), torch.float32, 8), gets, sends)
    tell(f"all_to_all_v {size}", x)


def send_around(size: int) -> None:
    """Sends to the next rank and receives from the previous one, within and across hosts."""
    x = torch.empty(size).npu()
    operations = [
        dist.P2POp(dist.isend, values(size, torch.float32, 9), (rank + 1) % world),
        dist.P2POp(dist.irecv, x, (rank - 1) % world),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    tell(f"send and receive {size}", x)


for size in SIZES:
    for dtype in DTYPES:
        reduce(f"{dtype} {size}", size, dtype)
        move(f"{dtype} {size}", size, dtype)
    move_unequal(size)
    send_around(size)
# A group of some ranks on both hosts.
some = dist.new_group([0, world - 1])
if rank in (0, world - 1):
    x = values(1000, torch.float32, 10)
    dist.all_reduce(x, group=some)
    tell("all_reduce of two", x)
dist.barrier()
print("done", flush=True)
dist.destroy_process_group()
