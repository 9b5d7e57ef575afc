"""Groups over two hosts give a single host's bits and checks, and name failed ranks."""

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_davinci_testing.processes.hosts import Host, ended_well, start_ranks, two_hosts
from vllm_davinci_testing.processes.ranks import check_ranks
from vllm_davinci_testing.processes.waiting import becomes_true

pytestmark = pytest.mark.nightly("operators")

EVERY_COLLECTIVE = Path(__file__).parents[1] / "programs" / "over_hosts.py"
LIMIT_S = 240.0
NAMED_S = 30.0

START = """
import os, sys, time
from datetime import timedelta
import torch
import torch.distributed as dist

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.set_num_threads(1)
torch.npu.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("hccl", timeout=timedelta(seconds=200))
x = torch.ones(8).npu()
dist.all_reduce(x)
assert x.cpu().tolist() == [world] * 8
print("met", os.getpid(), flush=True)
"""
WAIT = (
    START
    + """
if rank == world - 1:
    time.sleep(600)
try:
    dist.all_reduce(x)
    torch.npu.synchronize()
except RuntimeError as error:
    print("RAISED", time.time(), error, flush=True)
os._exit(0)
"""
)
MISMATCH = (
    START
    + """
try:
    dist.all_reduce(torch.ones(8 if rank < world - 1 else 9).npu())
    torch.npu.synchronize()
except RuntimeError as error:
    print("RAISED", error, flush=True)
time.sleep(1)
os._exit(0)
"""
)


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    with two_hosts() as both:
        yield both


def results(texts: list[str]) -> list[str]:
    return sorted(re.findall(r"^RESULT .*$", "\n".join(texts), re.MULTILINE))


@pytest.mark.parametrize(
    ("ranks_per_host", "sizes"), [(1, "2"), pytest.param(4, "3", marks=pytest.mark.thorough)]
)
def test_every_collective_has_the_bits_of_one_host(hosts, tmp_path, ranks_per_host, sizes):
    processes, outputs = start_ranks(hosts, ranks_per_host, EVERY_COLLECTIVE, [sizes], tmp_path)
    over_hosts = results(ended_well(processes, outputs, LIMIT_S))
    on_one = results(check_ranks(EVERY_COLLECTIVE, 2 * ranks_per_host, sizes))
    assert len(on_one) > 100
    assert over_hosts == on_one


def test_ranks_of_two_hosts_in_different_collectives_get_both(hosts, tmp_path):
    processes, outputs = start_ranks(hosts, 1, MISMATCH, [], tmp_path)
    for text in ended_well(processes, outputs, LIMIT_S):
        assert re.search(
            r"rank 0 \(host1:\d+\) runs all_reduce\(8 x float32, sum\).* while rank 1 "
            r"\(host2:\d+\) runs all_reduce\(9 x float32, sum\)",
            text,
        ), text[-3000:]


def has_met(outputs: list[Path]) -> bool:
    return all("met" in output.read_text(errors="replace") for output in outputs)


@pytest.mark.parametrize(
    ("end", "ranks_per_host"),
    [
        ("end", 1),
        pytest.param("end", 2, marks=pytest.mark.thorough),
        pytest.param("cut_off", 2, marks=pytest.mark.thorough),
    ],
)
def test_a_host_that_dies_is_named_to_all_who_are_left(hosts, tmp_path, end, ranks_per_host):
    processes, outputs = start_ranks(hosts, ranks_per_host, WAIT, [], tmp_path)
    assert becomes_true(lambda: has_met(outputs), LIMIT_S), outputs[0].read_text()
    ended_at = time.time()
    getattr(hosts[1], end)()
    left = slice(0, ranks_per_host)
    for text in ended_well(processes[left], outputs[left], LIMIT_S):
        raised = re.search(r"RAISED ([\d.]+) (.*)", text, re.DOTALL)
        assert raised, text[-3000:]
        assert float(raised[1]) - ended_at < NAMED_S
        assert re.search(r"rank \d \(host2:\d+\) (is gone|has said nothing for)", raised[2]), (
            raised[2]
        )


def test_a_rank_that_exits_without_a_word_leaves_its_last_part(hosts, tmp_path):
    """Messages that a process has sent still arrive after it has ended."""
    program = (
        START
        + """
for _ in range(20):
    dist.all_reduce(torch.ones(100_000).npu())
torch.npu.synchronize()
print("finished", flush=True)
"""
    )
    processes, outputs = start_ranks(hosts, 1, program, [], tmp_path)
    assert all("finished" in text for text in ended_well(processes, outputs, LIMIT_S))


@pytest.mark.thorough
def test_ranks_of_a_table_meet_without_root_information(hosts, tmp_path):
    servers = [
        {"server_id": host.address, "device": [{"device_id": "0", "rank_id": str(rank)}]}
        for rank, host in enumerate(hosts)
    ]
    table = tmp_path / "ranks.json"
    table.write_text(json.dumps({"version": "1.0", "server_list": servers, "status": "completed"}))
    processes, outputs = start_ranks(
        hosts, 1, EVERY_COLLECTIVE, ["1"], tmp_path, RANK_TABLE_FILE=str(table)
    )
    over_hosts = results(ended_well(processes, outputs, LIMIT_S))
    assert over_hosts == results(check_ranks(EVERY_COLLECTIVE, 2, "1"))


def test_without_an_address_ranks_of_another_host_get_the_setting_to_change(hosts, tmp_path):
    processes, outputs = start_ranks(
        hosts, 1, START, [], tmp_path, HCCL_IF_IP="", HCCL_CONNECT_TIMEOUT="20"
    )
    assert becomes_true(lambda: processes[1].poll() is not None, LIMIT_S)
    text = outputs[1].read_text()
    assert "runs on host host1, this rank on host2" in text
    assert "Set HCCL_IF_IP to each host's own address" in text
