"""`vllm-davinci dry-run --step-costs`: the file names its engine, and engines use it to decide."""

import json
from pathlib import Path

import pytest

from vllm_davinci_testing.processes.forked import run_command

LIMIT_S = 300
MODEL = Path(__file__).parents[2] / "checkpoints" / "tiny_llama"
COMMAND = "vllm_davinci.meta"
RANKS = "--tensor-parallel-size=2"
EXPERTS = Path(__file__).parents[2] / "checkpoints" / "tiny_deepseek"


@pytest.mark.thorough
def test_a_file_of_data_parallel_ranks_is_for_such_engines(tmp_path: Path):
    ranks = ("--data-parallel-size=2", "--enable-expert-parallel")
    costs = tmp_path / "costs.json"
    done = run_command(
        COMMAND, "dry-run", f"--model={EXPERTS}", "--chip=ascend910b3", *ranks, "--max-num-seqs=8",
        f"--step-costs={costs}", "--prompt-tokens=64", limit_s=LIMIT_S,
    )  # fmt: skip
    assert done.status == 0, done.stderr
    assert json.loads(costs.read_text())["engine"]["data_parallel_size"] == 2
    options = ("--", *ranks, f'--additional-config={{"overlap": "auto", "step_costs": "{costs}"}}')
    told = run_command(COMMAND, "explain", str(EXPERTS), "--tokens", "64", "--json", *options)
    assert told.status == 0, told.stderr


def test_a_first_step_takes_the_time_of_a_later_one(tmp_path: Path):
    times = []
    for sizes in ("64", "32,64"):
        costs = tmp_path / f"{sizes}.json"
        done = run_command(
            COMMAND, "dry-run", f"--model={EXPERTS}", "--chip=ascend910b3", RANKS,
            "--enable-expert-parallel", "--enforce-eager", "--max-num-seqs=2",
            f"--step-costs={costs}", f"--prompt-tokens={sizes}", limit_s=LIMIT_S,
        )  # fmt: skip
        assert done.status == 0, done.stderr
        steps = json.loads(costs.read_text())["steps"]
        times += [step["by_method"] for step in steps if step["tokens"] == 64]
    assert times[0] == times[1]


@pytest.mark.thorough
def test_steps_are_decided_and_explained_by_their_durations(tmp_path: Path):
    costs = tmp_path / "costs.json"
    done = run_command(
        COMMAND, "dry-run", f"--model={MODEL}", "--chip=ascend910b3", RANKS,
        f"--step-costs={costs}", "--prompt-tokens=32,128,512", limit_s=LIMIT_S,
    )  # fmt: skip
    assert done.status == 0, done.stderr
    content = json.loads(costs.read_text())
    sizes = [step["tokens"] for step in content["steps"]]
    assert {32, 128, 512} <= set(sizes) and sizes == sorted(set(sizes))
    # Overlap gains nothing in this small model: launches take the time, not operators.
    assert content["options"]["sequence_parallel.enabled"] is False
    assert content["options"]["dbo.enabled"] is False
    options = ("--", RANKS, f'--additional-config={{"overlap": "auto", "step_costs": "{costs}"}}')
    told = run_command(COMMAND, "explain", str(MODEL), "--tokens", "128", "--json", *options)
    assert told.status == 0, told.stderr
    durations = json.loads(told.stdout[told.stdout.index("{\n") :])["durations"]
    step = next(step for step in content["steps"] if step["tokens"] == 128)
    assert durations["whole"] == pytest.approx(step["whole"] / 10**9, abs=0.001)
    assert list(durations) == ["whole", "split"]
