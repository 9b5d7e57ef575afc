"""Traces of virtual devices: stream, times and waits of every task.

Every process with VNPU_TRACE=DIRECTORY writes DIRECTORY/<process number>.trace.json in the Trace
Event Format of Perfetto and chrome://tracing: a track per stream, a slice per task, an arrow from
each event's record to its wait. The processes of a host share a clock.
"""

import json
import pathlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from vllm_davinci.vnpu import _C
from vllm_davinci.vnpu.errors import TraceError

SUFFIX = ".trace.json"

# In the process with the devices:
is_traced = _C.is_traced
"""True if this process writes a trace. Calling it freezes this process's vnpu settings."""
name_stream = _C.name_stream
"""name_stream(handle, name): names the track of a stream, given by its native handle."""
label_launches = _C.label_launches
"""label_launches(text): labels tasks launched from now on; "" ends the label."""


@dataclass(frozen=True)
class Task:
    """A task on a stream. Times are microseconds of the trace's clock.

    category: "operator", "collective", "copy", "event" or "other"
    waited:   part of end - begin spent waiting for an event or other ranks
    label:    the program's label at the launch
    """

    process: int
    stream: int
    name: str
    category: str
    begin: float
    end: float
    launched: float
    waited: float
    bytes_read: int = 0
    bytes_written: int = 0
    label: str = ""

    @property
    def busy(self) -> tuple[float, float]:
        """The task's interval without its wait, which comes first."""
        return min(self.begin + self.waited, self.end), self.end


@dataclass
class Timeline:
    """Tasks of one or several processes.

    processes: process number -> name
    streams:   process and stream -> the track's name, such as "compute (device 0, stream 0)"
    clocks:    the processes' descriptions of their times
    """

    tasks: list[Task] = field(default_factory=list)
    processes: dict[int, str] = field(default_factory=dict)
    streams: dict[tuple[int, int], str] = field(default_factory=dict)
    clocks: set[str] = field(default_factory=set)

    def role(self, task: Task) -> str:
        """The role in the stream's name, without numbers; "" if it has none."""
        return self.streams.get((task.process, task.stream), "").split(" (device", 1)[0]


def read(sources: Iterable[pathlib.Path]) -> Timeline:
    """Reads a timeline from trace files, merged files, or directories of them.

    Raises TraceError for unreadable or empty traces.
    """
    timeline = Timeline()
    for event in _events(sources):
        process, stream = int(event["pid"]), int(event["tid"])
        arguments = event.get("args", {})
        if event["ph"] == "X":
            timeline.tasks.append(
                Task(
                    process=process,
                    stream=stream,
                    name=event["name"],
                    category=event["cat"],
                    begin=event["ts"],
                    end=event["ts"] + event["dur"],
                    launched=arguments["launched"],
                    waited=arguments["waited"],
                    bytes_read=arguments.get("bytes_read", 0),
                    bytes_written=arguments.get("bytes_written", 0),
                    label=arguments.get("label", ""),
                )
            )
        elif event["name"] == "process_name":
            timeline.processes[process] = arguments["name"]
        elif event["name"] == "thread_name":
            timeline.streams[process, stream] = arguments["name"]
        elif event["name"] == "process_labels":
            timeline.clocks.add(arguments["labels"])
    timeline.tasks.sort(key=lambda task: (task.begin, task.end))
    return timeline


def merge(sources: Iterable[pathlib.Path], destination: pathlib.Path) -> int:
    """Writes one file for all processes, with times from 0. Returns its number of tasks."""
    events = list(_events(sources))
    begin = min(event["ts"] for event in events if "ts" in event)
    for event in events:
        if "ts" in event:
            event["ts"] = round(event["ts"] - begin, 3)
        if "launched" in event.get("args", {}):
            event["args"]["launched"] = round(event["args"]["launched"] - begin, 3)
    clocks = sorted({e["args"]["labels"] for e in events if e["name"] == "process_labels"})
    lines = ",\n".join(json.dumps(event, separators=(",", ":")) for event in events)
    about = json.dumps({"written_by": "vnpu", "clock": "; ".join(clocks)})
    text = f'{{"displayTimeUnit":"ms","otherData":{about},"traceEvents":[\n{lines}\n]}}\n'
    try:
        destination.write_text(text, encoding="utf-8")
    except OSError as error:
        raise TraceError(f"The trace cannot be written: {error}. Name another file.") from error
    return sum(event["ph"] == "X" for event in events)


def _events(sources: Iterable[pathlib.Path]) -> Iterator[dict[str, Any]]:
    found = False
    sources = list(sources)
    for source in sources:
        files = sorted(source.glob(f"*{SUFFIX}")) if source.is_dir() else [source]
        for file in files:
            for event in _events_of(file):
                found = True
                yield event
    if not found:
        raise TraceError(
            f"There is no trace in {', '.join(map(str, sources))}: no process ran a task on a "
            "virtual device. Start the command with `vnpu run --trace FILE -- COMMAND`."
        )


def lines_of(file: pathlib.Path, kind: str) -> list[str]:
    """The lines of a file that vnpu wrote. kind: of file, for the message of the TraceError"""
    try:
        return file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(
            f"{file} cannot be read: {error}. Name a {kind} that vnpu wrote."
        ) from error


def _events_of(file: pathlib.Path) -> Iterator[dict[str, Any]]:
    """Yields the event of each line; a killed process may leave its last line cut off."""
    lines = lines_of(file, "trace")
    for number, line in enumerate(lines):
        text = line.rstrip(",")
        if not text.startswith('{"ph"'):
            if text in ("[", "]", "]}", "") or text.startswith('{"displayTimeUnit"'):
                continue
            if number + 1 < len(lines):
                raise TraceError(
                    f"{file}, line {number + 1}: {text[:40]!r} is not an event of a trace that "
                    "vnpu wrote. Name such a file, or a directory of them."
                )
        try:
            yield json.loads(text)
        except json.JSONDecodeError as error:
            if number + 1 < len(lines):
                raise TraceError(f"{file}, line {number + 1}: {error}.") from error
