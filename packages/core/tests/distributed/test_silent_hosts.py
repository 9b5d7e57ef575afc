"""On request, connections to a host without power or network end."""

import socket
import time

import pytest

from vllm_davinci.core.distributed import silent_hosts
from vllm_davinci_testing.processes.hosts import ended_well, start_ranks, two_hosts
from vllm_davinci_testing.processes.waiting import becomes_true

LIMIT_S = 120.0

WATCHES = """
import os, time
import torch, torch_npu
import torch.distributed as dist
from vllm_davinci.core.distributed.fault_channel import FaultChannel

torch.accelerator.set_device_index(0)
dist.init_process_group("gloo")
ended = []
channel = FaultChannel(lambda fault, teller: None, ended.append)
print("watches", flush=True)
while not ended:
    time.sleep(0.1)
print("TOLD", time.time(), ended[0], flush=True)
os._exit(0)
"""


def _connection() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        return client, server.accept()[0]


def _asks(connection: socket.socket) -> bool:
    return bool(connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE))


def test_new_connections_ask_for_keepalive_and_others_are_unchanged():
    earlier = _connection()
    before = silent_hosts.open_sockets()
    later = _connection()
    silent_hosts.notice_silence(before)
    assert not any(map(_asks, earlier)) and all(map(_asks, later))
    later[0].sendall(b"still open")
    assert later[1].recv(100) == b"still open"
    for connection in (*earlier, *later):
        connection.close()


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("end", "told"), [("end", "has ended"), ("cut_off", "that has been silent for 15 s")]
)
def test_a_lost_host_is_reported_within_seconds(end, told, tmp_path):
    with two_hosts() as hosts:
        processes, outputs = start_ranks(hosts, 1, WATCHES, [], tmp_path)
        met = becomes_true(lambda: all("watches" in o.read_text() for o in outputs), LIMIT_S)
        assert met, [output.read_text() for output in outputs]
        ended_at = time.time()
        getattr(hosts[1], end)()
        (text,) = ended_well(processes[:1], outputs[:1], LIMIT_S)
    _, at, what = text[text.index("TOLD") :].split(" ", 2)
    assert float(at) - ended_at < silent_hosts.SILENT_S + 5
    assert "rank 1 (pid " in what and "on host host2)" in what and told in what, what
