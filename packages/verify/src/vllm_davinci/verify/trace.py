"""Reads torch_npu's profiles: when was each stream busy?"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HARDWARE = "Ascend Hardware"
FILE = "trace_view.json"
PROFILE = "profile"
"""Folder in a run's directory with a profile of each checkpoint."""


@dataclass(frozen=True)
class Task:
    """A task; times in microseconds since the trace's first task."""

    name: str
    stream: str
    begin: float
    end: float


def tasks_of(directory: Path) -> list[Task]:
    """Tasks of the newest profile below a directory, by begin; empty without one."""
    files = sorted(directory.rglob(FILE), key=lambda path: path.stat().st_mtime)
    if not files:
        return []
    events = json.loads(files[-1].read_text(encoding="utf-8"))
    listed = events if isinstance(events, list) else events.get("traceEvents", [])
    found = sorted(_tasks(listed), key=lambda task: task.begin)
    first = found[0].begin if found else 0.0
    return [Task(t.name, t.stream, t.begin - first, t.end - first) for t in found]


def _tasks(events: list[dict[str, Any]]) -> Iterator[Task]:
    named = [event for event in events if event.get("ph") == "M"]
    hardware = {
        event["pid"]
        for event in named
        if event.get("name") == "process_name" and event["args"].get("name") == HARDWARE
    }
    for event in events:
        if event.get("ph") == "X" and event.get("pid") in hardware:
            begin, length = float(event["ts"]), float(event.get("dur", 0))
            stream = str(event.get("args", {}).get("Physic Stream Id", event.get("tid")))
            yield Task(str(event["name"]), stream, begin, begin + length)


def busy_together(tasks: list[Task]) -> tuple[float, float]:
    """Microseconds in which at least one stream was busy, and at least two."""
    points = sorted(
        [(task.begin, 1) for task in tasks] + [(task.end, -1) for task in tasks],
        key=lambda point: (point[0], point[1]),
    )
    some = several = 0.0
    running, since = 0, 0.0
    for at, change in points:
        some += (at - since) * (running > 0)
        several += (at - since) * (running > 1)
        running, since = running + change, at
    return some, several
