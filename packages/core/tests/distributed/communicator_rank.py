"""One rank of test_communicator.py, run with torchrun's variables."""

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch_npu  # noqa: F401  registers the hccl backend
from vllm.config import DeviceConfig, ParallelConfig, VllmConfig, set_current_vllm_config

from vllm_davinci.core.distributed.communicator import NPUCommunicator


def of_rank(number: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(number))


def same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.is_contiguous()
    torch.testing.assert_close(actual.cpu(), expected)


def check_equal_parts(comm: NPUCommunicator, mine: list[torch.Tensor]) -> None:
    """mine: a tensor (8, 5) per rank"""
    rank, world_size = comm.rank, comm.world_size
    here, total = mine[rank].to(comm.device), torch.stack(mine).sum(0)
    same(comm.all_reduce(here), total)
    assert torch.equal(here.cpu(), mine[rank]), "all_reduce wrote its input"
    same(comm.all_reduce(here.t()).t().contiguous(), total)
    for dim in (0, 1, -1):
        same(comm.all_gather(here, dim), torch.cat(mine, dim))
    same(comm.all_gather(here.t(), 0), torch.cat([rows.t() for rows in mine], 0))
    scattered = total[:, :4].contiguous()
    same(comm.reduce_scatter(here[:, :4], -1), scattered.chunk(world_size, -1)[rank].contiguous())
    same(comm.reduce_scatter(here, 0), total.chunk(world_size, 0)[rank])


def check_unequal_parts(comm: NPUCommunicator, mine: list[torch.Tensor]) -> None:
    rank, world_size, device = comm.rank, comm.world_size, comm.device
    sizes = [5, *[1] * (world_size - 1)]
    uneven = [of_rank(number, size, 3) for number, size in enumerate(sizes)]
    rows = [of_rank(10 + number, sum(sizes), 3) for number in range(world_size)]
    own = torch.stack(rows).sum(0).split(sizes)[rank].contiguous()
    for comm.pads_unequal_parts in (False, True):
        same(comm.all_gatherv(uneven[rank].to(device), 0, sizes), torch.cat(uneven))
        same(comm.reduce_scatterv(rows[rank].to(device), 0, sizes), own)
    pair = [uneven[rank].to(device), 2 * uneven[rank].to(device)]
    first, second = comm.all_gatherv(pair, 0, sizes)
    same(first, torch.cat(uneven))
    same(second, 2 * torch.cat(uneven))
    same(comm.all_gatherv(mine[rank].to(device), 0, [8] * world_size), torch.cat(mine))


def check_padding(cpu_group: dist.ProcessGroup, device: torch.device) -> None:
    """Unequal parts are padded only if DP ranks are on several servers."""
    for local, pads in ((2, False), (1, True)):
        parallel = ParallelConfig(data_parallel_size=2, data_parallel_size_local=local)
        config = VllmConfig(device_config=DeviceConfig(device="npu"), parallel_config=parallel)
        with set_current_vllm_config(config):
            made = NPUCommunicator(cpu_group, device, dist.group.WORLD, "dp:0")
        assert made.pads_unequal_parts is pads


def check_one_way(comm: NPUCommunicator, mine: list[torch.Tensor]) -> None:
    """Gathers to one rank, broadcasts from one rank, and sends to one rank."""
    here = mine[comm.rank].to(comm.device)
    gathered = comm.gather(here, dst=0, dim=0)
    assert (gathered is None) == (comm.rank != 0)
    if gathered is not None:
        same(gathered, torch.cat(mine))
    same(comm.broadcast(here.clone(), src=comm.world_size - 1), mine[-1])
    if comm.rank == 0:
        comm.send(here, 1)
    elif comm.rank == 1:
        same(comm.recv(here.shape, here.dtype, 0), mine[0])


def check_refusals(comm: NPUCommunicator, here: torch.Tensor) -> None:
    others = [1] * (comm.world_size - 1)
    for call, message in (
        (lambda: comm.reduce_scatter(here[:5], 0), "5 rows do not divide"),
        (lambda: comm.all_gatherv(here, 0, [2, *others]), "8 rows where"),
        (lambda: comm.reduce_scatterv(here, 0, [4, 1, *others]), "ranks"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def main(rank: int, world_size: int) -> None:
    torch.npu.set_device(rank)
    device = torch.device("npu", rank)
    limit = timedelta(seconds=60)
    dist.init_process_group("hccl", timeout=limit)
    cpu_group = dist.new_group(backend="gloo", timeout=limit)
    comm = NPUCommunicator(cpu_group, device, dist.group.WORLD, "tp:0")
    mine = [of_rank(number, 8, 5) for number in range(world_size)]
    check_equal_parts(comm, mine)
    check_unequal_parts(comm, mine)
    check_padding(cpu_group, device)
    check_one_way(comm, mine)
    check_refusals(comm, mine[rank].to(device))
    dist.barrier()
    dist.destroy_process_group()
    print(f"rank {rank} of {world_size}: equal", flush=True)


if __name__ == "__main__":
    main(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
