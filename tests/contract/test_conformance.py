"""Upstream test suites: selected files, their record, and its page."""

from importlib import import_module
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _scripts_on_the_path(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("conformance", "ci"):
        monkeypatch.syspath_prepend(str(repository / folder))


def write(path: Path, text: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_the_page_has_the_share_of_tests_that_pass():
    page = import_module("page").conformance_page(
        [
            {
                "suite": "s", "what": "w", "version": "v", "selection": "4 of 5 files",
                "source": "a checkout", "files": 4, "files_lacking_an_operator": 1,
                "files_whole": 2, "passed": 5, "skipped": 2, "lacks_operator": 2,
                "not_passed": 1, "reasons": {}, "unexplained": {},
            }
        ]
    )  # fmt: skip
    assert (
        "| 10 | 5, 50.0 % | 2, 20.0 % | 1, 10.0 % | 2, 20.0 % | 5 of 6, 83.3 % "
        "| 2 of 4, 50.0 % | 1 of 4, 25.0 % |" in page
    )


def test_a_run_is_compared_with_the_recorded_one(tmp_path, capsys):
    results, test_files = import_module("results"), import_module("test_files")
    recorded = tmp_path / "results.json"

    def finish(is_to_be_recorded: bool, **outcomes: str) -> int:
        found = [test_files.Outcome(name, outcome, "x") for name, outcome in outcomes.items()]
        record = results.report(found, [], {"version": "abc of today"})
        return results.finish(record, recorded, is_to_be_recorded)

    assert finish(True, one="passed", two="failed") == 1  # fails: the failed case has no reason
    assert finish(False, one="passed", two="failed") == 0
    assert finish(False, one="passed", two="passed") == 0
    assert finish(False, one="failed", two="passed") == 1
    assert "not in the record: one" in capsys.readouterr().out


def test_a_sample_of_cases_is_even_and_counted():
    results, test_files = import_module("results"), import_module("test_files")
    sample = import_module("case_sample").sample
    assert sample(3, 4) == {0, 1, 2}
    assert sample(10, 4) == {0, 3, 6, 9}
    found = [
        test_files.Outcome("test_x.py::f[*]", "sampled", "2 of 40"),
        test_files.Outcome("test_x.py::f[0]", "passed", "add_kernel, sum_kernel"),
        test_files.Outcome("test_x.py::f[1]", "passed", "add_kernel"),
    ]
    record = results.report(found, [], {})
    assert (record["passed"], record["cases_left_out"], record["kernels"]) == (2, 38, 2)
    assert results.settled(found, []) == found


def test_a_suite_runs_each_file_of_its_folders_or_says_why_not(tmp_path: Path):
    file_suite = import_module("file_suite")
    for name in ("a/test_one.py", "a/b/test_two.py", "a/test_three.py"):
        write(tmp_path / "source" / "test" / name)
    write(tmp_path / "files.txt", "test/a/test_*.py")
    excluded = tmp_path / "excluded.toml"
    found = file_suite.Suite(
        directory=tmp_path, what="", source="", tests="test", folders=("test/a",), packages=()
    )
    source = tmp_path / "source"
    both = ["test/a/test_one.py", "test/a/test_three.py"]
    assert sorted(found._files(source, found._excluded(source))) == both
    write(excluded, '[[excluded]]\nwhy = "trains"\nfiles = ["test/a/b/test_*.py"]')
    assert found._excluded(source) == {"trains": ["test/a/b/test_two.py"]}
    assert sorted(found._files(source, found._excluded(source))) == both
    write(excluded, '[[excluded]]\nwhy = "trains"\nfiles = ["test/a/test_one.py"]')
    with pytest.raises(SystemExit, match=r"test/a/b/test_two.py: name each in files.txt"):
        found._files(source, found._excluded(source))
    write(excluded, '[[excluded]]\nwhy = "trains"\nfiles = ["test/gone/*.py"]')
    with pytest.raises(SystemExit, match="no test/gone"):
        found._excluded(source)


@pytest.mark.parametrize("suite_name", ["torch_npu"])
def test_no_error_of_a_dtype_counts_as_an_operator_that_is_not_there(suite_name, repository):
    results, test_files = import_module("results"), import_module("test_files")
    reasons = results.read_reasons(repository / "conformance" / suite_name / "reasons.toml")
    for message in (
        "RuntimeError: input must be half, float or int32, but got Double",
        "aclnnAdd failed, error code is 161002",
        "expected scalar type Float but found Half",
    ):
        outcome = test_files.Outcome("test/test_x.py::test_y", "failed", message)
        reason = results.reason_of(outcome, reasons)
        assert reason is None or not reason.lacks_operator
