"""Activating vnpu in a process and its children; when it must refuse."""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from vllm_davinci import vnpu
from vllm_davinci.vnpu.activate import prepare_environment
from vllm_davinci_testing.processes import programs
from vllm_davinci_testing.processes.forked import run_alone, run_command
from vllm_davinci_testing.processes.programs import run_to_end

RUN = [sys.executable, "-m", "vllm_davinci.vnpu", "run"]
PLAIN = {k: v for k, v in os.environ.items() if k not in ("LD_LIBRARY_PATH", "VNPU_ACTIVE")}


def python(source: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return run_to_end([sys.executable, "-c", source], 60, env=environment)


def test_activate_before_torch_makes_devices_appear_in_children_too() -> None:
    done = python(
        "from vllm_davinci import vnpu; vnpu.activate(); vnpu.activate()\n"
        "import torch; print(torch.npu.device_count(), vnpu.is_active(), flush=True)\n"
        "import subprocess, sys\n"
        "code = 'import torch; print((torch.ones(1).npu() + 1).item())'\n"
        "subprocess.run([sys.executable, '-c', code], check=True)",
        PLAIN,
    )
    assert done.stdout.split() == ["8", "True", "2.0"], done.stderr


@pytest.mark.nightly("planning")
def test_activate_after_torch_npu_was_loaded_is_refused(tmp_path: pathlib.Path) -> None:
    # The copy takes the place of libraries installed on the machine.
    shutil.copytree(vnpu.library_directory(), tmp_path / "lib64")
    environment = {**PLAIN, "LD_LIBRARY_PATH": str(tmp_path / "lib64")}
    done = python("import torch\nfrom vllm_davinci import vnpu; vnpu.activate()", environment)
    assert done.returncode != 0
    assert "before `import torch`" in done.stderr


def test_libraries_behind_a_symlink_are_not_taken_for_a_real_cann(tmp_path: pathlib.Path) -> None:
    (tmp_path / "link").symlink_to(vnpu.library_directory())
    environment = {**PLAIN, "LD_LIBRARY_PATH": str(tmp_path / "link")}
    done = python("from vllm_davinci import vnpu; print(vnpu.is_active())", environment)
    assert done.stdout.split() == ["True"], done.stderr
    prepare_environment(environment)  # vnpu's own libraries are not mistaken for a real CANN
    assert environment["LD_LIBRARY_PATH"].split(os.pathsep) == [str(vnpu.library_directory())]


@pytest.mark.nightly("planning")
def test_an_environment_started_through_a_link_is_active(tmp_path: pathlib.Path) -> None:
    """`vnpu` runs from the environment, and the command's Python from a link to the environment."""
    link = tmp_path / "environment"
    link.symlink_to(sys.prefix)
    assert sys.prefix != sys.base_prefix, "the tests run in a virtual environment"
    code = "from vllm_davinci import vnpu; print(vnpu._C.__file__); print(vnpu.is_active())"
    done = run_to_end([*RUN, "--", str(link / "bin" / "python"), "-c", code], 60, env=PLAIN)
    file, is_active = done.stdout.split()
    assert file.startswith(str(link)), "the link is not what Python imports from"
    assert is_active == "True"


def test_a_real_cann_is_not_hidden_unless_asked(tmp_path: pathlib.Path) -> None:
    (tmp_path / "libascendcl.so").touch()
    environment = {**PLAIN, "LD_LIBRARY_PATH": str(tmp_path)}
    with pytest.raises(vnpu.ActivationError, match="--takeover"):
        prepare_environment(environment)
    prepare_environment(environment, takeover=True)
    first = environment["LD_LIBRARY_PATH"].split(os.pathsep)[0]
    assert first == str(vnpu.library_directory())


def test_run_starts_a_command_with_its_options_and_passes_its_exit_status() -> None:
    options = ["--devices", "3", "--schedule", "fuzz:7", "--races", "report"]
    code = (
        "import sys, torch; torch.ones(1).npu(); print(torch.npu.device_count())\n"
        "from vllm_davinci.vnpu import _C; print(_C.schedule(), _C.races_found()); sys.exit(7)"
    )
    done = run_to_end([*RUN, *options, "--", sys.executable, "-c", code], 60, env=PLAIN)
    assert (done.returncode, done.stdout.split()) == (7, ["3", "fuzz:7", "0"]), done.stderr
    assert "vnpu: 0 races found." in done.stderr  # only the detector prints this line


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["run"], 2, "name a command"),
        (["run", "--", "no-such-command-here"], 127, "no such command"),
        (["run", "--devices", "0", "--", "true"], 1, "1 to 64"),
        (["run", "--schedule", "lazy", "--", "true"], 1, "fuzz:SEED"),
        (["run", "--races", "some", "--", "true"], 1, "expected 'off', 'report' or 'raise'"),
    ],
)
def test_run_refuses_unsupported_options(arguments: list[str], status: int, message: str) -> None:
    done = run_command("vllm_davinci.vnpu", *arguments)
    assert done.status == status
    assert message in done.stderr


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("VNPU_DEVICES", "many"),
        ("VNPU_MEMORY", "64GB"),
        ("VNPU_SCHEDULE", "fuzz:"),
        ("VNPU_COMPUTE", "yes"),
        ("VNPU_WAIT_LIMIT", "-1"),
    ],
)
def test_a_setting_that_does_not_parse_is_an_error(name: str, value: str) -> None:
    ended = run_alone("import torch; torch.ones(1).npu()", **{name: value})
    assert ended.status != 0
    assert f"{name}='{value}'" in ended.output
    assert "Expected" in ended.output


def test_visible_devices_are_selected_and_renumbered() -> None:
    lines = programs.output_of(  # torch_npu reads the number during its import
        "import torch; print(torch.npu.device_count(), torch.ones(1, device='npu:1').device)",
        ASCEND_RT_VISIBLE_DEVICES="5,2",
    )
    assert lines == ["2 npu:1"]


def test_a_device_that_does_not_exist_is_an_error_with_the_number_there_are() -> None:
    ended = run_alone(
        "import torch; torch.ones(1, device='npu:2')", ASCEND_RT_VISIBLE_DEVICES="0,1"
    )
    assert ended.status != 0
    assert "there is no device 2; 2 are visible" in ended.output
