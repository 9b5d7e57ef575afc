"""`vllm-davinci doctor` in working and broken environments."""

import json
import subprocess

import pytest
from rich.console import Console

from vllm_davinci.meta.machine import machine_checks
from vllm_davinci.meta.report import Check, Report, Status
from vllm_davinci.meta.report_table import print_report
from vllm_davinci_testing.processes.forked import run_alone

DOCTOR = ("-m", "vllm_davinci.meta", "doctor")


def checks(done: subprocess.CompletedProcess[str]) -> dict[str, dict[str, str]]:
    report = json.loads(done.stdout)
    return {check["subject"]: check for check in report["checks"]}


def test_without_a_device_it_exits_non_zero_and_says_how_to_get_one(run_without_device):
    done = run_without_device(*DOCTOR, "--json")
    assert done.returncode == 1, done.stderr
    assert json.loads(done.stdout)["can_run"] is False
    found = checks(done)
    assert found["libascendcl.so"]["status"] == "problem"
    assert "vnpu run -- vllm-davinci doctor" in found["libascendcl.so"]["remedy"]
    assert found["virtual NPU"]["seen"].endswith("installed, not active")


def test_on_the_virtual_npu_it_exits_zero_and_says_whose_libraries_are_used(run_on_vnpu):
    done = run_on_vnpu(*DOCTOR, "--json")
    found = checks(done)
    assert done.returncode == 0, done.stdout + done.stderr
    assert found["libopapi.so"]["seen"].startswith("vnpu: ")
    assert found["one operator"]["seen"] == "equal to the CPU's result"
    assert found["vLLM's platform"]["seen"] == "vllm_davinci.core.platform.NPUPlatform"
    assert found["Triton, active backends"]["seen"] == "npu"
    assert found["virtual NPU"]["seen"].endswith(", active")


@pytest.mark.nightly("planning")
def test_a_real_cann_beside_the_virtual_npu_is_reported_with_the_winner(run_on_vnpu, tmp_path):
    (tmp_path / "lib64").mkdir()
    (tmp_path / "lib64" / "libascendcl.so").write_bytes(b"")
    program = (
        "import os; os.environ['ASCEND_HOME_PATH'] = os.environ['FOUND_CANN']\n"
        "from vllm_davinci.meta.__main__ import main; main(['doctor', '--json'])"
    )
    found = checks(run_on_vnpu("-c", program, FOUND_CANN=str(tmp_path)))
    assert found["CANN"]["seen"] == str(tmp_path)
    assert found["both present"]["seen"].startswith("the virtual NPU wins")


def test_machine_and_variables_are_listed_without_secrets():
    given = {"VNPU_DEVICES": "3", "VLLM_API_KEY": "abc", "HOME": "/root", "VLLM_KEYBOARD": "1"}
    found = {check.subject: check.seen for check in machine_checks(given)}
    assert found["VNPU_DEVICES"] == "3"
    assert found["VLLM_API_KEY"] == "(hidden)"
    assert found["VLLM_KEYBOARD"] == "1"
    assert "HOME" not in found
    assert found["cores"].endswith("for this process")
    assert "GiB" in found["memory"]


def test_wrong_versions_and_plugins_are_problems_with_a_command_each_that_solves_them(
    pretend_version,
):
    for distribution in ("vllm", "torch"):
        pretend_version(distribution, "0.1.2")
    path = pretend_version("vllm_davinci_multistream", "0.9.0")
    done = run_alone(
        f"import sys; sys.path.insert(0, {path!r})\n"
        "from vllm_davinci.meta.__main__ import main; sys.exit(main(['doctor', '--json']))",
        VLLM_PLUGINS="other",
    )
    assert done.status == 1
    report = json.loads(done.stdout)
    wrong = {check["subject"]: check for check in report["checks"] if check["status"] == "problem"}
    assert {"vllm", "torch", "vllm-davinci-multistream", "VLLM_PLUGINS"} <= wrong.keys()
    for distribution in ("vllm", "torch"):
        assert wrong[distribution]["seen"] == "0.1.2"
        assert "pip install" in wrong[distribution]["remedy"]
    assert "==0.1.*" in wrong["vllm-davinci-multistream"]["remedy"]
    assert wrong["VLLM_PLUGINS"]["remedy"] == "export VLLM_PLUGINS=other,davinci"


def test_the_table_shows_each_remedy_once_and_the_verdict():
    report = Report(
        [
            Check("libraries", "libone.so", Status.PROBLEM, "not found", "source set_env.sh"),
            Check("libraries", "libtwo.so", Status.PROBLEM, "not found", "source set_env.sh"),
            Check("packages", "torch", Status.OK, "2.13.0"),
        ]
    )
    console = Console(record=True, width=120)
    print_report(report, console)
    shown = console.export_text()
    assert shown.count("source set_env.sh") == 1
    assert "libone.so, libtwo.so" in shown
    assert "No model can run here" in shown
    assert not report.can_run
