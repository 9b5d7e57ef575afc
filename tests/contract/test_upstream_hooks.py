"""The comparison of two vLLM wheels reports each changed name that our code uses."""

import zipfile
from functools import reduce
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

BEFORE = '''
import os
try:
    from fast import thing
except ImportError:
    thing = None

LIMIT: int = 3

class Runner:
    def __init__(self, config):
        self.config = config
        self.batches: list = []
    def prepare(self, batch, size=1):
        """Prepares."""
        return batch
    def sample(self, logits): return logits

def helper(a, *, b=2): ...
def moved(): ...
def copy_kernel(target, stride): ...
'''
CHANGES = {
    "size=1": "size=1, *, is_last=False",
    "def sample(self, logits): return logits": "def sample(self, logits): return logits + 1",
    "def moved(): ...": "",
    "self.batches: list = []": "",
    "stride": "STRIDE",
    '"""Prepares."""': '"""Prepares a batch."""',
}
AFTER = reduce(lambda text, change: text.replace(*change), CHANGES.items(), BEFORE)


@pytest.fixture
def comparison(repository: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(repository / "ci"))
    return import_module("upstream_hooks")


def wheel(path: Path, **modules: str) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in modules.items():
            archive.writestr(f"vllm/{name}.py", text)
    return path


@pytest.mark.parametrize(
    ("name", "kind", "expected"),
    [
        ("Runner.prepare", "overridden", "parameters: with is_last=False"),
        ("Runner.sample", "overridden", "its body is another"),
        ("Runner.sample", "imported", None),
        ("Runner", "imported", None),
        ("helper", "imported", None),
        ("moved", "imported", "gone from there; moved is in vllm.elsewhere"),
        ("thing", "imported", None),
        ("LIMIT", "imported", None),
        ("Runner.config", "attribute", None),
        ("Runner.batches", "attribute", "batches is no longer bound in Runner"),
        ("copy_kernel", "kernel", "parameters: without stride, with STRIDE"),
        ("Runner.sample", "kernel", "its body is another"),
    ],
)
def test_a_changed_name_is_reported(comparison, tmp_path, name, kind, expected):
    old = comparison.Wheel(wheel(tmp_path / "old.whl", runner=BEFORE))
    new = comparison.Wheel(
        wheel(tmp_path / "new.whl", runner=AFTER, elsewhere="def moved(): ...\n")
    )
    hook = comparison.Hook("ours:Ours", "vllm.runner", name, kind)
    told = comparison.change(hook, old, new)
    assert told == expected or (expected and told and told.startswith(expected))
    assert comparison.change(hook, old, old) is None


def test_every_method_that_ours_override_is_compared(comparison: ModuleType):
    by_kind: dict[str, set[str]] = {}
    for hook in comparison.hooks():
        by_kind.setdefault(hook.kind, set()).add(hook.name)
    assert {"GPUModelRunner._dummy_run", "Worker.load_model"} & by_kind["overridden"]
    assert "VllmConfig" in by_kind["imported"]
    assert "_post_update_kernel" in by_kind["kernel"]


def test_the_newest_release_that_installs_is_tried(repository, monkeypatch):
    monkeypatch.syspath_prepend(str(repository / "ci"))
    upstream = import_module("upstream")
    monkeypatch.setattr(upstream.versions, "VLLM_VERSION", "0.32.0")
    listed = "vllm (0.34.0)\nAvailable versions: 0.34.0, 0.34.0rc1, 0.33.10, 0.33.9, 0.32.0\n"
    releases = upstream.newer_releases(listed)
    assert releases == ["0.34.0", "0.33.10", "0.33.9"]

    def install(version: str) -> None:
        if version == "0.34.0":
            raise upstream.StepFailedError(f"Collecting\nERROR: {version} needs torch 2.14\nx")

    found = upstream.newest_that_installs(releases, install)
    assert found == ("0.33.10", {"0.34.0": "ERROR: 0.34.0 needs torch 2.14"})
    assert upstream.newest_that_installs([], install) == (None, {})
