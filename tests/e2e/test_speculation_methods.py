"""Methods that draft on the host change no token."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from vllm_davinci_testing.engines.engine_process import EngineProcess
from vllm_davinci_testing.engines.fixture_types import StartEngine
from vllm_davinci_testing.engines.speculating import RACES, SMALL, generate, speculation, told

THOROUGH = pytest.mark.thorough
Engines = Callable[..., EngineProcess]
GRAPHS = {"enforce_eager": False}
TP2 = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
NEEDS_ARCTIC = pytest.mark.skipif(
    find_spec("arctic_inference") is None,
    reason="suffix trees need arctic-inference: docs/guides/speculative_decoding.md",
)


@pytest.fixture(scope="module")
def expected(start_engine: Engines, tiny_llama: Path) -> list[list[int]]:
    with start_engine(tiny_llama, **SMALL) as engine:
        return generate(engine)


@NEEDS_ARCTIC
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(GRAPHS, id="graphs", marks=THOROUGH),
        pytest.param({"num_gpu_blocks_override": 8}, id="few_blocks", marks=THOROUGH),
    ],
)
def test_suffix_trees_change_no_token(
    options: dict[str, Any], start_engine: StartEngine, tiny_llama: Path, expected: list[list[int]]
):
    """Runs twice, so that the second run finds the first one's texts in its tree."""
    with start_engine(
        tiny_llama, environment=RACES, **speculation("suffix", 4), **options
    ) as engine:
        assert generate(engine) == expected
        first = told(engine)
        assert generate(engine) == expected
        both = told(engine)
    assert first[1] > 0
    # Text that was generated once is drafted unchanged.
    assert (both[1] - first[1]) / (both[0] - first[0]) > 0.9


def test_without_its_package_the_method_says_what_to_install(
    start_engine: StartEngine, tiny_llama: Path
):
    if find_spec("arctic_inference") is not None:
        pytest.skip("arctic-inference is installed")
    with pytest.raises(Exception, match="pip install arctic-inference"):
        start_engine(tiny_llama, **speculation("suffix", 2))
