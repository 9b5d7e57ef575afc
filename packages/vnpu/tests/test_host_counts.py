"""A host's calls to its devices are counted, per process and per command."""

import sys
from pathlib import Path

import pytest
import torch

from vllm_davinci.vnpu import HostCounts, counted, host_counts
from vllm_davinci_testing.processes.forked import run_to_exit
from vllm_davinci_testing.processes.programs import run_to_end

# Ends at once without cleaning up, like workers.
WORK = """
import os, torch
x = torch.ones(8).npu()
torch.npu.synchronize()
for _ in range(3):
    x = x + x
x.cpu()
os._exit(5)
"""


def test_a_block_is_counted_also_where_it_raises():
    x = torch.ones(8).npu()
    with counted() as counts:
        x + x + x
    assert counts == HostCounts(launches=2)
    with pytest.raises(ZeroDivisionError), counted() as counts:
        x.cpu()
        1 / 0  # noqa: B018
    assert (counts.copies_to_host, counts.synchronizations > 0) == (1, True)


def test_each_process_has_its_file_and_leaves_nothing_to_write(tmp_path: Path):
    for _ in range(2):
        assert run_to_exit(WORK, VNPU_COUNTS=str(tmp_path)).status == 5
    found = host_counts.read(tmp_path)
    assert len(found) == 2
    for each in found:
        assert Path(sys.executable).name.rstrip(".0123456789") in each.command
        assert each.counts.launches >= 4  # the copy and three sums
        assert each.counts.copies_to_host == 1
        assert each.counts.synchronizations >= 1
    assert found[0].counts == found[1].counts


def test_the_command_prints_them_and_keeps_the_status():
    vnpu = [sys.executable, "-m", "vllm_davinci.vnpu"]
    done = run_to_end([*vnpu, "run", "--count", "--", sys.executable, "-c", WORK])
    assert done.returncode == 5
    head, line = done.stderr.splitlines()[-2:]
    assert "copies to host" in head
    # The program's name is shown, however long its path is.
    assert line.split()[4:7] == ["1", Path(sys.executable).name, "-c"], line


def test_a_directory_that_does_not_exist_is_named(tmp_path: Path):
    missing = tmp_path / "missing"
    done = run_to_exit(WORK, VNPU_COUNTS=str(missing))
    assert done.status != 5
    assert f"VNPU_COUNTS='{missing}'" in done.stderr
