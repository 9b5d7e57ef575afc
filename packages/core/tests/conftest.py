"""Every test of core needs torch_npu, which needs CANN's libraries: a chip's, or else vnpu's."""

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import vllm_davinci.vnpu

# Before torch. Refused where a real CANN is present, which then serves the tests.
with contextlib.suppress(vllm_davinci.vnpu.ActivationError):
    vllm_davinci.vnpu.activate()

import pytest
import torch
from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import (
    cleanup_dist_env_and_memory,
    init_distributed_environment,
    initialize_model_parallel,
)


@pytest.fixture(scope="session")
def device() -> torch.device:
    torch.accelerator.set_device_index(0)
    return torch.device("npu", 0)


@pytest.fixture
def vllm_config(monkeypatch: pytest.MonkeyPatch) -> Iterator[VllmConfig]:
    """A configuration without a model, as the current one. The environment is put back."""
    monkeypatch.setattr(os, "environ", os.environ.copy())
    config = VllmConfig(device_config=DeviceConfig(device="npu"))
    with set_current_vllm_config(config):
        yield config


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.fixture
def one_rank(vllm_config: VllmConfig) -> Iterator[None]:
    """Process groups of a single rank, which layers ask for while they are built."""
    init_distributed_environment(
        world_size=1,
        rank=0,
        local_rank=0,
        distributed_init_method=f"tcp://127.0.0.1:{free_port()}",
        backend="gloo",
    )
    initialize_model_parallel(1, 1)
    yield
    cleanup_dist_env_and_memory()


RANKS_LIMIT_S = 300


@pytest.fixture
def run_ranks() -> Callable[..., list[str]]:
    """Runs a program of this directory once per rank, on devices 0 and up; what each printed.

    The programs' arguments are RANK, WORLD_SIZE, a free PORT, and what the test adds.
    """

    def run(
        program: str,
        world_size: int,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
    ) -> list[str]:
        command = [sys.executable, str(Path(__file__).with_name(program))]
        port = free_port()
        ranks = [
            subprocess.Popen(
                [*command, str(rank), str(world_size), str(port), *arguments],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env={**os.environ, **(environment or {})},
            )
            for rank in range(world_size)
        ]
        try:
            printed = [rank.communicate(timeout=RANKS_LIMIT_S)[0] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        for number, rank in enumerate(ranks):
            assert rank.returncode == 0, f"rank {number} failed:\n{printed[number][-4000:]}"
        return printed

    return run
