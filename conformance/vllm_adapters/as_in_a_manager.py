"""A pytest plugin for adapters' tests on the NPU, with layers as the platform's manager makes them.

vLLM's tests of layers and managers run on devices that they list, by the platform's kind, while
they are imported; on any other they are skipped or use the CPU. Here the NPU is in the list. They
also know the class of each platform's products, and make layers without a manager, which gives each
layer the matrices that its steps multiply with (core.lora.stacked_weights).
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest
from vllm.lora.layers.base import BaseLayerWithLoRA
from vllm.platforms import current_platform

from vllm_davinci.core.lora.punica import NPUPunicaWrapper
from vllm_davinci.core.lora.stacked_weights import stack_weights

ON_THE_DEVICE = ("test_layers.py", "test_lora_manager.py")
WITHOUT_A_MANAGER = "test_layers.py"


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Any, Any]:
    """Adds the NPU to the device lists of the modules in ON_THE_DEVICE."""
    if not isinstance(collector, pytest.Module) or collector.path.name not in ON_THE_DEVICE:
        return (yield)
    kind = type(current_platform)
    is_xpu = kind.is_xpu
    kind.is_xpu = lambda self: True  # type: ignore[method-assign]
    try:
        report = yield
    finally:
        kind.is_xpu = is_xpu  # type: ignore[method-assign]
    if hasattr(collector.obj, "check_punica_wrapper"):
        collector.obj.check_punica_wrapper = lambda wrapper: type(wrapper) is NPUPunicaWrapper
    return report


_set_mapping = BaseLayerWithLoRA.set_mapping


def _set_mapping_with_matrices(self: BaseLayerWithLoRA, punica_wrapper: Any) -> None:
    stack_weights(self)
    _set_mapping(self, punica_wrapper)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    """Gives layers their matrices where vLLM's managers do, before they are used."""
    if item.path.name == WITHOUT_A_MANAGER:
        BaseLayerWithLoRA.set_mapping = _set_mapping_with_matrices  # type: ignore[method-assign]
    try:
        return (yield)
    finally:
        BaseLayerWithLoRA.set_mapping = _set_mapping  # type: ignore[method-assign]
