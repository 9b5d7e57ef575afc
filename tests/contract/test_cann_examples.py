"""CANN's example programs as a suite: which there are, what they print, what counts as passed."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

PROGRAM = "ops-nn/activation/elu/examples/test_aclnn_elu"


PAGE = """# Sample
## Sample Output

```text
[INFO]  Sum:   2.000000, took 3.5 ms at 0x7f00aa112233
[INFO]  stream=<stream_pointer>
[ERROR] Diagnostics: ret=...
...
[SUCCESS] done.
```

Where the runtime has no sum:

```text
[WARN]  No sum.
```
## Known Issues
```text
none
```
"""


@pytest.fixture(autouse=True)
def _scripts_on_the_path(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("ci/conformance", "ci"):
        monkeypatch.syspath_prepend(str(repository / folder))


@pytest.fixture
def examples() -> ModuleType:
    return import_module("cann_examples.examples")


@pytest.fixture
def runner() -> ModuleType:
    return import_module("cann_examples.run")


def write(path: Path, text: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def example(examples: ModuleType, name: str = PROGRAM, **changes: Any) -> Any:
    return examples.Example(**{"name": name, "operators": frozenset(), "left_out": None, **changes})


def suite(runner: ModuleType, directory: Path, script: str | None, reasons: Any = ()) -> Any:
    """One whose programs are shell scripts, run by the shell."""
    if script is not None:
        write(directory / "built" / PROGRAM, script)
    (directory / "logs").mkdir(exist_ok=True)
    return runner.Suite(
        directory / "built",
        directory / "logs",
        list(reasons),
        (("sh",),),
        {"aclnnElu"}.__contains__,
    )


def test_examples_for_other_chips_and_without_operators_are_left_out(
    examples: ModuleType, tmp_path: Path
):
    folder = tmp_path / "activation" / "elu" / "examples"
    call = "ret = aclnnEluGetWorkspaceSize(x);"
    write(folder / "test_aclnn_elu.cpp", f"{call}\n// aclnnAddGetWorkspaceSize(x);")
    write(folder / "test_aclnn_elu_950.cpp", call)
    write(folder / "arch35" / "test_aclnn_elu.cpp", call)
    write(folder / "test_aclnn_empty.cpp", f"/* {call} */ int main() {{}}")
    write(tmp_path / "experimental" / "a" / "examples" / "test_aclnn_a.cpp", call)
    write(folder / "test_geir_elu.cpp", call)
    found = {
        each.name.split("examples/")[1]: each for each in examples.examples_of("ops-nn", tmp_path)
    }
    assert found["test_aclnn_elu"].operators == {"aclnnElu"}
    assert {name: each.left_out for name, each in found.items()} == {
        "test_aclnn_elu": None,
        "test_aclnn_elu_950": "for other chips",
        "arch35/test_aclnn_elu": "for other chips",
        "test_aclnn_empty": "calls no operator",
        "test_aclnn_a": "experimental",
    }


def test_examples_of_the_runtime_are_the_targets_of_their_builds(
    examples: ModuleType, tmp_path: Path
):
    host = tmp_path / "example" / "event" / "0_status"
    write(host / "CMakeLists.txt", "add_executable(\n  main main.cpp)\nadd_executable(other o.cpp)")
    write(host / "main.cpp", "aclnnAddGetWorkspaceSize(x);")
    write(
        tmp_path / "example" / "kernel" / "CMakeLists.txt", "ascendc_library(k)\nadd_executable(k)"
    )
    found = examples.examples_of("runtime", tmp_path)
    assert [(each.name, each.left_out) for each in found] == [
        ("runtime/example/event/0_status/main", None),
        ("runtime/example/event/0_status/other", None),
        ("runtime/example/kernel/k", "needs device code"),
    ]
    assert found[0].operators == {"aclnnAdd"}


def test_a_git_directory_without_a_work_tree_has_the_files_that_match(tmp_path: Path):
    tree = tmp_path / "ops-nn"
    write(tree / "a" / "examples" / "test_aclnn_a.cpp", "text")
    write(tree / "a" / "large.bin", "data")
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@t", "-C", str(tree)]
    for arguments in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "x"]):
        subprocess.run([*git, *arguments], check=True, timeout=60)
    checkout = import_module("checkout")
    pattern = (":(glob)**/examples/**/test_aclnn*.cpp",)
    files = checkout.files_of(tree / ".git", pattern, tmp_path / "scratch")
    found = [path.relative_to(files) for path in files.rglob("*") if path.is_file()]
    assert found == [Path("a/examples/test_aclnn_a.cpp")]
    assert checkout.files_of(tree, pattern, tmp_path / "unused") == tree


def test_the_project_of_a_checkout_is_in_its_path(examples: ModuleType, tmp_path: Path):
    assert examples.project_of(tmp_path / "runtime" / "hicann+ops-nn" / "repo") == "ops-nn"
    with pytest.raises(SystemExit, match="which of ops-math"):
        examples.project_of(Path("/somewhere/else"))


@pytest.mark.parametrize(
    ("script", "outcome", "message"),
    [
        ("echo result is 1; exit 0", "passed", ""),
        ("echo '12 passed, 0 failed, error=0'", "passed", ""),
        ("exit 3", "failed", "status 3"),
        ("echo 'aclnnElu failed. ERROR: 161002'; exit 0", "failed", "ERROR: 161002"),
        ("kill -11 $$", "crashed", "signal 11"),
        (None, "not built", "no such program"),
    ],
)
def test_a_program_passes_with_status_0_and_no_failure_in_its_output(
    runner: ModuleType, examples: ModuleType, tmp_path: Path, script: str | None, outcome: str,
    message: str,
):  # fmt: skip
    (found,) = suite(runner, tmp_path, script).outcomes([example(examples)])
    assert (found.test, found.outcome) == (PROGRAM, outcome)
    assert message in found.message


def test_a_program_may_be_for_one_of_the_chips_alone(
    runner: ModuleType, examples: ModuleType, tmp_path: Path
):
    running = suite(runner, tmp_path, 'test "$CHIP" = 910C')
    for chips, outcome in ((("910B", "910C"), "passed"), (("910B",), "failed")):
        commands = tuple(("env", f"CHIP={chip}", "sh") for chip in chips)
        (found,) = replace(running, commands=commands).outcomes([example(examples)])
        assert found.outcome == outcome
        (tmp_path / "logs" / "outcomes.jsonl").unlink()


def test_pages_say_what_programs_print(examples: ModuleType, tmp_path: Path):
    folder = tmp_path / "example" / "reduce"
    write(folder / "CMakeLists.txt", "add_executable(main main.cpp)")
    write(folder / "README_en.md", PAGE)
    write(folder / "run.sh", 'mkdir -p build\nmkdir -p file\n./build/main\necho "[SUCCESS] done."')
    (found,) = examples.examples_of("runtime", tmp_path)
    with_sum = (
        "[INFO] Sum: 2.000000, took 3.5 ms at 0x7f00aa112233",
        "[INFO] stream=<stream_pointer>",
        "[ERROR] Diagnostics: ret=...",
    )
    assert found.prints == (with_sum, ("[WARN] No sum.",))
    assert found.folders == ("file",)
    pages = import_module("cann_examples.pages")
    printed = [
        "[INFO] Sum: 2.000000, took 9 ms at 0x55",
        "[INFO] stream=7",
        "[ERROR] Diagnostics: ret=1",
    ]
    assert pages.not_printed(found.prints, printed) == []
    assert pages.not_printed(found.prints, ["[WARN] No sum."]) == []
    assert pages.is_expected(printed[2], found.prints)
    wrong = [printed[0].replace("2.0", "3.0"), *printed[1:]]
    assert pages.not_printed((with_sum,), wrong) == [with_sum[0]]


def test_a_program_passes_when_it_prints_what_its_page_says(
    runner: ModuleType, examples: ModuleType, tmp_path: Path
):
    lines = ("sum is 2", "[ERROR] as announced: ...")
    for script, outcome in (
        ("echo sum is 2; echo '[ERROR] as announced: 5'", "passed"),
        ("echo sum is 3; echo '[ERROR] as announced: 5'", "failed"),
        ("echo sum is 2; echo '[ERROR] as announced: 5'; echo '[ERROR] another'", "failed"),
    ):
        running = suite(runner, tmp_path, script)
        (found,) = running.outcomes([example(examples, prints=(lines,))])
        assert found.outcome == outcome, found
        (tmp_path / "logs" / "outcomes.jsonl").unlink()


def test_partners_run_at_once_in_one_directory(
    runner: ModuleType, examples: ModuleType, tmp_path: Path
):
    other = PROGRAM.replace("test_aclnn_elu", "proc_b")
    wait = "for i in $(seq 100); do test -e {0} && exit 0; sleep 0.1; done; exit 1"
    write(tmp_path / "built" / other, f"touch b; {wait.format('a')}")
    running = suite(runner, tmp_path, f"touch a; {wait.format('b')}")
    (found,) = running.outcomes([example(examples, partners=(other,))])
    assert found.outcome == "passed"


def test_programs_are_not_told_where_libraries_are(
    runner: ModuleType, examples: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("LD_LIBRARY_PATH", "/somewhere")
    running = suite(runner, tmp_path, 'test -z "$LD_LIBRARY_PATH"')
    assert [each.outcome for each in running.outcomes([example(examples)])] == ["passed"]


def test_what_the_compiler_said_is_why_a_program_is_not_there(
    runner: ModuleType, examples: ModuleType, tmp_path: Path
):
    write(tmp_path / "built" / f"{PROGRAM}.txt", "error: no header\nmore")
    (found,) = suite(runner, tmp_path, None).outcomes([example(examples)])
    assert (found.outcome, found.message) == ("not built", "error: no header")


def test_what_passed_or_has_a_reason_is_not_run_again(
    runner: ModuleType, examples: ModuleType, tmp_path: Path
):
    reason = import_module("results").Reason(why="known", message="161002")
    counting = f"echo . >> {tmp_path}/runs; "
    for script, runs in (("exit 1", 1), ("exit 0", 2), ("exit 1", 2)):
        running = suite(runner, tmp_path, counting + script, [reason])
        running.outcomes([example(examples)])
        assert (tmp_path / "runs").read_text().count(".") == runs
    (tmp_path / "logs" / "outcomes.jsonl").unlink()
    for _ in range(2):
        running = suite(runner, tmp_path, f"{counting}echo failed: 161002; exit 1", [reason])
        (found,) = running.outcomes([example(examples)])
        assert found.outcome == "failed"
    assert (tmp_path / "runs").read_text().count(".") == 3


def test_the_record_counts_each_source_and_gives_every_reason(
    runner: ModuleType, examples: ModuleType, tmp_path: Path
):
    results, test_files = import_module("results"), import_module("test_files")
    reasons = [
        results.Reason(why="wrong itself", message="161002"),
        results.Reason(why="asks for more", message="undefined"),
    ]
    all_examples = [
        example(examples, f"ops-nn/{name}", **changes)
        for name, changes in {
            "good": {}, "wrong": {}, "unbuilt": {}, "unknown": {},
            "other": {"operators": frozenset({"aclnnOther"})},
            "old": {"left_out": "for other chips"},
        }.items()
    ]  # fmt: skip
    outcomes = [
        test_files.Outcome("ops-nn/good", "passed"),
        test_files.Outcome("ops-nn/wrong", "failed", "ERROR: 161002"),
        test_files.Outcome("ops-nn/unbuilt", "not built", "undefined: aclX"),
        test_files.Outcome("ops-nn/unknown", "failed", "status 9"),
    ]
    record = runner.record(
        suite(runner, tmp_path, None, reasons), all_examples, outcomes, {"ops-nn": "abc of today"}
    )
    (source,) = record["sources"]
    assert source == {
        "name": "ops-nn", "version": "abc of today", "programs": 6, "built": 3, "passed": 1,
        "left_out": {runner.LACKS_OPERATOR: 1, "for other chips": 1},
    }  # fmt: skip
    assert (record["passed"], record["not_passed"], record["lacks_operator"]) == (1, 2, 1)
    assert record["reasons"] == {"wrong itself": ["ops-nn/wrong"]}
    assert record["not_built"] == {"asks for more": ["ops-nn/unbuilt"]}
    assert record["unexplained"] == {"ops-nn/unknown": "failed: status 9"}

    page = import_module("generate_reference").conformance_page([record])
    assert "| ops-nn | abc of today | 6 | 1 | 1 | 1 | 3 | 1 of 3, 33.3 % |" in page
    assert "| asks for more | 1 | `ops-nn/unbuilt` |" in page
    assert "--checkout DIR... --programs BUILT --record" in page
