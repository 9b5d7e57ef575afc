"""A pytest plugin for adapters' tests on the NPU: prepares layers like the platform's manager.

vLLM's tests check the class of each platform's punica wrapper. They create layers without the
manager, which would give each layer its stacked matrices (core.lora.stacked_weights).
"""

from collections.abc import Generator
from typing import Any

import pytest
from vllm.lora.layers.base import BaseLayerWithLoRA

from vllm_davinci.core.lora.punica import NPUPunicaWrapper
from vllm_davinci.core.lora.stacked_weights import stack_weights

WITHOUT_A_MANAGER = "test_layers.py"


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Any, Any]:
    """Gives test modules the class of the NPU's punica wrapper."""
    report = yield
    if isinstance(collector, pytest.Module) and hasattr(collector.obj, "check_punica_wrapper"):
        collector.obj.check_punica_wrapper = lambda wrapper: type(wrapper) is NPUPunicaWrapper
    return report


_set_mapping = BaseLayerWithLoRA.set_mapping


def _set_mapping_with_matrices(self: BaseLayerWithLoRA, punica_wrapper: Any) -> None:
    stack_weights(self)
    _set_mapping(self, punica_wrapper)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    """Gives layers their matrices where vLLM's managers do."""
    if item.path.name == WITHOUT_A_MANAGER:
        BaseLayerWithLoRA.set_mapping = _set_mapping_with_matrices  # type: ignore[method-assign]
    try:
        return (yield)
    finally:
        BaseLayerWithLoRA.set_mapping = _set_mapping  # type: ignore[method-assign]
