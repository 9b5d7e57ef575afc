"""The tables that CANN's msprof exports: op_summary, op_statistic and task_time."""

import csv
import os
import pathlib
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence

from vllm_davinci.vnpu.msprof.tasks import Profile, Task

_OP_SUMMARY = (
    "Device_id",
    "Model ID",
    "Task ID",
    "Stream ID",
    "Op Name",
    "OP Type",
    "OP State",
    "Task Type",
    "Task Start Time(us)",
    "Task Duration(us)",
    "Task Wait Time(us)",
    "Block Num",
    "Input Shapes",
    "Input Data Types",
    "Input Formats",
    "Output Shapes",
    "Output Data Types",
    "Output Formats",
)
_OP_STATISTIC = (
    "Device_id",
    "OP Type",
    "Core Type",
    "Count",
    "Total Time(us)",
    "Min Time(us)",
    "Avg Time(us)",
    "Max Time(us)",
    "Ratio(%)",
)
_TASK_TIME = (
    "Device_id",
    "kernel_name",
    "kernel_type",
    "stream_id",
    "task_id",
    "task_time(us)",
    "task_start(us)",
    "task_stop(us)",
)
NO_MODEL = 4294967295
"""Model id of tasks launched outside a graph."""


def write(profile: Profile, directory: pathlib.Path) -> None:
    """Writes the three tables into `directory`, which exists."""
    stamp = time.strftime("%Y%m%d%H%M%S")
    _write(directory / f"op_summary_{stamp}.csv", _OP_SUMMARY, _op_summary(profile.tasks))
    _write(directory / f"op_statistic_{stamp}.csv", _OP_STATISTIC, _op_statistic(profile.tasks))
    _write(directory / f"task_time_{stamp}.csv", _TASK_TIME, _task_time(profile.tasks))


def _op_summary(tasks: Sequence[Task]) -> Iterable[Sequence[object]]:
    # CANN defines the wait from the preceding task on the device, on any stream.
    ends: dict[int, int] = {}
    for task in tasks:
        if task.kind not in ("operator", "collective"):
            continue
        wait_ns = max(task.begin_ns - ends.get(task.device, task.begin_ns), 0)
        ends[task.device] = max(task.end_ns, ends.get(task.device, 0))
        yield (
            task.device,
            NO_MODEL,
            task.number,
            task.stream,
            task.name,
            task.operator_type,
            "dynamic",
            task.task_type,
            _moment(task.begin_ns),
            microseconds(task.end_ns - task.begin_ns),
            microseconds(wait_ns),
            0,  # as on a chip that collects only times
            *("N/A",) * 6,
        )


def _op_statistic(tasks: Sequence[Task]) -> Iterable[Sequence[object]]:
    times: dict[tuple[int, str, str], list[int]] = defaultdict(list)
    for task in tasks:
        if task.kind == "operator":
            key = (task.device, task.operator_type, task.task_type)
            times[key].append(task.end_ns - task.begin_ns)
    totals: dict[int, int] = defaultdict(int)
    for (device, _, _), all_ns in times.items():
        totals[device] += sum(all_ns)
    for (device, kind, core), all_ns in sorted(times.items(), key=lambda item: -sum(item[1])):
        yield (
            device,
            kind,
            core,
            len(all_ns),
            microseconds(sum(all_ns)),
            microseconds(min(all_ns)),
            f"{sum(all_ns) / len(all_ns) / 1000:.3f}",
            microseconds(max(all_ns)),
            f"{100 * sum(all_ns) / max(totals[device], 1):.3f}",
        )


def _task_time(tasks: Sequence[Task]) -> Iterable[Sequence[object]]:
    for task in tasks:
        yield (
            task.device,
            task.name,
            task.task_type,
            task.stream,
            task.number,
            microseconds(task.end_ns - task.begin_ns),
            _moment(task.begin_ns),
            _moment(task.end_ns),
        )


def microseconds(nanoseconds: int) -> str:
    """Formats with three decimals, exactly: a float would round times since 1970."""
    return f"{nanoseconds // 1000}.{nanoseconds % 1000:03d}"


def _moment(nanoseconds: int) -> str:
    # CANN ends a time stamp with a tab, so that spreadsheets keep all digits.
    return microseconds(nanoseconds) + "\t"


def _write(path: pathlib.Path, headers: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    # Renamed when complete, because readers wait for the name.
    unfinished = path.with_suffix(".unfinished")
    with unfinished.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(headers)
        writer.writerows(rows)
    os.replace(unfinished, path)
