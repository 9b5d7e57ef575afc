"""Each method with 1 to 4 drafts on each shipped checkpoint, without cases of other files."""

from pathlib import Path
from typing import Any

import pytest

from vllm_davinci_testing.engines.drafters import WRONG
from vllm_davinci_testing.engines.eagle_checkpoint import random_eagle
from vllm_davinci_testing.engines.speculating import speculation, told

CASES = [
    *(("tiny_deepseek", "ngram", count) for count in (1, 2, 3, 4)),
    ("tiny_deepseek", "custom_class", 3),
    *(("tiny_llama", method, count) for method in ("eagle", "draft_model") for count in (1, 4)),
    ("tiny_llama", "ngram", 2),
]


def drafter(method: str, target: Path, place: Path) -> dict[str, Any]:
    if method == "eagle":
        return {"model": str(random_eagle(target, place))}
    return {"custom_class": {"model": WRONG}, "draft_model": {"model": str(target)}}.get(method, {})


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "method", "count"), CASES)
def test_no_token_changes(name, method, count, drafting_engine, repository, tmp_path):
    target = repository / "checkpoints" / name
    asked = speculation(method, count, **drafter(method, target, tmp_path / "drafter"))
    with drafting_engine(target, {**asked, "enforce_eager": False}) as engine:
        drafted, accepted = told(engine)
    assert drafted > 0
    if method == "draft_model":  # the model itself
        assert accepted == drafted
