"""Pages with measurements state date and commit, and are not much older than their code."""

import re
import subprocess
from importlib import import_module
from pathlib import Path

import pytest

from vllm_davinci_testing.processes.programs import run_to_end

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("docs/measurements/*.md")), ROOT / "docs" / "guides" / "model_time.md"]
MOST_RELEASES_BEHIND = 1
# Pages known to be outdated, with the reason; remove a page when it is measured again.
KNOWN: dict[str, list[str]] = {}
STAMP = re.compile(
    r"^Figures of (?P<date>\d{4}-\d\d-\d\d) at commit (?P<commit>[0-9a-f]{7,40}), "
    r"with vLLM \d+\.(?P<vllm>\d+)\.\d+; of (?P<packages>[^\n]+)\.$",
    re.MULTILINE,
)


def releases_behind(changelog: str, version: str) -> int:
    """Returns the number of newer releases. changelog: a package's, newest release first"""
    return re.findall(r"^## (\d+\.\d+\.\d+)", changelog, re.MULTILINE).index(version)


def problems(page: str, vllm_minor: int, changelogs: dict[str, str]) -> list[str]:
    """Returns what is wrong with a page's stamp. changelogs: text by package"""
    found = STAMP.search(page)
    if found is None:
        return ["it has no line 'Figures of DATE at commit ... ' (ci/versions.py: stamp)"]
    behind = {"vLLM": vllm_minor - int(found["vllm"])}
    for measured in found["packages"].split(", "):
        name, version = measured.split()
        behind[name] = releases_behind(changelogs[name], version)
    return [
        f"its figures are {count} releases of {name} old: measure again"
        for name, count in behind.items()
        if count > MOST_RELEASES_BEHIND
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commits_of_figures_are_of_this_history(page: Path):
    git = ["git", "-C", str(ROOT)]
    if run([*git, "rev-parse", "--is-shallow-repository"]).stdout.strip() != "false":
        pytest.skip("there is no whole history here")
    named = re.findall(r"\bcommits? ([0-9a-f]{7,40})\b", page.read_text(encoding="utf-8"))
    assert named
    unknown = [
        commit
        for commit in named
        if run([*git, "merge-base", "--is-ancestor", commit, "HEAD"]).returncode
    ]
    assert not unknown


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return run_to_end(command, 60)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_figures_are_of_this_release_or_the_one_before(page: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(ROOT / "ci"))
    minor = int(import_module("versions").VLLM_VERSION.split(".")[1])
    changelogs = {
        path.parent.name: path.read_text(encoding="utf-8")
        for path in ROOT.glob("packages/*/CHANGELOG.md")
    }
    found = problems(page.read_text(encoding="utf-8"), minor, changelogs)
    assert found == KNOWN.get(page.stem, [])


@pytest.mark.parametrize(
    ("version", "minor", "problem"),
    [
        ("0.3.0", 32, None),
        ("0.2.0", 33, None),
        ("0.1.0", 32, "2 releases of core old"),
        ("0.3.0", 34, "2 releases of vLLM old"),
    ],
)
def test_a_page_that_is_older_by_more_than_a_release_is_found(version, minor, problem):
    changelog = "# Changelog\n\n## 0.3.0\n\n- x\n\n## 0.2.0\n\n- x\n\n## 0.1.0\n\n- x\n"
    page = f"# A\n\nFigures of 2026-11-23 at commit 35d48a0, with vLLM 0.32.0; of core {version}.\n"
    found = problems(page, minor, {"core": changelog})
    assert len(found) == (problem is not None)
    assert problem is None or problem in found[0]
    assert problems("# A\n\nFigures of last week.\n", minor, {})


def test_a_stamp_that_is_written_is_one_that_is_read(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(ROOT / "ci"))
    assert STAMP.fullmatch(import_module("versions").stamp("core", "vnpu"))
