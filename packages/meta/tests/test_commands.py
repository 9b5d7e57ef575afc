"""Commands of `vllm-davinci`: its own, other packages' commands, and missing ones."""

import subprocess
import sys
from pathlib import Path

import pytest

from vllm_davinci.meta import __main__ as program
from vllm_davinci.meta import commands


def test_commands_of_other_packages_are_found_by_entry_points():
    found = commands.installed_commands()
    assert {"deployments", "dry-run", "pools", "verify"} <= set(found)
    assert set(found) >= set(commands.EXTRAS)
    assert not set(found) & set(program.COMMANDS)


@pytest.mark.parametrize(("name", "extra"), sorted(commands.EXTRAS.items()))
def test_a_command_of_a_missing_package_says_how_to_get_it(name, extra, monkeypatch, capsys):
    monkeypatch.setattr(program, "installed_commands", dict)
    with pytest.raises(SystemExit) as ended:
        program.main([name, "--help"])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line == (
        f"vllm-davinci {name} is in vllm-davinci-{extra}, which is not installed: "
        f"pip install 'vllm-davinci[{extra}]'"
    )


@pytest.mark.nightly("planning")
@pytest.mark.parametrize(
    "command",
    [
        ("check-model", "tiny_llama"),
        ("config", "tiny_deepseek"),
        ("explain", "tiny_llama", "--tokens", "9"),
    ],
)
def test_a_command_needs_no_device(command: tuple[str, ...], run_without_device):
    name, model, *more = command
    checkpoint = Path(__file__).parents[3] / "checkpoints" / model
    done = run_without_device("-m", "vllm_davinci.meta", name, str(checkpoint), *more)
    assert done.returncode == 0, done.stderr


def test_an_unknown_command_is_refused(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        program.main(["dry-rum"])
    assert "invalid choice: 'dry-rum'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["config", "x", "--zzz=1"], "unknown argument --zzz=1."),
        (["compare", "x", "--promts=p"], "unknown argument --promts=p. Did you mean --prompts?"),
        (
            ["config", "x", "--max-model-len", "9"],
            "unknown argument --max-model-len. Options of vllm serve come after `--`.",
        ),
        (["deployments", "--mdel=x"], "unknown argument --mdel=x. Did you mean --model?"),
        (["quantize", "a", "b", "c"], "unknown argument c."),
    ],
    ids=["none is near", "near", "of vLLM", "another package", "too many"],
)
def test_an_unknown_argument_is_refused_with_the_nearest_option(arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        program.main(arguments)
    assert ended.value.code == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error == f"vllm-davinci {arguments[0]}: error: {message}"


def test_no_command_imports_torch_before_it_runs():
    code = (
        "import sys; from vllm_davinci.meta.commands import installed_commands; "
        "installed_commands(); print(sorted({'torch', 'vllm'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == "[]"
