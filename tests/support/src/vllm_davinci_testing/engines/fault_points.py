"""Injects a fault at each point where a small engine can fail, and tabulates the outcomes.

For each chosen point, an engine of a tiny model starts, answers three requests and ends, with a
rule of VNPU_FAULTS that names the point (docs/guides/inject_faults.md). Each time the tokens equal
those without a fault, or the program ends with a nonzero status and an error that names the cause;
after 30 s no process or shared memory is left.

Run by `nox -s faults`; `-- --one-in N` takes every Nth point of each kind, by `--date`; `--only
NAME` selects engines and `--kinds A,B` kinds; `--most N` limits the points per engine, evenly over
kinds; `--page FILE` writes the tables.
"""

import argparse
import datetime
import hashlib
import re
import struct
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from vllm_davinci.vnpu import _C
from vllm_davinci_testing.engines.fault_engines import ENGINES, Engine
from vllm_davinci_testing.engines.fault_tables import GOOD, Tally, page
from vllm_davinci_testing.engines.server_process import processes_of_session, shared_memory
from vllm_davinci_testing.processes.forked import run_together
from vllm_davinci_testing.processes.programs import run_programs_together

# In the order of faults::Kind (packages/vnpu/csrc/device/fault_plan.h).
KINDS = (
    "point", "alloc", "physical", "map", "pinned", "stream", "event", "launch", "synchronize",
    "collective", "segment",
)  # fmt: skip
# Calls of the host, in the order of host_faults::Call; counted in all of an engine's processes.
HOST_KINDS = ("host:malloc", "host:open", "host:write", "host:fsync")
ANY_RANK = -1
# Points per rank and kind, evenly spread, because a process allocates memory millions of times.
MOST_POINTS = 4000
# Effects of a fault by kind of point, used alternately.
ACTIONS = {
    "stream": ("207005", "throw"),
    "event": ("207007", "throw"),
    "launch": ("507015", "async:507035", "throw"),
    "synchronize": ("507046", "throw"),
    "collective": ("throw", "oom", "die"),
    "segment": ("throw", "oom"),
    "host:malloc": ("ENOMEM",),
    "host:open": ("EMFILE",),
    "host:write": ("ENOSPC", "EIO"),
    "host:fsync": ("EIO",),
}
OF_MEMORY = ("oom", "throw")
LIMITS = {"VNPU_WAIT_LIMIT": "25", "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "30"}
# Limits of a run, and of the end of its processes.
RUN_LIMIT_S, END_LIMIT_S = 480.0, 30.0
# From a fault to the end of all processes: 30 s, doubled for a machine with other work.
LATE_S = 60.0
# Without the rule's text, which every error of vnpu contains.
NAMES = re.compile(
    r"out of memory|rank \d+ \(pid|EngineCore .*died|failed in |MemoryError|bad_alloc|"
    r"allocate memory|Too many open files|No space left|Input/output error|"
    r"memory allocation of|"  # Rust's message
    r"No usable temporary directory"  # Python's message if no file can be written
)


@dataclass
class Run:
    """Outcome of a run. to_end_s: from the fault to the end of all processes"""

    status: int
    log: str
    to_end_s: float = 0.0
    left: list[str] = field(default_factory=list)

    @property
    def answers(self) -> list[str]:
        return [line for line in self.log.splitlines() if line.startswith("answer")]


def run(engine: Engine, faults: str) -> Run:
    """Runs an engine with a fault plan, and records what it leaves behind."""
    with tempfile.TemporaryDirectory() as directory:
        places = engine.places()
        logs = [Path(directory) / f"log{number}" for number in range(len(places))]
        variables = {"VNPU_FAULTS": faults, "VLLM_LOGGING_LEVEL": "INFO", **LIMITS}
        ended: list[tuple[int, str]] = []
        # C library calls are replaced when an interpreter starts; other faults also work in forks.
        start = run_programs_together if _C.fault_plan_reaches_host(faults) else run_forks
        runner = threading.Thread(
            target=lambda: ended.extend(
                start(
                    [engine.program(log) for log in logs],
                    [{**variables, **place} for place in places],
                    RUN_LIMIT_S,
                )
            )
        )
        runner.start()
        watch = Watch(logs)
        while runner.is_alive():
            watch.look()
            runner.join(0.1)
        begin = time.monotonic()
        while watch.processes() and time.monotonic() - begin < END_LIMIT_S:
            time.sleep(0.05)
        left = watch.processes()
        for process in left:
            process.kill()
        statuses = [status for status, _ in ended] or [-1]
        before_log = "".join(printed for _, printed in ended)
        result = Run(max(statuses, key=abs), before_log + watch.look())
        result.to_end_s = time.monotonic() - (watch.fault_at or time.monotonic())
        result.left = [f"process {each.pid}" for each in left]
        for path in watch.held:
            if path.name.startswith("psm_"):
                # multiprocessing's semaphores remain: the tracker frees them when it ends, and
                # forks share the fork server's, which continues.
                path.unlink(missing_ok=True)
            elif path.exists():
                result.left.append(str(path))
        return result


def run_forks(
    programs: Sequence[str], variables: Sequence[Mapping[str, str]], limit_s: float
) -> list[tuple[int, str]]:
    """Runs programs in forks of a process with all imports; returns statuses and outputs."""
    return [(each.status, each.output) for each in run_together(programs, variables, limit_s)]


class Watch:
    """Observes running programs: logs, processes, shared memory, and the time of the fault."""

    def __init__(self, logs: list[Path]) -> None:
        self._logs = logs
        self.fault_at: float | None = None
        self.held: set[Path] = set()

    def look(self) -> str:
        """Returns all output of the programs, and notes the time of the fault."""
        text = "".join(log.read_text(errors="replace") for log in self._logs if log.exists())
        if self.fault_at is None and "VNPU_FAULTS: " in text:
            self.fault_at = time.monotonic()
        self._sessions = [int(found) for found in re.findall(r"^session (\d+)", text, re.MULTILINE)]
        with suppress(OSError, psutil.Error):  # a process that has ended meanwhile
            self.held.update(shared_memory(self.processes()))
        return text

    def processes(self) -> list[psutil.Process]:
        return [each for session in self._sessions for each in processes_of_session(session)]


def outcome(result: Run, expected: list[str], rule: str) -> str:
    """Returns one of GOOD, or the violated condition."""
    if result.status == -1:
        return "HANGS"
    if result.left:
        return "LEAVES " + ("a process" if "process" in result.left[0] else "shared memory")
    if not set(result.answers) <= set(expected):
        return "WRONG ANSWER"
    happened = f"VNPU_FAULTS: {rule} at " in result.log
    if result.status == 0:
        if result.answers != expected:
            return "NO ANSWER, NO ERROR"
        return "bit-equal" if happened else "not reached"
    later = result.log.split(f"VNPU_FAULTS: {rule} at ", 1)[-1]
    is_named = happened and (rule in later or NAMES.search(later) is not None)
    if not is_named:
        return "ERROR WITHOUT CAUSE"
    return "error with its cause" if result.to_end_s < LATE_S else "LATE ERROR"


def points_of(engine: Engine) -> tuple[list[str], dict[int, Counter[str]]]:
    """Returns the right answers, and the numbers of points by kind and rank."""
    with tempfile.TemporaryDirectory() as directory:
        result = run(engine, f"count:{directory}")
        if result.status != 0 or len(result.answers) != 3 * engine.engines:
            raise RuntimeError(f"The engine fails without a fault:\n{result.log[-4000:]}")
        points: dict[int, Counter[str]] = {}
        for file in Path(directory).glob("*.points"):
            data = file.read_bytes()
            rank, count = struct.unpack_from("=qQ", data)
            kinds = Counter(KINDS[number] for number in data[16 : 16 + count])
            points[max(rank, 0)] = points.get(max(rank, 0), Counter()) + kinds
        points[ANY_RANK] = Counter()
        for file in Path(directory).glob("*.host"):
            calls = struct.unpack_from("=4Q", file.read_bytes(), 8)
            # Each process counts for itself, so a rule applies to processes with enough calls.
            points[ANY_RANK] |= Counter(dict(zip(HOST_KINDS, calls, strict=True)))
        return result.answers, points


def chosen(points: dict[int, Counter[str]], one_in: int, date: str) -> Iterator[tuple[str, str]]:
    """Yields kind and rule of each point that is due on this date, once in `one_in` days."""
    day = datetime.date.fromisoformat(date).toordinal()
    for rank, kinds in sorted(points.items()):
        for kind, count in sorted(kinds.items()):
            seed = int.from_bytes(hashlib.sha256(f"{rank} {kind}".encode()).digest()[:4], "big")
            actions = ACTIONS.get(kind, OF_MEMORY)
            step = one_in * max(1, count // MOST_POINTS)
            for number in range(1 + (seed + day) % step, count + 1, step):
                action = actions[number // step % len(actions)]
                if rank == ANY_RANK:  # fails from there on, as when a resource is used up
                    yield kind, f"{kind}@{number}+={action}"
                else:
                    yield kind, f"rank={rank};{kind}@{number}={action}"


def shuffled(rules: Iterable[tuple[str, str]], date: str) -> list[tuple[str, str]]:
    """Orders the rules by the date, alternating kinds."""
    mixed = sorted(rules, key=lambda each: hashlib.sha256(f"{date} {each[1]}".encode()).digest())
    seen: Counter[str] = Counter()
    turns = []
    for place, (kind, rule) in enumerate(mixed):
        turns.append((seen[kind], place, kind, rule))
        seen[kind] += 1
    return [(kind, rule) for _, _, kind, rule in sorted(turns)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--one-in", type=int, default=24, help="test every Nth point of a kind")
    parser.add_argument("--date", default=datetime.date.today().isoformat())
    parser.add_argument("--only", default="", help="prefix of engines' names")
    parser.add_argument(
        "--kinds", default=",".join((*KINDS[1:], *HOST_KINDS)), help="separated by commas"
    )
    parser.add_argument("--most", type=int, default=10**9, help="maximum of points per engine")
    parser.add_argument("--page", type=Path, help="file for the table")
    parser.add_argument("--stamp", default="", help="line of the page: date and versions")
    options = parser.parse_args()
    tallies: dict[tuple[str, str], Tally] = {}
    is_good = True
    for name, engine in ENGINES.items():
        if not name.startswith(options.only):
            continue
        expected, points = points_of(engine)
        for kind, count in sorted(sum(points.values(), Counter()).items()):
            tallies[name, kind] = Tally(count)
        turns = chosen(points, options.one_in, options.date)
        asked = [each for each in turns if each[0] in options.kinds.split(",")]
        rules = shuffled(asked, options.date)[: options.most]
        for number, (kind, faults) in enumerate(rules, 1):
            rule = faults.split(";")[-1]
            result = run(engine, faults)
            what = outcome(result, expected, rule)
            tallies[name, kind].outcomes[what] += 1
            if what == "error with its cause":
                tallies[name, kind].times_s.append(result.to_end_s)
            print(
                f"{name} {number}/{len(rules)} {faults}: {what}, {result.to_end_s:.1f} s",
                flush=True,
            )
            if what not in GOOD:
                is_good = False
                print(f"{result.left}\n{result.log[-3000:]}", flush=True)
            if options.page is not None:
                options.page.write_text(page(tallies, options.one_in, options.stamp))
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
