"""A `vllm` command before vLLM is imported."""

import signal
import sys
from pathlib import Path

import pytest

# Replaces vLLM's program: prints what it finds, and is interrupted.
PROGRAM = """
import os, signal, sys
autoload = os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD")
print(autoload, "torch" in sys.modules, flush=True)
os.kill(os.getpid(), signal.SIGINT)
"""


@pytest.fixture
def vllm(tmp_path: Path) -> str:
    program = tmp_path / "vllm"
    program.write_text(PROGRAM)
    return str(program)


@pytest.mark.parametrize("command", [["serve", "model"], ["bench", "throughput"]])
def test_an_engine_s_command_says_what_it_does_and_is_interrupted_quietly(
    command: list[str], run_without_device, vllm: str
):
    done = run_without_device(vllm, *command)
    assert done.returncode == -signal.SIGINT
    (line,) = done.stderr.splitlines()
    assert "importing vLLM and torch" in line
    assert done.stdout.split()[1] == "False"  # torch is not imported


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["serve", "./nothing"], "vllm serve: error: there is no ./nothing."),
        (["bench", "throughput", "--model=/nothing"], "vllm bench throughput: error: there is no"),
    ],
)
def test_a_nonexistent_path_ends_before_the_import(command, said, run_without_device, vllm):
    done = run_without_device(vllm, *command)
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(said)


@pytest.mark.parametrize("command", [["bench", "serve"], ["chat"]])
def test_a_client_needs_no_device(command: list[str], run_without_device, vllm: str):
    done = run_without_device(vllm, *command)
    assert done.stdout.split() == ["0", "False"]
    assert "imported" not in done.stderr


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            "ConnectionRefusedError(111, 'refused')",
            "no server answers ([Errno 111] refused). Start",
        ),
        (
            "ValueError('Failed:\\nError: Cannot connect to host a:1')",
            "(Cannot connect to host a:1)",
        ),
        ("ValueError('of a program')", ""),
    ],
)
def test_a_client_whose_server_is_absent_ends_with_one_line(error, said, run_without_device, vllm):
    Path(vllm).write_text(f"raise RuntimeError('Failed to fetch models') from {error}")
    done = run_without_device(vllm, "bench", "serve")
    assert done.returncode == 1
    if said:
        (line,) = done.stderr.splitlines()
        assert line.startswith("vllm bench serve: error: ") and said in line
    else:
        assert done.stderr.endswith("RuntimeError: Failed to fetch models\n")


@pytest.mark.nightly("planning")
def test_transformers_can_be_imported_without_a_device(run_without_device):
    program = "from transformers import AutoModelForCausalLM; print(AutoModelForCausalLM.__name__)"
    done = run_without_device("-c", program, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert done.stdout.strip() == "AutoModelForCausalLM", done.stderr


def test_another_program_is_unchanged(run_without_device):
    program = "import signal; print(signal.getsignal(signal.SIGINT).__name__)"
    done = run_without_device("-c", program)
    assert (done.stdout.strip(), done.stderr) == ("default_int_handler", ""), sys.executable
