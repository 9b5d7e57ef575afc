"""Impossible options are refused by name, and a part continues in another process."""

import json
from pathlib import Path

import pytest

from vllm_davinci.meta.__main__ import main
from vllm_davinci.verify.errors import VerificationError
from vllm_davinci.verify.journal import Journal
from vllm_davinci.verify.page import page
from vllm_davinci.verify.parts import PARTS, Part, run_part
from vllm_davinci.verify.report import assembled, read_report
from vllm_davinci.verify.settings import FILE, Settings, open_directory, settings_of


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--only", "operators,everything"], "--only everything: the parts are environment"),
        (["--models", "qwen9"], "--models qwen9: there are qwen3-8b"),
        (["--checkpoints", "/nowhere"], "--checkpoints /nowhere has no config.json"),
        (["--ranks", "0"], "--ranks 0: name at least one device"),
        (["--compare", "/nowhere", "/nowhere"], "Name a report.json that"),
        (["--fit", "/nowhere"], "--fit needs --chip NAME and --output FILE.toml"),
    ],
)
def test_impossible_options_are_refused(options, said, capsys, tmp_path):
    assert main(["verify", "--directory", str(tmp_path / "run"), *options]) == 2
    assert said in capsys.readouterr().err


def test_a_directory_is_of_one_run(tmp_path: Path) -> None:
    settings = Settings(checkpoints=("a",), models=("qwen3-8b",), seed=3)
    open_directory(tmp_path, settings)
    open_directory(tmp_path, settings)
    assert settings_of(tmp_path) == settings
    with pytest.raises(VerificationError, match=r"another run: settings seed differ"):
        open_directory(tmp_path, Settings(checkpoints=("a",), models=("qwen3-8b",), seed=4))
    (tmp_path / FILE).write_text("{", encoding="utf-8")
    with pytest.raises(VerificationError, match=r"Start again with --restart"):
        open_directory(tmp_path, settings)


def test_reports_of_other_formats_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text('{"format": 0}', encoding="utf-8")
    with pytest.raises(VerificationError, match=r"not a report of format 1"):
        read_report(path)


# A part whose second case ends its process.
DYING = """
import os
from vllm_davinci.verify.case import Case
from vllm_davinci.verify.finding import Finding

def cases(settings, directory):
    yield Case("dying/first", lambda: [Finding("dying/first", 1, passed=True)])
    yield Case("dying/second", lambda: os._exit(9))
    yield Case("dying/third", lambda: 1 / 0)
    yield Case("dying/fourth", lambda: [Finding("dying/fourth", 4, passed=True)])
"""


@pytest.fixture
def dying(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Part:
    """Writes this part to a folder outside the package's parts."""
    package = tmp_path / "further_parts"
    package.mkdir()
    (package / "dying.py").write_text(DYING, encoding="utf-8")
    (tmp_path / "sitecustomize.py").write_text(
        f"import vllm_davinci.verify.parts_of as parts\nparts.__path__.append({str(package)!r})\n",
        encoding="utf-8",
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return Part("dying", "What becomes of a case that ends the process?", limit_s=60.0)


def test_a_case_that_ends_the_process_is_a_finding_and_the_others_run(dying, tmp_path):
    directory = tmp_path / "run"
    open_directory(directory, Settings())
    told: list[str] = []
    journal = run_part(dying, directory, told.append)
    values = {finding["name"]: finding["value"] for finding in journal.findings}
    assert values == {
        "dying/first": 1,
        "dying/second": "the process ended",
        "dying/third": "failed",
        "dying/fourth": 4,
    }
    assert len(told) == 1 and "dying/second" in told[0]
    third = next(each for each in journal.findings if each["name"] == "dying/third")
    assert "division by zero" in third["details"]["message"] and third["passed"] is False
    lines = (directory / "dying.jsonl").read_text(encoding="utf-8")
    run_part(dying, directory, told.append)
    assert (directory / "dying.jsonl").read_text(encoding="utf-8") == lines, "ran again"


def test_a_page_has_failures_first_and_a_picture_of_errors(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "operators.jsonl")
    error = {"kind": "error", "bound": 0.016}
    journal.findings = [
        {"name": "operators/mm/a/1", "value": 0.001, "passed": True, **error},
        {"name": "operators/mm/a/<2>", "value": 0.5, "passed": False, **error,
         "details": {"seed": 7}},
        {"name": "operators/mm/a/3", "value": "failed", "passed": False, **error},
    ]  # fmt: skip
    report = assembled({"operators": journal})
    assert (report["parts"][0]["passed"], report["parts"][0]["failed"]) == (1, 2)
    text = page(json.loads(json.dumps(report)), tmp_path)
    assert text.index("Unexpected") < text.index(PARTS[1].asks)
    assert text.count("<circle") == 3 and "&lt;2&gt;" in text and "&quot;seed&quot;: 7" in text
