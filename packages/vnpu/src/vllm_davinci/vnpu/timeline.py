"""Traces of virtual devices: which task ran on which stream, when, and what it waited for.

Every process started with VNPU_TRACE=DIRECTORY writes DIRECTORY/<process number>.trace.json in the
Trace Event Format, which Perfetto and chrome://tracing show: a track for each stream, a slice for
each task, an arrow from each event's record to its wait. The processes of one host share a clock.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from vllm_davinci.vnpu import _C
from vllm_davinci.vnpu.errors import TraceError

SUFFIX = ".trace.json"

# In the process that runs the devices:
is_traced = _C.is_traced
"""Whether this process writes a trace. Settles this process's settings."""
name_stream = _C.name_stream
"""name_stream(handle, name): the track of a stream, given its native handle, gets this name."""
label_launches = _C.label_launches
"""label_launches(text): tasks launched from now on carry this label; "" ends it."""


@dataclass(frozen=True)
class Task:
    """One task on a stream. Times are microseconds of the trace's clock.

    category: "operator", "collective", "copy", "event" or "other"
    waited:   of end - begin, blocked on an event or on other ranks
    label:    what the program said that it was doing when it launched the task
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
        """From when it waited for nothing any more to its end: what it waits for comes first."""
        return min(self.begin + self.waited, self.end), self.end


@dataclass
class Timeline:
    """Tasks that one or several processes ran.

    processes: number -> what the process calls itself
    streams:   process and stream -> the track's name, such as "compute (device 0, stream 0)"
    clocks:    what the times are, as the processes say
    """

    tasks: list[Task] = field(default_factory=list)
    processes: dict[int, str] = field(default_factory=dict)
    streams: dict[tuple[int, int], str] = field(default_factory=dict)
    clocks: set[str] = field(default_factory=set)

    def role(self, task: Task) -> str:
        """The name of the task's stream without its numbers, "" when it has none."""
        return self.streams.get((task.process, task.stream), "").split(" (device", 1)[0]


def read(sources: Iterable[pathlib.Path]) -> Timeline:
    """The timeline in files and directories of files, of this module or of `merge`.

    Raises TraceError for what cannot be read, and when there is nothing in it.
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
    """Writes one file for all processes, whose times begin at 0. Returns how many tasks it has."""
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


def _events_of(file: pathlib.Path) -> Iterator[dict[str, Any]]:
    """Each line holds one event. The last one of a process that was killed may be cut off."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(
            f"{file} cannot be read: {error}. Name a trace that vnpu wrote."
        ) from error
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
