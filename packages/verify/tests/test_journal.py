"""A part continues where its process ended, and names the case that ended it."""

from pathlib import Path

from vllm_davinci.verify.finding import Finding
from vllm_davinci.verify.journal import Journal


def test_findings_are_stored_for_the_next_process(tmp_path: Path) -> None:
    path = tmp_path / "part.jsonl"
    first = Journal(path)
    first.begin("one")
    first.end("one", [Finding("one", 3, passed=True)], 1.5)
    first.begin("two")
    second = Journal(path)
    assert second.ended == {"one"} and second.begun == "two" and not second.is_finished
    assert [finding["value"] for finding in second.findings] == [3] and second.seconds == 1.5
    second.end("two", [Finding("two", "the process ended", passed=False)], 2.0)
    second.finish(2.5)
    third = Journal(path)
    assert third.is_finished and third.begun is None and third.ended == {"one", "two"}
    assert third.seconds == 2.5


def test_a_truncated_last_line_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "part.jsonl"
    Journal(path).end("one", [Finding("one", 3)], 1.0)
    with path.open("a", encoding="utf-8") as file:
        file.write('{"ends": "two", "findi')
    assert Journal(path).ended == {"one"}
