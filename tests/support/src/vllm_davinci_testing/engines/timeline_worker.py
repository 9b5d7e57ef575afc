"""A worker that reports what was launched on its device."""

import json
import os
from pathlib import Path

import torch

from vllm_davinci.vnpu.environment_variables import VNPU_TIMELINE
from vllm_davinci.vnpu.timing import restart_timeline, write_timeline

_TASKS = ("operator", "collective")


class TimelineWorker:
    """Mixed into the worker by vLLM's option worker_extension_cls; needs a modelled timeline."""

    def begin_timeline(self) -> None:
        """Starts recording tasks."""
        torch.npu.synchronize()
        restart_timeline()

    def launched(self) -> list[str]:
        """Returns operators and collectives since `begin_timeline`, in launch order."""
        torch.npu.synchronize()
        write_timeline()
        return launched_tasks(Path(os.environ[VNPU_TIMELINE]) / f"{os.getpid()}.timeline.json")


def launched_tasks(timeline: Path) -> list[str]:
    """Returns names of a timeline's operators and collectives, in launch order."""
    events = json.loads(timeline.read_text(encoding="utf-8"))
    tasks = [event for event in events if event["ph"] == "X" and event["cat"] in _TASKS]
    return [task["name"] for task in sorted(tasks, key=lambda task: task["args"]["launched"])]
