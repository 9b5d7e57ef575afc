"""Reads the tasks of a profile, as written by `aclprofStop` (csrc/trace/device_profile.h)."""

import json
import pathlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from vllm_davinci.vnpu.errors import TraceError

Row = TypeVar("Row")

_HCOM_NAMES = {
    "all_reduce": "hcom_allReduce_",
    "all_gather": "hcom_allGather_",
    "all_gather_v": "hcom_allGatherV_",
    "reduce_scatter": "hcom_reduceScatter_",
    "reduce_scatter_v": "hcom_reduceScatterV_",
    "reduce": "hcom_reduce_",
    "broadcast": "hcom_broadcast_",
    "scatter": "hcom_scatter_",
    "all_to_all": "hcom_alltoall_",
    "all_to_all_v": "hcom_alltoallv_",
    "send": "hcom_send_",
    "receive": "hcom_receive_",
    "batch_send_recv": "hcom_batchSendRecv_",
    "barrier": "hcom_barrier_",
    "expert_dispatch": "MoeDistributeDispatch",
    "expert_combine": "MoeDistributeCombine",
}
"""CANN's names of collectives, by vnpu's."""

_TASK_TYPES = {
    "memory copy": "MEMCPY_ASYNC",
    "memory fill": "MEMSET_ASYNC",
    "event record": "EVENT_RECORD",
    "event wait": "EVENT_WAIT",
    "graph replay": "MODEL_EXECUTE",
}
"""The runtime's names of tasks other than operators, by vnpu's."""


@dataclass(frozen=True)
class Task:
    """A task. Times are nanoseconds since 1970."""

    kind: str
    """operator, collective, copy, record, wait or other."""
    name: str
    """aclnnMatmul, hcom_allReduce_, MEMCPY_ASYNC."""
    device: int
    stream: int
    launch: int
    """Number of the launch in the process; all tasks of a replay share it."""
    launched_ns: int
    process: int
    thread: int
    """Number of the host thread that launched it."""
    begin_ns: int
    end_ns: int
    group: str = ""
    """Group of ranks of a collective."""
    count: int = 0
    """Number of elements of a collective."""
    dtype: str = ""
    """Dtype of a collective."""
    number: int = 0
    """The runtime's task id: position on its stream, from 0."""

    @property
    def operator_type(self) -> str:
        """The type of an operator ("Matmul" for aclnnMatmul); for other tasks their name without
        numbers.
        """
        return self.name.removeprefix("aclnn").rstrip("_")

    @property
    def task_type(self) -> str:
        """The kind of core that would run it on a chip.

        All operators are AI_CORE: which run on vector cores alone is not known here.
        """
        return {"operator": "AI_CORE", "collective": "COMMUNICATION"}.get(self.kind, self.name)


@dataclass(frozen=True)
class Mark:
    """A step that the program marked (aclprofGetStepTimestamp).

    Times are nanoseconds since 1970.
    """

    message: str
    process: int
    thread: int
    begin_ns: int
    end_ns: int


@dataclass(frozen=True)
class Profile:
    """All tasks and marks of a PROF_* directory, ordered by begin."""

    devices: tuple[int, ...]
    tasks: tuple[Task, ...]
    marks: tuple[Mark, ...] = ()


def read_profile(directory: pathlib.Path) -> Profile:
    """Reads a PROF_* directory. Raises TraceError unless it is one of a virtual NPU."""
    files = {
        int(path.parent.parent.name.removeprefix("device_")): path
        for path in directory.glob("device_*/data/tasks.jsonl")
    }
    if not files:
        raise TraceError(
            f"{directory} has no device_*/data/tasks.jsonl. Name the PROF_* directory of a profile "
            "that was taken on virtual NPUs; a chip's profile needs the msprof of its CANN."
        )
    tasks = [
        task
        for device, path in sorted(files.items())
        for task in map(_with_cann_name, _read_lines(path, partial(Task, device=device)))
    ]
    tasks.sort(key=lambda task: (task.begin_ns, task.end_ns))
    numbers: dict[tuple[int, int], int] = {}
    for index, task in enumerate(tasks):
        stream = (task.device, task.stream)
        numbers[stream] = numbers.get(stream, -1) + 1
        tasks[index] = replace(task, number=numbers[stream])
    path = directory / "host" / "data" / "marks.jsonl"
    marks = _read_lines(path, Mark) if path.exists() else []
    marks.sort(key=lambda mark: (mark.begin_ns, -mark.end_ns))
    return Profile(devices=tuple(sorted(files)), tasks=tuple(tasks), marks=tuple(marks))


def _read_lines(path: pathlib.Path, make: Callable[..., Row]) -> list[Row]:
    rows = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                rows.append(make(**json.loads(line)))
            except (ValueError, TypeError) as error:
                raise TraceError(
                    f"{path}, line {number} is not valid: {error}. A killed process leaves its "
                    "last line unfinished: remove that line, or profile again."
                ) from None
    return rows


def _with_cann_name(task: Task) -> Task:
    if task.kind == "operator":
        return task
    if task.kind == "collective":
        return replace(task, name=_HCOM_NAMES.get(task.name, f"hcom_{task.name}_"))
    return replace(task, name=_TASK_TYPES.get(task.name, task.name.replace(" ", "_").upper()))
