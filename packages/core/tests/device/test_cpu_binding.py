"""Workers are bound to cores."""

import os
import subprocess
import sys

import pytest

from vllm_davinci.core.device import cpu_binding
from vllm_davinci.core.device.cpu_binding import CPU_AFFINITY, bind_threads, share_of_cores


@pytest.mark.parametrize(
    ("cores", "count", "expected"),
    [
        (range(8), 2, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ([6, 2, 4], 1, [[2, 4, 6]]),
        (range(5), 2, [[0, 1], [2, 3]]),
        ([3], 2, [[], []]),
    ],
)
def test_every_worker_gets_equally_many_adjacent_cores(cores, count, expected):
    assert [share_of_cores(cores, rank, count) for rank in range(count)] == expected


@pytest.mark.nightly("planning")
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core is no choice")
def test_all_threads_of_a_process_are_bound():
    program = (
        "import os, threading\n"
        "from vllm_davinci.core.device.cpu_binding import bind_threads\n"
        "end = threading.Event()\n"
        "other = threading.Thread(target=end.wait); other.start()\n"
        "last = max(os.sched_getaffinity(0)); count = len(os.sched_getaffinity(0))\n"
        "bind_threads(count - 1, count)\n"
        "assert os.sched_getaffinity(0) == {last}\n"
        "assert os.sched_getaffinity(other.native_id) == {last}\n"
        "end.set()\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_torch_npu_s_own_binding_wins(monkeypatch, caplog):
    monkeypatch.setenv(CPU_AFFINITY, "1")
    before = os.sched_getaffinity(0)
    cpu_binding.logger.addHandler(caplog.handler)
    try:
        bind_threads(0, max(2, len(before)))
    finally:
        cpu_binding.logger.removeHandler(caplog.handler)
    assert "CPU_AFFINITY_CONF=1 lets torch_npu bind threads" in caplog.text
    assert os.sched_getaffinity(0) == before
