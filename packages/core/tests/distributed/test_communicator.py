"""Collectives between real processes on several devices equal sums and concatenations."""

from pathlib import Path

import pytest

from vllm_davinci_testing.processes.ranks import check_ranks

RANK_PROGRAM = Path(__file__).with_name("communicator_rank.py")


@pytest.mark.parametrize("world_size", [2, 4])
def test_every_collective_equals_its_definition(world_size: int):
    for number, printed in enumerate(check_ranks(RANK_PROGRAM, world_size)):
        assert f"rank {number} of {world_size}: equal" in printed, printed[-3000:]


BETWEEN_SERVERS = """
import pytest
from vllm.config import DeviceConfig, ParallelConfig, VllmConfig, set_current_vllm_config
from vllm_davinci.core.distributed.communicator import NPUCommunicator

sizes = [1, 3]
parallel = ParallelConfig(data_parallel_size=2, data_parallel_size_local=1)
config = VllmConfig(device_config=DeviceConfig(device="npu"), parallel_config=parallel)
cpu_group = dist.new_group(backend="gloo")
with set_current_vllm_config(config):
    comm = NPUCommunicator(cpu_group, torch.device("npu", rank), dist.group.WORLD, "dp:0")
part = torch.full((sizes[rank], 2), rank + 1.0).npu()
whole = torch.arange(8.0).view(4, 2)
assert comm.all_gatherv(part, 0, sizes).cpu()[:, 0].tolist() == [1, 2, 2, 2]
assert torch.equal(comm.reduce_scatterv(whole.npu(), 0, sizes).cpu(), 2 * whole.split(sizes)[rank])
comm.pads_unequal_parts = False
with pytest.raises(RuntimeError, match="within one server only"):
    comm.all_gatherv(part, 0, sizes)
with pytest.raises(RuntimeError, match="within one server only"):
    comm.reduce_scatterv(whole.npu(), 0, sizes)
dist.barrier(cpu_group)
"""


def test_unequal_parts_between_servers_are_padded_since_the_chip_refuses_them() -> None:
    check_ranks(BETWEEN_SERVERS, 2, VNPU_SOC="Ascend910_9391", VNPU_SERVER_DEVICES="1")
