"""Runs the tests and prints their time; fails if they are much too slow.

`within_limit.py ARGUMENTS` runs `python ARGUMENTS`; `nox -s tests` calls it for the whole suite.
The goal is 12 minutes on two idle cores, which is 24 core-minutes. The limit applies to processor
time of the tests and their child processes, because other programs affect it less than wall time.
It is three times the goal: a factor of 2 for slower processors, and 1.5 for busy machines.
"""

import ctypes
import os
import resource
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

GOAL_MINUTES = 12
LIMIT_CORE_MINUTES = 72
# Time for engines that tests left running to end.
ORPHANS_LIMIT_S = 20.0
_SET_CHILD_SUBREAPER = 36  # of prctl: orphaned descendants become this process's children


def run(command: list[str]) -> tuple[int, float, float]:
    """Returns the exit status, seconds, and processor seconds of all the command's processes."""
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    began_s = time.monotonic()
    process = subprocess.Popen(command)
    while process.returncode is None:
        # The command gets Ctrl-C, too, and prints more before it ends.
        with suppress(KeyboardInterrupt):
            ended, status = os.waitpid(
                -1, 0
            )  # reaps any child, so that tests see ended processes disappear
            if ended == process.pid:
                process.returncode = os.waitstatus_to_exitcode(status)
    seconds = time.monotonic() - began_s
    wait_for_orphans()
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return process.returncode, seconds, used.ru_utime + used.ru_stime


def wait_for_orphans() -> None:
    end_s = time.monotonic() + ORPHANS_LIMIT_S
    while time.monotonic() < end_s:
        try:
            found, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not found:
            time.sleep(0.1)


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return "unknown processor"


def verdict(seconds: float, core_seconds: float, limit_minutes: float) -> tuple[bool, str]:
    """Returns True if the limit is kept, and a text on the times."""
    text = (
        f"tests took {seconds / 60:.1f} min (goal: {GOAL_MINUTES} on two idle cores), "
        f"{core_seconds / 60:.1f} core-minutes (limit: {limit_minutes:g}), on "
        f"{len(os.sched_getaffinity(0))} cores of {processor()}"
    )
    if core_seconds > 60 * limit_minutes:
        return False, f"{text}\nToo slow: see the slowest files above; share their engines."
    return True, text


def main() -> int:
    status, seconds, core_seconds = run([sys.executable, *sys.argv[1:]])
    is_kept, text = verdict(seconds, core_seconds, LIMIT_CORE_MINUTES)
    print(text, flush=True)
    return status or (0 if is_kept else 1)


if __name__ == "__main__":
    sys.exit(main())
