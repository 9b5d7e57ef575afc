"""A device, a configuration and process groups, for tests of one process."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import (
    destroy_distributed_environment,
    destroy_model_parallel,
    init_distributed_environment,
    initialize_model_parallel,
)

from vllm_davinci.core.out_of_tree import register
from vllm_davinci_testing.engines.hostile_checkpoints import write_whole_checkpoint
from vllm_davinci_testing.processes.ranks import free_port


@pytest.fixture(scope="session")
def device() -> torch.device:
    torch.accelerator.set_device_index(0)
    return torch.device("npu", 0)


@pytest.fixture
def vllm_config(monkeypatch: pytest.MonkeyPatch) -> Iterator[VllmConfig]:
    """Sets a configuration without a model as the current one. Restores the environment."""
    monkeypatch.setattr(os, "environ", os.environ.copy())
    config = VllmConfig(device_config=DeviceConfig(device="npu"))
    with set_current_vllm_config(config):
        yield config


@pytest.fixture
def one_rank(vllm_config: VllmConfig) -> Iterator[None]:
    """Makes process groups of a single rank, which layers require when created."""
    init_distributed_environment(
        world_size=1,
        rank=0,
        local_rank=0,
        distributed_init_method=f"tcp://127.0.0.1:{free_port()}",
        backend="gloo",
    )
    initialize_model_parallel(1, 1)
    yield
    # Skips garbage collection of the whole process, which takes longer than most tests.
    destroy_model_parallel()
    destroy_distributed_environment()


@pytest.fixture
def registered(one_rank: None) -> None:
    """Makes process groups of a single rank, and registers our layers in place of vLLM's."""
    register()


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An intact checkpoint; tests change copies of it."""
    directory = tmp_path_factory.mktemp("whole")
    write_whole_checkpoint(directory)
    return directory
