"""Every test of core needs torch_npu, which needs CANN's libraries: a chip's, or vnpu's."""

import os
from collections.abc import Iterator

import pytest
import torch
from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config


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
