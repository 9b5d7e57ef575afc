"""Writes msprof_*.json, the timeline of CANN's msprof in the Trace Event Format."""

import json
import pathlib
import time
from collections.abc import Iterator, Sequence

from vllm_davinci.vnpu.intervals import union, without
from vllm_davinci.vnpu.msprof.tables import NO_MODEL, microseconds
from vllm_davinci.vnpu.msprof.tasks import Mark, Profile, Task

Event = dict[str, object]

# Order of processes in CANN's msprof, from top to bottom (ProcessSortIndex).
_MARKS = 6
_CANN = 7
_HARDWARE = 14
_COMMUNICATION = 16
_OVERLAP = 31


def write(profile: Profile, directory: pathlib.Path) -> None:
    """Writes msprof_TIME.json into `directory`, which exists."""
    path = directory / f"msprof_{time.strftime('%Y%m%d%H%M%S')}.json"
    path.write_text(json.dumps(list(_events(profile))), encoding="utf-8")


def _events(profile: Profile) -> Iterator[Event]:
    processes = {task.process for task in profile.tasks}
    for process in processes:
        yield from _host(process, [task for task in profile.tasks if task.process == process])
    for process in sorted({mark.process for mark in profile.marks}):
        yield from _marks(process, [mark for mark in profile.marks if mark.process == process])
    process = min(processes, default=0)
    for device in profile.devices:
        tasks = [task for task in profile.tasks if task.device == device]
        yield from _hardware(process, device, tasks)
        yield from _communication(process, device, tasks)
        yield from _overlap(process, device, tasks)


def _host(process: int, tasks: Sequence[Task]) -> Iterator[Event]:
    """Yields an instant event on the launching thread for each launch."""
    pid = _pid(process, _CANN, 0)
    yield from _process(pid, "CANN", "CPU", _CANN)
    for thread in sorted({task.thread for task in tasks}):
        yield from _thread(pid, thread, f"Thread {thread}")
    launches = {task.launch: task for task in reversed(tasks)}
    for launch, task in sorted(launches.items()):
        arguments = {
            "Thread Id": task.thread,
            "Mode": "launch",
            "level": "node",
            "id": "0",
            "item_id": task.name,
            "connection_id": launch,
        }
        yield _slice("Node@launch", pid, task.thread, task.launched_ns, 0, arguments)


def _marks(process: int, marks: Sequence[Mark]) -> Iterator[Event]:
    """Yields events for the program's marks, on the threads that began them."""
    pid = _pid(process, _MARKS, 0)
    yield from _process(pid, "MsprofTx", "CPU", _MARKS)
    for thread in sorted({mark.thread for mark in marks}):
        yield from _thread(pid, thread, f"Thread {thread}")
    for mark in marks:
        duration = mark.end_ns - mark.begin_ns
        arguments: Event = {"event_type": "range", "message": mark.message}
        yield _slice(mark.message, pid, mark.thread, mark.begin_ns, duration, arguments)


def _hardware(process: int, device: int, tasks: Sequence[Task]) -> Iterator[Event]:
    """Yields events for tasks on their streams, with an arrow from the launch or replay."""
    pid = _pid(process, _HARDWARE, device)
    yield from _process(pid, "Ascend Hardware", f"NPU {device}", _HARDWARE)
    for stream in sorted({task.stream for task in tasks}):
        yield from _thread(pid, stream, f"Stream {stream}")
    for task in tasks:
        arguments = {
            "Model Id": NO_MODEL,
            "Task Type": task.task_type,
            "Physic Stream Id": task.stream,
            "Task Id": task.number,
            "Batch Id": 0,
            "Subtask Id": 4294967295,
            "connection_id": task.launch,
        }
        duration = task.end_ns - task.begin_ns
        yield _slice(task.name, pid, task.stream, task.begin_ns, duration, arguments)
        arrow = f"{device}.{task.stream}.{task.number}"
        host = _pid(task.process, _CANN, 0)
        yield _arrow("s", arrow, host, task.thread, task.launched_ns)
        yield _arrow("f", arrow, pid, task.stream, task.begin_ns)


def _communication(process: int, device: int, tasks: Sequence[Task]) -> Iterator[Event]:
    """Yields events for collectives, by group."""
    collectives = [task for task in tasks if task.kind == "collective"]
    if not collectives:
        return
    pid = _pid(process, _COMMUNICATION, device)
    yield from _process(pid, "Communication", f"NPU {device}", _COMMUNICATION)
    rows = {group: row for row, group in enumerate(sorted({task.group for task in collectives}))}
    for group, row in rows.items():
        yield from _thread(pid, row, f"Group {group} Communication")
    for number, task in enumerate(collectives):
        arguments = {
            "connection_id": task.launch,
            "model id": NO_MODEL,
            "data_type": task.dtype.upper(),
            "count": task.count,
        }
        duration = task.end_ns - task.begin_ns
        name = f"{task.name}_{task.group}_{number}_1"
        yield _slice(name, pid, rows[task.group], task.begin_ns, duration, arguments)


def _overlap(process: int, device: int, tasks: Sequence[Task]) -> Iterator[Event]:
    """Yields events for computing, communication, exposed communication and idle time."""
    computing = union((task.begin_ns, task.end_ns) for task in tasks if task.kind == "operator")
    communicating = union(
        (task.begin_ns, task.end_ns) for task in tasks if task.kind == "collective"
    )
    busy = union([*computing, *communicating])
    if not busy:
        return
    rows = {
        "Communication": communicating,
        "Communication(Not Overlapped)": without(communicating, computing),
        "Computing": computing,
        "Free": without([(busy[0][0], busy[-1][1])], busy),
    }
    pid = _pid(process, _OVERLAP, device)
    yield from _process(pid, "Overlap Analysis", f"NPU {device}", _OVERLAP)
    for row, (name, intervals) in enumerate(rows.items()):
        yield from _thread(pid, row, name)
        for begin, end in intervals:
            yield _slice(name, pid, row, begin, end - begin, {})


def _pid(process: int, layer: int, device: int) -> int:
    return (process << 10) | (layer << 5) | device


def _process(pid: int, name: str, label: str, layer: int) -> Iterator[Event]:
    for what, arguments in (
        ("process_name", {"name": name}),
        ("process_labels", {"labels": label}),
        ("process_sort_index", {"sort_index": layer}),
    ):
        yield {"name": what, "pid": pid, "tid": 0, "ph": "M", "args": arguments}


def _thread(pid: int, tid: int, name: str) -> Iterator[Event]:
    yield {"name": "thread_name", "pid": pid, "tid": tid, "ph": "M", "args": {"name": name}}
    yield {
        "name": "thread_sort_index",
        "pid": pid,
        "tid": tid,
        "ph": "M",
        "args": {"sort_index": tid},
    }


def _slice(
    name: str, pid: int, tid: int, begin_ns: int, duration_ns: int, arguments: Event
) -> Event:
    return {
        "name": name,
        "pid": pid,
        "tid": tid,
        "ts": microseconds(begin_ns),
        "dur": duration_ns / 1000,
        "ph": "X",
        "args": arguments,
    }


def _arrow(end: str, arrow: str, pid: int, tid: int, time_ns: int) -> Event:
    event: Event = {
        "name": f"HostToDevice{arrow}",
        "cat": "HostToDevice",
        "id": arrow,
        "ph": end,
        "pid": pid,
        "tid": tid,
        "ts": microseconds(time_ns),
    }
    if end == "f":
        event["bp"] = "e"
    return event
