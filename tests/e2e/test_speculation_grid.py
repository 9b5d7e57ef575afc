"""Each method with 1 to 4 drafts on each shipped checkpoint, without cases of other files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vllm_davinci_testing.engines.drafters import WRONG
from vllm_davinci_testing.engines.eagle_checkpoint import random_eagle
from vllm_davinci_testing.engines.engine_process import EngineProcess
from vllm_davinci_testing.engines.fixture_types import StartEngine
from vllm_davinci_testing.engines.speculating import RACES, SMALL, generate, speculation, told

Engines = Callable[..., EngineProcess]
CASES = [
    *(("tiny_deepseek", "ngram", count) for count in (1, 2, 3, 4)),
    ("tiny_deepseek", "custom_class", 3),
    *(("tiny_llama", method, count) for method in ("eagle", "draft_model") for count in (1, 4)),
    ("tiny_llama", "ngram", 2),
]


@pytest.fixture(scope="module")
def expected(start_engine: Engines, repository: Path) -> dict[str, list[list[int]]]:
    found = {}
    for name in sorted({name for name, _, _ in CASES}):
        with start_engine(repository / "checkpoints" / name, **SMALL) as engine:
            found[name] = generate(engine)
    return found


def drafter(method: str, target: Path, place: Path) -> dict[str, Any]:
    if method == "eagle":
        return {"model": str(random_eagle(target, place))}
    return {"custom_class": {"model": WRONG}, "draft_model": {"model": str(target)}}.get(method, {})


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "method", "count"), CASES)
def test_no_token_changes(
    name: str,
    method: str,
    count: int,
    start_engine: StartEngine,
    repository: Path,
    expected: dict[str, list[list[int]]],
    tmp_path: Path,
):
    target = repository / "checkpoints" / name
    asked = speculation(method, count, **drafter(method, target, tmp_path / "drafter"))
    with start_engine(target, environment=RACES, **asked, enforce_eager=False) as engine:
        assert generate(engine) == expected[name]
        drafted, accepted = told(engine)
    assert drafted > 0
    if method == "draft_model":  # the model itself
        assert accepted == drafted
