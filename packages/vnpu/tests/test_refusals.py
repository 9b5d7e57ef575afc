"""Calls are counted, and refused calls recorded, over all processes with the same directory."""

import subprocess
import sys
from pathlib import Path
from textwrap import indent

import pytest

from vllm_davinci.vnpu import VirtualDeviceConfig, VirtualDeviceError, refusals
from vllm_davinci_testing.processes.forked import run_to_exit
from vllm_davinci_testing.processes.programs import run_to_end

CALLS = """
import os, torch, torch_npu
x, gamma = torch.ones(2, 8).npu(), torch.ones(8).npu()
for _ in range(3):
    torch_npu.npu_rms_norm(x, gamma, 1e-6)
try:
    torch_npu.npu_rms_norm(x, torch.ones(4).npu(), 1e-6)
except RuntimeError:
    pass
torch.npu.synchronize()
os._exit(0)  # nothing is written at the end
"""


def test_calls_of_several_processes_are_counted_and_refusals_kept(tmp_path: Path):
    for soc in ("Ascend910B3", "Ascend910B3", "reference"):
        done = run_to_exit(CALLS, VirtualDeviceConfig(soc=soc, refusals=tmp_path))
        assert done.status == 0, done.stderr
    found = refusals.read(tmp_path)
    assert found.calls == {"Ascend910B3": 8, "reference:Ascend910B3": 4}
    socs = [refusal.soc for refusal in found.refused]
    assert socs == [*["Ascend910B3"] * 2, "reference:Ascend910B3"]
    for refusal in found.refused:
        assert "gamma (argument 2) has sizes [4]" in refusal.message
        assert "in <module>" in refusal.site


def test_operators_without_rules_are_kept_once_for_each_place(tmp_path: Path):
    program = """
import os, torch, torch_npu
x = torch.ones(2, 8).npu()
for _ in range(3):
    x.erfinv_()
torch.npu.synchronize()
os._exit(0)
"""
    done = run_to_exit(program, VirtualDeviceConfig(refusals=tmp_path))
    assert done.status == 0, done.stderr
    [call] = refusals.read(tmp_path).free
    assert call.operator == "aclnnInplaceErfinv"
    assert "in <module>" in call.site


def test_a_probe_is_not_a_refused_call(tmp_path: Path):
    program = f"def refusal_of():\n{indent(CALLS, '    ')}\nrefusal_of()"
    done = run_to_exit(program, VirtualDeviceConfig(refusals=tmp_path))
    assert done.status == 0, done.stderr
    found = refusals.read(tmp_path)
    assert (len(found.refused), len(found.asked)) == (0, 1)


@pytest.mark.nightly("operators")
def test_the_command_shows_them_and_fails_where_a_call_was_refused(tmp_path: Path):
    kept = tmp_path / "kept"
    vnpu = [sys.executable, "-m", "vllm_davinci.vnpu"]
    legal = CALLS.replace("torch.ones(4)", "gamma")
    for program, status, text in (
        (legal, 0, "Ascend910B3: 4 calls checked against CANN's documents, 0 refused"),
        (CALLS, 1, "1 x on Ascend910B3: aclnnRmsNorm: gamma"),
    ):
        run = [*vnpu, "run", "--soc=Ascend910B3", f"--refusals={kept}", "--", sys.executable, "-c"]
        subprocess.run([*run, program], check=True, timeout=120)
        shown = run_to_end([*vnpu, "refusals", str(kept)], 60)
        assert (shown.returncode, text in shown.stdout) == (status, True), shown.stdout


def test_a_directory_that_does_not_exist_is_named(tmp_path: Path):
    with pytest.raises(VirtualDeviceError, match="none is not a directory"):
        refusals.read(tmp_path / "none")
