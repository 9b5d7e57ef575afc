"""Seconds from a signal until a server has ended whose engine runs a step that exceeds all limits.

Each server has open requests, some of them streams, and gets SIGINT as from a terminal, SIGTERM as
from a supervisor, or SIGINT twice while requests have a minute to finish. A program that uses vLLM
gets SIGINT while it generates. `answered`: the last request has its last chunk or its error;
`ended`: the last process is gone. `--page FILE` writes docs/measurements/ending.md.
"""

import argparse
import itertools
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from result import Kind, Result, Row, host_facts
from versions import stamp
from vllm_davinci_testing.engines.server_process import (
    FORKED_WORKERS,
    START_LIMIT_S,
    ForkedServer,
    ServerProcess,
    processes_of_session,
    shared_memory,
)
from vllm_davinci_testing.engines.signalled_server import LIMIT_S, LONG_STEP, signalled_server
from vllm_davinci_testing.processes.waiting import becomes_true

CHECKPOINT = Path(__file__).resolve().parents[2] / "checkpoints" / "tiny_llama"
ANSWERED_WITHIN_S, ENDED_WITHIN_S, AT_ONCE_S = 3.0, 15.0, 3.0
CTRL_C, SIGTERM = (signal.SIGINT, True), (signal.SIGTERM, False)
INTERRUPTED = 128 + signal.SIGINT


@dataclass(frozen=True)
class Ending:
    """Seconds from the signal, the exit status, and True if no sockets or shared memory were left.

    answered_s: 0 if no client waits
    """

    answered_s: float
    ended_s: float
    status: int
    is_clean: bool


def of_server(
    kind: type[ServerProcess],
    options: tuple[str, ...],
    signalled: tuple[signal.Signals, bool],
    is_repeated: bool = False,
) -> Callable[[Path, Path], Ending]:
    """Ends a server once. is_repeated: sends the signal again after a second, and counts from
    there
    """

    def end(model: Path, folder: Path) -> Ending:
        with signalled_server(kind, model, folder, *options) as ending:
            ending.open_requests()
            held = shared_memory(ending.server.processes())
            at_s = ending.signal(*signalled)
            if is_repeated:
                time.sleep(1)
                at_s = ending.signal(*signalled)
            ended_s = ending.wait_for_end() - at_s
            # For a fork server, its tracker of shared memory continues.
            left = [path for path in held if kind is ServerProcess and path.exists()]
            return Ending(
                max(each.ended_at_s for each in ending.requests) - at_s,
                ended_s,
                ending.server.process.returncode,
                not left and not list(ending.sockets.iterdir()),
            )

    return end


PROGRAM = """
import sys
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    llm = LLM(sys.argv[1], enforce_eager=True, max_model_len=256, max_num_seqs=32)
    print("generating", flush=True)
    llm.generate(["def "] * 32, SamplingParams(max_tokens=250, ignore_eos=True))
"""


def of_program(model: Path, folder: Path) -> Ending:
    """Ends an offline engine once, in its first step."""
    log = folder / "log.txt"
    (folder / "program.py").write_text(PROGRAM, encoding="utf-8")
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, str(folder / "program.py"), str(model)],
            env={**os.environ, **FORKED_WORKERS, **LONG_STEP, "OMP_NUM_THREADS": "1"},
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def has_ended() -> bool:
        return process.poll() is not None and not processes_of_session(process.pid)

    try:
        if not becomes_true(lambda: "generating" in log.read_text(), START_LIMIT_S):
            raise TimeoutError(log.read_text()[-3000:])
        time.sleep(1)
        at_s = time.monotonic()
        os.killpg(process.pid, signal.SIGINT)
        if not becomes_true(has_ended, LIMIT_S):
            raise TimeoutError(f"processes are left: {processes_of_session(process.pid)}")
        return Ending(0.0, time.monotonic() - at_s, process.returncode, True)
    finally:
        for left in processes_of_session(process.pid):
            left.kill()
        process.wait(10)


