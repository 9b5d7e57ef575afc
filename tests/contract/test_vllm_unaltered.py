"""No attribute of a vLLM module is replaced between its import and generated text."""

import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from vllm_davinci_testing.processes.forked import run_command, run_together
from vllm_davinci_testing.processes.programs import run_to_end
from vllm_davinci_testing.processes.ranks import free_port

# Lets an engine start, run and end on a busy machine with two cores.
LIMIT_S = 400
REPORT = "vllm_attributes: "  # begins the line of vllm_attributes.py
COMMANDS = Path(sys.executable).parent
PROGRAM = "tests/contract/vllm_attributes.py"
IN_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}

# A function, a name that only its own module rebinds, and a method.
ALTERED = {
    "vllm.v1.worker.gpu.model_runner:set_forward_context": (
        "vllm.v1.worker.gpu.model_runner.set_forward_context"
    ),
    "vllm.distributed.parallel_state:_TP": "vllm.distributed.parallel_state._TP",
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.profile_run": (
        "vllm.v1.worker.gpu.model_runner.GPUModelRunner.profile_run"
    ),
}


def run_on_vnpu(*command: str | Path, **environment: str) -> str:
    done = run_to_end(
        [str(COMMANDS / "vnpu"), "run", "--", *map(str, command)],
        LIMIT_S,
        env={**os.environ, **IN_PROCESS, **environment},
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    assert "Invalid process group" not in done.stderr, done.stderr[-6000:]
    return done.stdout


def attributes_after_an_engine(
    repository: Path, checkpoint: Path, options: dict[str, Any], *altered: str, **environment: str
) -> dict[str, Any]:
    output = run_on_vnpu(
        sys.executable,
        repository / PROGRAM,
        *(checkpoint, json.dumps(options), *altered),
        **environment,
    )
    (line,) = (line for line in output.splitlines() if line.startswith(REPORT))
    report: dict[str, Any] = json.loads(line.removeprefix(REPORT))
    assert report["platform"] == "vllm_davinci.core.platform"
    assert report["offline"] == []  # used by `vllm-davinci quantize` only
    assert report["tokens"] == [4, 4, 4, 4]
    # With fewer, the recorder would have missed vLLM's modules.
    assert report["modules"] > 300
    return report


def test_no_attribute_is_replaced_by_a_dense_model_and_a_replaced_one_would_be_found(repository):
    checkpoint = repository / "checkpoints" / "tiny_llama"
    report = attributes_after_an_engine(repository, checkpoint, {}, *ALTERED)
    assert report["replaced"] == []
    found = {line.split(":")[0] for line in report["replaced_after_altering"]}
    assert found == set(ALTERED.values())


@pytest.mark.nightly("layouts")
def test_no_attribute_is_replaced_by_quantized_experts_in_split_steps_of_two_ranks(
    repository: Path, tmp_path: Path
):
    """Each of two data-parallel ranks has its engine and worker in one process. The second rank is
    a fork of a process that has imported vLLM, so only the first has a record.
    """
    quantized = tmp_path / "quantized"
    source = repository / "checkpoints" / "tiny_deepseek"
    ended = run_command("vllm_davinci.meta", "quantize", source, quantized)
    assert ended.status == 0, ended.output[-6000:]
    port = free_port()
    options = {
        "enable_expert_parallel": True,
        "distributed_executor_backend": "uni",
        "additional_config": {"overlap": "lean"},
    }

    def place(rank: int) -> dict[str, str]:
        return {
            **IN_PROCESS,
            "VLLM_DP_RANK": str(rank),
            "VLLM_DP_RANK_LOCAL": str(rank),
            "VLLM_DP_SIZE": "2",
            "VLLM_DP_MASTER_IP": "127.0.0.1",
            "VLLM_DP_MASTER_PORT": str(port),
        }

    with ThreadPoolExecutor(1) as threads:
        arguments = (str(quantized), json.dumps(options))
        other = threads.submit(run_together, [repository / PROGRAM], [place(1)], LIMIT_S, arguments)
        report = attributes_after_an_engine(repository, quantized, options, **place(0))
        [ended] = other.result()
    assert ended.status == 0, ended.output[-6000:]
    assert report["quantization"] == "ascend"
    assert report["split_steps"] == 1
    assert report["replaced"] == []
