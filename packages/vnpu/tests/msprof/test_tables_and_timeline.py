"""vnpu's `msprof`: its output for recorded tasks, and for invalid profiles."""

import csv
import json
import pathlib
from collections.abc import Iterator
from typing import Any

import pytest

from vllm_davinci.vnpu.msprof.__main__ import main

# In microseconds: two operators at once on two streams, a collective that overlaps the second one,
# and a gap.
TASKS = [
    ("operator", "aclnnMatmul", 2, 10, 20),
    ("operator", "aclnnExp", 5, 15, 30),
    ("collective", "all_reduce", 7, 25, 40),
    ("copy", "memory copy", 2, 20, 21),
    ("operator", "aclnnMatmul", 2, 50, 60),
]


@pytest.fixture
def profile(tmp_path: pathlib.Path) -> pathlib.Path:
    data = tmp_path / "PROF_000001_20260101000000000_A" / "device_3" / "data"
    data.mkdir(parents=True)
    lines = []
    for launch, (kind, name, stream, begin, end) in enumerate(TASKS):
        task: dict[str, Any] = {
            "kind": kind,
            "name": name,
            "stream": stream,
            "launch": launch,
            "launched_ns": 1000 * (begin - 5),
            "process": 41,
            "thread": 42,
            "begin_ns": 1000 * begin,
            "end_ns": 1000 * end,
        }
        if kind == "collective":
            task |= {"group": "world", "count": 8, "dtype": "bfloat16"}
        lines.append(json.dumps(task))
    (data / "tasks.jsonl").write_text("\n".join(lines) + "\n")
    return data.parent.parent


def export(profile: pathlib.Path) -> pathlib.Path:
    assert main(["--export=on", f"--output={profile}"]) == 0
    return profile / "mindstudio_profiler_output"


def table(directory: pathlib.Path, name: str) -> Iterator[dict[str, str]]:
    (path,) = directory.glob(f"{name}_*.csv")
    with path.open(newline="") as file:
        yield from csv.DictReader(file)


def test_overlap_is_the_time_when_two_kinds_are_busy(profile: pathlib.Path) -> None:
    (path,) = export(profile).glob("msprof_*.json")
    events = json.loads(path.read_text())
    (overlap,) = (
        event["pid"] for event in events if event.get("args") == {"name": "Overlap Analysis"}
    )
    times = {
        name: [
            (float(event["ts"]), event["dur"])
            for event in events
            if event["pid"] == overlap and event["name"] == name and event["ph"] == "X"
        ]
        for name in ("Computing", "Communication", "Communication(Not Overlapped)", "Free")
    }
    assert times == {
        "Computing": [(10, 20), (50, 10)],
        "Communication": [(25, 15)],
        "Communication(Not Overlapped)": [(30, 10)],
        "Free": [(40, 10)],
    }
    labels = {e["args"]["labels"] for e in events if e["name"] == "process_labels"}
    assert labels == {"CPU", "NPU 3"}
    rows = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert "Group world Communication" in rows


def test_tables_have_their_rows(profile: pathlib.Path) -> None:
    directory = export(profile)
    summary = list(table(directory, "op_summary"))
    assert [(row["Op Name"], row["Stream ID"], row["Task ID"]) for row in summary] == [
        ("aclnnMatmul", "2", "0"),
        ("aclnnExp", "5", "0"),
        ("hcom_allReduce_", "7", "0"),
        ("aclnnMatmul", "2", "2"),
    ]
    assert [row["Task Wait Time(us)"] for row in summary] == ["0.000", "0.000", "0.000", "10.000"]
    statistic = {row["OP Type"]: row for row in table(directory, "op_statistic")}
    assert statistic["Matmul"]["Count"] == "2"
    assert statistic["Matmul"]["Total Time(us)"] == "20.000"
    assert [row["kernel_name"] for row in table(directory, "task_time")][2] == "MEMCPY_ASYNC"


def test_damaged_and_invalid_profiles_are_named(profile, tmp_path, capsys):
    tasks = profile / "device_3" / "data" / "tasks.jsonl"
    tasks.write_text(tasks.read_text() + '{"kind":"oper')
    assert main(["--export=on", f"--output={profile}"]) == 1
    assert "tasks.jsonl, line 6 is not valid" in capsys.readouterr().err
    assert main(["--export=on", f"--output={tmp_path / 'PROF_none'}"]) == 1
    assert "taken on virtual NPUs" in capsys.readouterr().err
    assert main([f"--output={profile}"]) == 2


def test_the_help_lists_supported_options_only(capsys: pytest.CaptureFixture[str]) -> None:
    # torch_npu takes a listed `--type` to mean that databases can be exported.
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    assert "--export" in text
    assert "--type" not in text
