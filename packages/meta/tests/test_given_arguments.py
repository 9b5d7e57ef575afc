"""Mistakes in arguments are found before torch and vLLM are imported."""

import sys
from pathlib import Path

import pytest

from vllm_davinci.meta.given_arguments import missing_directory, unknown_option
from vllm_davinci.planner.deployments.table import all_deployments
from vllm_davinci.planner.dry_run.engine_arguments import _parser
from vllm_davinci_testing.processes.programs import run_to_end

CHECKPOINTS = Path(__file__).parents[3] / "checkpoints"
LIMIT_S = 60


def test_every_option_of_vllm_is_accepted() -> None:
    options = [each for action in _parser()._actions for each in action.option_strings]
    assert len(options) > 200
    assert unknown_option(options) is None
    assert (
        unknown_option(["-tp", "2", "-O3", "--additional-config.dbo.enabled", "--max-num_seqs=3"])
        is None
    )
    for row in all_deployments().values():
        assert unknown_option(row.arguments()) is None


@pytest.mark.parametrize(
    ("option", "nearest"),
    [
        ("--tensor-paralel-size=2", "--tensor-parallel-size"),
        ("--no-enabel-prefix-caching", "--enable-prefix-caching"),
        ("--compilation-confg.mode=0", "--compilation-config"),
    ],
)
def test_an_unknown_option_is_refused(option: str, nearest: str) -> None:
    said = unknown_option(["--max-model-len=4", option])
    assert said is not None and said.endswith(f"Did you mean {nearest}?")


def test_a_nonexistent_path_is_refused_and_a_hub_name_is_not() -> None:
    nearest = CHECKPOINTS / "tiny_llama"
    for spoken in (CHECKPOINTS / "tiny_lama", f"{CHECKPOINTS}/tiny_lama/"):
        said = missing_directory(str(spoken))
        assert said is not None and said.endswith(f"Did you mean {nearest}?")
    assert missing_directory("./nothing-like-it") == "there is no ./nothing-like-it."
    for name in ("Qwen/Qwen3-0.6B", "gpt2", "s3://bucket/folder/model", str(nearest)):
        assert missing_directory(name) is None


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("config", "./tiny_lama"), "there is no ./tiny_lama"),
        (("config", "gpt2", "--", "--max-num-sqs=3"), "Did you mean --max-num-seqs?"),
        (("explain", "gpt2", "--tokens=9", "--", "--max-num-sqs=3"), "--max-num-seqs?"),
        (("check-model", "./tiny_lama"), "there is no ./tiny_lama"),
    ],
)
def test_commands_refuse_without_importing_vllm(arguments: tuple[str, ...], said: str) -> None:
    program = (
        "import sys; from vllm_davinci.meta.__main__ import main; status = main(sys.argv[1:]);"
        "print(sorted({'torch', 'vllm'} & {*sys.modules})); sys.exit(status)"
    )
    done = run_to_end([sys.executable, "-c", program, *arguments], LIMIT_S)
    assert (done.returncode, done.stdout) == (1, "[]\n"), done.stderr
    assert said in done.stderr
