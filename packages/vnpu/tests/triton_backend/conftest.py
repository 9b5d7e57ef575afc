"""Lets Triton launch on virtual NPUs in this process, for the tests of this folder."""

from collections.abc import Iterator

import pytest
from triton import knobs
from triton.runtime import driver

from vllm_davinci.vnpu.triton_backend.driver import VirtualDriver


@pytest.fixture(scope="session", autouse=True)
def kernels_run_on_virtual_devices(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with knobs.cache.scope():
        knobs.cache.dir = str(tmp_path_factory.mktemp("triton"))  # compile anew in each run
        driver.set_active(VirtualDriver())
        yield
        driver._active = None
