"""Limits on vector cores for norms that run during another ubatch's collective."""

import ctypes

import pytest
import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.layernorm import RMSNorm

from vllm_davinci.core.device.core_limits import (
    check_vector_cores,
    limit_memory_bound,
    memory_bound,
)
from vllm_davinci.core.errors import ConfigurationError
from vllm_davinci.core.out_of_tree import register


def cores_of_current_stream() -> int:
    cores: int = torch.npu.get_stream_limit(torch.npu.current_stream())["vector_core_num"]
    return cores


def test_only_memory_bound_operators_have_the_limit(device: torch.device) -> None:
    whole = cores_of_current_stream()
    with limit_memory_bound(4):
        assert cores_of_current_stream() == whole
        with memory_bound():
            assert cores_of_current_stream() == 4
        assert cores_of_current_stream() == whole
    with memory_bound():
        assert cores_of_current_stream() == whole
    with limit_memory_bound(None), memory_bound():
        assert cores_of_current_stream() == whole


@pytest.mark.refused_calls
def test_norms_of_sums_have_the_limit(device: torch.device, vllm_config: VllmConfig) -> None:
    """An operator cannot be launched without a core; with one core its result is the same."""
    register()
    norm = RMSNorm(64).to(device)
    x, residual = torch.randn(2, 3, 64).to(device)
    expected = norm(x, residual.clone())
    with limit_memory_bound(0):
        norm(x)
        with pytest.raises(RuntimeError, match="no vector core is left"):
            norm(x, residual.clone())
    with limit_memory_bound(1):
        limited = norm(x, residual.clone())
    assert all(torch.equal(a, b) for a, b in zip(limited, expected, strict=True))


@pytest.mark.refused_calls
def test_the_limit_holds_after_a_collective_has_bound_the_thread(device, vllm_config):
    """The collective limits its own stream; torch_npu does not report this to later operators."""
    register()
    norm = RMSNorm(64).to(device)
    x, residual = torch.randn(2, 3, 64).to(device)
    with limit_memory_bound(1):
        norm(x, residual.clone())
    of_collectives = torch.npu.Stream()
    use = ctypes.CDLL("libascendcl.so").aclrtUseStreamResInCurrentThread
    assert use(ctypes.c_void_p(of_collectives.npu_stream)) == 0
    with limit_memory_bound(0), pytest.raises(RuntimeError, match="no vector core is left"):
        norm(x, residual)


def test_more_cores_than_the_device_has_are_refused(device: torch.device) -> None:
    available = cores_of_current_stream()
    check_vector_cores("option", None)
    check_vector_cores("option", available)
    with pytest.raises(
        ConfigurationError, match=f"option = {available + 1} exceeds the {available} "
    ):
        check_vector_cores("option", available + 1)
