"""`vllm-davinci verify` checks every operator that core launches, and its calls are current."""

import lzma
import re
from importlib import import_module
from pathlib import Path

import pytest

from vllm_davinci.verify.models import MODELS, NOT_COMPARED, WITHIN_OTHERS, calls_of
from vllm_davinci.verify.parts_of.constraints import CALLS

CALLED = re.compile(r"torch_npu\.(npu_[a-z0-9_]+)")


def test_every_operator_that_layers_call_is_compared_or_says_why_not(repository: Path) -> None:
    called = {
        name
        for package in ("core", "models")
        for source in (repository / "packages" / package / "src").rglob("*.py")
        for name in CALLED.findall(source.read_text(encoding="utf-8"))
    }
    names = [name for name, _ in calls_of(MODELS)]
    assert len(set(names)) == len(names), "findings of one name"
    compared = {name.split("/")[1] for name in names}
    used = {*NOT_COMPARED, *WITHIN_OTHERS, *compared}
    assert called - used == set(), "give each a call, or a reason in NOT_COMPARED"
    others = {*NOT_COMPARED, *WITHIN_OTHERS}
    assert others <= called, "a reason for what is gone"


@pytest.mark.thorough
def test_the_calls_that_a_chip_is_asked_about_are_fresh(repository, monkeypatch):
    monkeypatch.syspath_prepend(str(repository / "ci"))
    kept = lzma.decompress(CALLS.read_bytes()).decode()
    assert import_module("verify_calls").calls_file() == kept, "run `nox -s docs`"
