"""Pictures of modelled timelines."""

import json
import pathlib
import sys

import pytest

from vllm_davinci.vnpu import TraceError
from vllm_davinci.vnpu.__main__ import main
from vllm_davinci.vnpu.timing import picture

EVENTS = [
    {"ph": "M", "pid": 0, "tid": 0, "name": "process_name", "args": {"name": "device 0"}},
    {
        "ph": "M",
        "pid": 0,
        "tid": 0,
        "name": "process_labels",
        "args": {"labels": "modelled, no NPU: some-chip"},
    },
    {"ph": "M", "pid": 0, "tid": 1, "name": "thread_name", "args": {"name": "compute"}},
    {"ph": "M", "pid": 0, "tid": 2, "name": "thread_name", "args": {"name": "communication"}},
    {"ph": "X", "pid": 0, "tid": 1, "ts": 1000.5, "dur": 500, "cat": "operator", "name": "aclnnMm"}
    | {"args": {"label": "ubatch 0"}},
    {"ph": "X", "pid": 0, "tid": 1, "ts": 1500.5, "dur": 1, "cat": "event", "name": "event record"}
    | {"args": {}},
    {"ph": "X", "pid": 0, "tid": 2, "ts": 1501.5, "dur": 2000, "cat": "collective"}
    | {"name": "all_reduce", "args": {"label": "ubatch 1"}},
    {"ph": "C", "pid": 0, "ts": 1501.5, "name": "hbm", "args": {"%": 40.0}},
]


@pytest.fixture
def timeline(tmp_path: pathlib.Path) -> pathlib.Path:
    file = tmp_path / "serial.json"
    file.write_text(json.dumps(EVENTS))
    return file


def test_a_timeline_is_read_without_its_events_and_counters(timeline: pathlib.Path) -> None:
    read = picture.read(timeline)
    assert read.title == "modelled, no NPU: some-chip"
    assert (read.begin, read.end) == (1000.5, 3501.5)
    assert [(bar.row, bar.name, bar.label, bar.category) for bar in read.bars] == [
        ("compute", "aclnnMm", "ubatch 0", "operator"),
        ("communication", "all_reduce", "ubatch 1", "collective"),
    ]


def test_a_stream_without_a_role_is_named_after_its_only_kind_of_task(tmp_path):
    file = tmp_path / "unnamed.json"
    names = {"compute": "stream (device 0, stream 1)", "communication": "stream (device 0)"}
    events = [
        event | {"args": {"name": names.get(event["args"]["name"], event["args"]["name"])}}
        if event["name"] == "thread_name"
        else event
        for event in EVENTS
    ]
    file.write_text(json.dumps(events))
    assert [bar.row for bar in picture.read(file).bars] == [
        "operator stream (device 0, stream 1)",
        "collective stream (device 0)",
    ]


@pytest.mark.parametrize(
    ("text", "message"), [("[", "cannot be read"), ("[]", "has no tasks"), (None, "cannot be read")]
)
def test_an_invalid_timeline_is_refused(tmp_path, text, message):
    file = tmp_path / "other.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(TraceError, match=message):
        picture.read(file)


def test_without_matplotlib_the_error_says_how_to_get_it(timeline, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(TraceError, match=r"pip install 'vllm-davinci-vnpu\[picture\]'"):
        picture.draw([timeline], tmp_path / "a.png")


def test_the_command_draws_png_and_svg_reproducibly(timeline, tmp_path, monkeypatch):
    drawn = []
    for name in ("a.png", "b.svg", "c.svg"):
        file = tmp_path / name
        arguments = ["picture", str(timeline), str(timeline), "-o", str(file), "--begin", "0.1"]
        assert main([*arguments, "--length", "2"]) == 0
        drawn.append(file.read_bytes())
    png, svg, again = drawn
    assert png.startswith(b"\x89PNG")
    assert svg == again
    for words in (
        b"some-chip",
        b"modelled; hatched: collectives",
        b"communication",
        b"all_reduce",
        b"ubatch 1",
    ):
        assert words in svg
