"""Workers started by Ray give the tokens of workers started by vLLM."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams

from vllm_davinci_testing.engines.host_engine import generate_on, tokens_in
from vllm_davinci_testing.processes.hosts import Host
from vllm_davinci_testing.processes.waiting import becomes_true

pytest.importorskip("ray", reason="Ray is not installed: pip install ray")
pytestmark = pytest.mark.thorough

MODEL = "llama_head64_gqa4"
MAX_TOKENS = 24
RAY_LIMIT_S, LIMIT_S = 120.0, 400.0
# Without these, Ray has 30 s to start, and leaves a secret in the user's home.
RAY = {
    "RAY_raylet_start_wait_time_s": "120",
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
}
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 256,
    "max_num_seqs": 32,
    "max_num_batched_tokens": 2048,
    "kv_cache_memory_bytes": 96 << 20,
}


def start_ray(hosts: tuple[Host, Host], npus: tuple[int, ...], folder: Path) -> None:
    """Starts Ray on one host per entry of `npus`, and waits for it."""
    for host, count in zip(hosts, npus, strict=False):
        log = folder / f"ray_{host.name}.txt"
        # Ray stores its sockets in /tmp/ray, which the hosts would share.
        place = 'mkdir -p /tmp/ray; mount -t tmpfs tmpfs /tmp/ray; exec "$@"'
        ray = [sys.executable, "-m", "ray.scripts.scripts", "start"]
        where = ["--head", "--port=6379", "--include-dashboard=false"]
        if host is not hosts[0]:
            where = [f"--address={hosts[0].address}:6379"]
        own = [f"--node-ip-address={host.address}", f'--resources={{"NPU": {count}}}']
        command = [
            "sh",
            "-c",
            place,
            "sh",
            *ray,
            *where,
            *own,
            "--num-cpus=2",
            "--object-store-memory=200000000",
        ]
        started = host.start(command, {**RAY, "VLLM_HOST_IP": host.address}, log)
        assert started.wait(RAY_LIMIT_S) == 0, log.read_text()


def ended_well(program: subprocess.Popen[bytes], log: Path) -> None:
    ended = becomes_true(lambda: program.poll() is not None, LIMIT_S)
    assert ended and program.returncode == 0, log.read_text(errors="replace")[-8000:]


@pytest.mark.parametrize(
    ("npus", "ranks"),
    [
        pytest.param((2,), {"tensor_parallel_size": 2}, id="one_host"),
        pytest.param((1, 1), {"tensor_parallel_size": 2}, id="two_hosts"),
        pytest.param((1, 1), {"pipeline_parallel_size": 2}, id="two_hosts_stages"),
    ],
)
def test_tokens_equal_those_of_workers_that_vllm_starts(
    npus, ranks, hosts, zoo, start_engine, prompts, tmp_path
):
    start_ray(hosts, npus, tmp_path)
    log = tmp_path / "engine.txt"
    options = {**OPTIONS, **ranks, "model": str(zoo(MODEL)), "distributed_executor_backend": "ray"}
    ended_well(generate_on(hosts[0], options, prompts, MAX_TOKENS, log, **RAY), log)
    with start_engine(zoo(MODEL), distributed_executor_backend="mp", **ranks) as engine:
        outputs = engine.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True),
        )
    assert tokens_in(log) == [list(output.outputs[0].token_ids) for output in outputs]
    assert len(set(re.findall(r"RayWorkerProc pid=(\d+)", log.read_text()))) == 2


def test_too_few_npus_end_the_start_with_how_many_there_are(hosts, zoo, prompts, tmp_path):
    start_ray(hosts, (1,), tmp_path)
    log = tmp_path / "engine.txt"
    options = {
        **OPTIONS,
        "tensor_parallel_size": 2,
        "model": str(zoo(MODEL)),
        "distributed_executor_backend": "ray",
    }
    program = generate_on(hosts[0], options, prompts, MAX_TOKENS, log, **RAY)
    assert becomes_true(lambda: program.poll() is not None, LIMIT_S), log.read_text()[-4000:]
    assert program.returncode != 0
    told = r"2 NPUs are needed .* Ray's cluster has 1, of which 1 are free after 60 s"
    assert re.search(told, log.read_text(errors="replace")), log.read_text()[-4000:]
