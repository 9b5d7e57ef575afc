"""Fixtures for private layouts."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _private_layouts_are_allowed() -> Iterator[None]:
    torch.npu.config.allow_internal_format = True
    yield
    torch.npu.config.allow_internal_format = False
