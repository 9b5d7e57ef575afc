"""Settings shared by suites of vLLM's own tests: sources and requirements."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import hub  # beside this file
from file_suite import Suite  # in the folder above

import versions

WITH_RAY = ("msgpack", "ray")
"""Packages for tests that import Ray, or check at their end whether it runs."""


def vllm_suite(
    directory: Path,
    what: str,
    *,
    packages: tuple[str, ...] = (),
    environment: Mapping[str, str] = MappingProxyType({}),
    file_limit: float = 1800.0,  # some tests start servers, or two engines
    **settings: Any,
) -> Suite:
    """Makes a suite of the supported vLLM release's own tests, with stand-ins for hub models.

    directory: has files.txt and reasons.toml
    what:      the tests' subjects
    packages:  needed in addition to those of all suites
    environment, file_limit, settings: others of Suite
    """
    return Suite(
        directory=directory,
        what=f"tests of vLLM {versions.VLLM_VERSION} on device npu: {what}",
        source=f"vLLM {versions.VLLM_VERSION}'s unpacked source distribution",
        tests="tests",
        packages=(
            "tblib",
            "pytest-asyncio",
            "pytest-forked",
            "pytest-rerunfailures",
            "pytest-mock",
            *packages,
        ),
        environment={
            "HF_HOME": str(hub.DIRECTORY),
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VNPU_MEMORY": "8GiB",
            **environment,
        },
        file_limit=file_limit,
        **settings,
    )
