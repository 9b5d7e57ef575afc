"""A pytest plugin that runs vLLM's tests for listed devices on the NPU, too.

Many tests choose their devices by the platform's kind at import, and skip other kinds. During this
import the platform claims to be XPU, which is listed and has no other effect in these tests.
"""

from collections.abc import Generator
from typing import Any

import pytest
from vllm.platforms import current_platform

FILES = (
    # Adapters' layers and managers.
    "test_layers.py",
    "test_lora_manager.py",
    # Parts of the V2 runner.
    "test_gpu_bad_words.py",
    "test_gpu_batch_shard.py",
    "test_gpu_gumbel_sample.py",
    "test_gpu_input_batch_v2.py",
    "test_gpu_logit_bias.py",
    "test_gpu_rejection_sampler_chunking.py",
    "test_gpu_thinking_budget.py",
    "test_gpu_trace_replay.py",
)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Any, Any]:
    """Imports the modules in FILES while the NPU claims to be a listed device."""
    if not isinstance(collector, pytest.Module) or collector.path.name not in FILES:
        return (yield)
    kind = type(current_platform)
    is_xpu = kind.is_xpu
    kind.is_xpu = lambda self: True  # type: ignore[method-assign]
    try:
        return (yield)
    finally:
        kind.is_xpu = is_xpu  # type: ignore[method-assign]