End = Callable[[Path, Path], Ending]
# Name -> how the end is caused, its status, and its time limit.
KINDS: dict[str, tuple[End, tuple[int, ...], float]] = {
    "one rank, Ctrl-C": (of_server(ForkedServer, (), CTRL_C), (0,), ENDED_WITHIN_S),
    "one rank, SIGTERM": (of_server(ForkedServer, (), SIGTERM), (0,), ENDED_WITHIN_S),
    "two ranks, Ctrl-C": (of_server(ForkedServer, ("-tp=2",), CTRL_C), (0,), ENDED_WITHIN_S),
    "two ranks, SIGTERM": (of_server(ForkedServer, ("-tp=2",), SIGTERM), (0,), ENDED_WITHIN_S),
    "two engines, SIGTERM": (
        of_server(ForkedServer, ("-dp=2", "--api-server-count=1"), SIGTERM),
        (0,),
        ENDED_WITHIN_S,
    ),
    "Ctrl-C twice": (
        of_server(ForkedServer, ("--shutdown-timeout=60",), CTRL_C, is_repeated=True),
        (INTERRUPTED,),
        AT_ONCE_S,
    ),
    "program, Ctrl-C": (of_program, (1, INTERRUPTED, -signal.SIGINT), ENDED_WITHIN_S),
    "two ranks, spawned, Ctrl-C": (
        of_server(ServerProcess, ("-tp=2",), CTRL_C),
        (0,),
        ENDED_WITHIN_S,
    ),
    "two engines and API servers, spawned, SIGTERM": (
        of_server(ServerProcess, ("-dp=2",), SIGTERM),
        (0,),
        ENDED_WITHIN_S,
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, default=CHECKPOINT)
    parser.add_argument("--ends", type=int, default=50, help="number of shutdowns of all kinds")
    parser.add_argument("--only", nargs="+", choices=KINDS, default=list(KINDS), metavar="KIND")
    parser.add_argument("--at-once", type=int, default=2, help="servers that end concurrently")
    parser.add_argument("--page", type=Path, metavar="FILE", help="write the results as Markdown")


def in_turn(names: Sequence[str]) -> Iterator[str]:
    """Yields kinds of endings forever; every third round spawns processes, which import vLLM."""
    for number in itertools.count():
        yield from (name for name in names if "spawned" not in name or number % 3 == 0)


def count_right(name: str, endings: list[Ending]) -> int:
    """Counts endings of a kind with the documented status and nothing left behind."""
    return sum(each.status in KINDS[name][1] and each.is_clean for each in endings)


PAGE = """\
# How long servers and programs take to end

{stamp}

`nox -s bench -- serving/ending --ends {count} --at-once {at_once} --page FILE`: servers of
tiny_llama on the virtual NPU, whose engines are in a step of half a minute and more when the signal
comes, with 4 open requests, half of them streams; and a program that generates. *Answered*: the
last request has its last chunk or its error. *Ended*: the last process is gone. *Right*: the status
is that of the [guide](../guides/ending.md), and no socket file and no shared memory is left.
Seconds from the signal (the second one, if there are two), measured on {processor}, {cores} cores,
beside other work: {load:.0f} processes ran or waited for a core.

| what | ends | answered, median | worst | ended, median | worst | limit | right |
| --- | --: | --: | --: | --: | --: | --: | --: |"""


def page_of(found: dict[str, list[Ending]], at_once: int) -> str:
    """Returns the page of measurements. found: completed endings by kind"""
    host = host_facts()
    ended = {name: list(endings) for name, endings in found.items() if endings}
    lines = [
        PAGE.format(
            stamp=stamp("core"),
            count=sum(map(len, ended.values())),
            at_once=at_once,
            load=os.getloadavg()[2],
            **host,
        )
    ]
    for name, endings in ended.items():
        answered = [each.answered_s for each in endings]
        ends = [each.ended_s for each in endings]
        cells = [name, str(len(endings))]
        for times in (answered, ends):
            figures = (statistics.median(times), max(times)) if any(times) else ()
            cells += [f"{seconds:.2f}" for seconds in figures] or ["", ""]
        cells += [f"{KINDS[name][2]:.0f}", f"{count_right(name, endings)} of {len(endings)}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def run(args: argparse.Namespace) -> Result:
    # Background jobs ignore SIGINT, and so would the processes that they start.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # The servers compute in float32, which no chip's attention supports.
    os.environ.setdefault("VNPU_SOC", "reference")
    found: dict[str, list[Ending]] = {name: [] for name in args.only}

    def end(number: int, name: str) -> None:
        with tempfile.TemporaryDirectory() as folder:
            ending = KINDS[name][0](args.model, Path(folder))
        found[name].append(ending)
        print(f"{number + 1} {name}: {ending}", flush=True)
        if args.page is not None:
            args.page.write_text(page_of(found, args.at_once), encoding="utf-8")

    with ThreadPoolExecutor(args.at_once) as pool:
        list(pool.map(end, range(args.ends), in_turn(args.only)))
    rows = []
    for name, endings in found.items():
        limit_s = KINDS[name][2]
        for what, times, most_s in (
            ("answered", [each.answered_s for each in endings], ANSWERED_WITHIN_S),
            ("ended", [each.ended_s for each in endings], limit_s),
        ):
            if not endings or not any(times):
                continue
            note = f"{len(times)} ends, median {statistics.median(times):.1f} s"
            rows.append(
                Row(
                    f"{name}: {what}, worst",
                    "s",
                    max(times),
                    Kind.MEASURED,
                    at_most=most_s,
                    note=note,
                )
            )
        right = count_right(name, endings)
        rows.append(
            Row(
                f"{name}: status as documented, nothing left",
                "",
                right,
                Kind.COUNTED,
                at_least=len(endings),
            )
        )
    return Result(
        ours="seconds from the signal",
        baseline="none: vLLM waits without a limit for such requests",
        rows=rows,
        settings={"model": args.model.name},
        bounded_by="vLLM's limits for its processes",
    )
