"""Runs programs in forks of a process that has imported torch and more: see fork_server.

Each program has its own values of settings that are read at the device's first use. Settings that
an import reads (TASK_QUEUE_ENABLE, PYTORCH_NPU_ALLOC_CONF) need a new interpreter: see programs.
Commands are tested in forks, too; their start in a new interpreter is tested once.
"""

import ctypes
import os
import runpy
import sys
import tempfile
import textwrap
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_davinci.vnpu import VirtualDeviceConfig
from vllm_davinci.vnpu.activate import prepare_environment
from vllm_davinci_testing.processes.fork_server import fork_context
from vllm_davinci_testing.processes.programs import is_of_virtual_devices

# Limit of a small program on a busy machine with two cores, including the fork server's start.
LIMIT_S = 240.0


@dataclass(frozen=True)
class Ended:
    """Outcome of a process.

    status: exit status, negative for a signal
    stdout: standard output, and standard error too if both go to one log
    stderr: standard error
    """

    status: int
    stdout: str
    stderr: str = ""

    @property
    def output(self) -> str:
        return self.stdout + self.stderr


def run_together(
    programs: Sequence[str | Path],
    variables: Sequence[Mapping[str, str]],
    limit_s: float = LIMIT_S,
    arguments: Sequence[str] = (),
) -> list[Ended]:
    """Runs the programs at the same time and waits for all, at most `limit_s` seconds.

    programs:  source text, named "<program>" in tracebacks and call sites, or a file
    variables: additional environment variables of each program
    arguments: for all programs

    The processes end without C's exit handlers. If one does not end in time, raises TimeoutError
    with what the programs printed.
    """
    return _run_forks(
        _be_program,
        [(program, dict(own), arguments) for program, own in zip(programs, variables, strict=True)],
        limit_s,
    )


def run_alone(source: str, **variables: str) -> Ended:
    """Runs one program. variables: additional environment variables"""
    [ended] = run_together([textwrap.dedent(source)], [variables])
    return ended


def run_command(
    module: str, *arguments: str | Path, limit_s: float = LIMIT_S, **variables: str
) -> Ended:
    """Runs `python -m module arguments` for a module that is already imported.

    variables: additional environment variables
    """
    argv = [module, *map(str, arguments)]
    source = (
        f"import runpy, sys; sys.argv = {argv!r}\n"
        f"runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    )
    [ended] = run_together([source], [variables], limit_s)
    return ended


def run_to_exit(source: str, config: VirtualDeviceConfig | None = None, **variables: str) -> Ended:
    """Runs one program that ends with C's exit handlers, which write reports and timelines.

    config, variables: its virtual devices, and further environment variables. The program does not
        inherit the settings of this process's devices.
    """
    [ended] = _run_forks(
        _be_interpreter, [(textwrap.dedent(source), {**variables}, config)], LIMIT_S
    )
    return ended


def output_of(
    source: str, config: VirtualDeviceConfig | None = None, **variables: str
) -> list[str]:
    """Returns the lines printed by a program, which must succeed.

    config, variables: its virtual devices, and further environment variables
    """
    given = {} if config is None else config.environment()
    ended = run_alone(source, **{**given, **variables})
    assert ended.status == 0, ended.output[-4000:]
    return ended.stdout.split("\n")[:-1]


def _run_forks(
    target: Callable[..., None], arguments: Sequence[tuple[Any, ...]], limit_s: float
) -> list[Ended]:
    """Calls `target` with each of the arguments, concurrently, each in its own process."""
    context = fork_context()
    with tempfile.TemporaryDirectory() as directory:
        printed = [
            (Path(directory) / f"{n}.out", Path(directory) / f"{n}.err")
            for n in range(len(arguments))
        ]
        processes = [
            context.Process(target=_print_to, args=(*files, target, *each))
            for each, files in zip(arguments, printed, strict=True)
        ]
        for process in processes:
            process.start()
        deadline = time.monotonic() + limit_s
        for process in processes:
            process.join(max(0.1, deadline - time.monotonic()))
        late = [n for n, process in enumerate(processes) if process.is_alive()]
        for n in late:
            processes[n].kill()
            processes[n].join()
        ended = [
            Ended(
                process.exitcode or 0,
                *(file.read_text() if file.exists() else "" for file in files),
            )
            for process, files in zip(processes, printed, strict=True)
        ]
    if late:
        raise TimeoutError(f"programs {late} still ran after {limit_s} s: {ended}")
    return ended


def _print_to(stdout: Path, stderr: Path, target: Callable[..., None], *arguments: Any) -> None:
    for descriptor, file in ((1, stdout), (2, stderr)):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), descriptor)
    target(*arguments)


def _be_program(
    program: str | Path, variables: Mapping[str, str], arguments: Sequence[str]
) -> None:
    os.environ.update(variables)
    if isinstance(program, Path):
        sys.argv = [str(program), *arguments]
        runpy.run_path(str(program), run_name="__main__")
    else:
        exec(compile(program, "<program>", "exec"), {"__name__": "__program__"})


def _be_interpreter(
    source: str, variables: Mapping[str, str], config: VirtualDeviceConfig | None
) -> None:
    for name in [name for name in os.environ if is_of_virtual_devices(name)]:
        del os.environ[name]
    prepare_environment(os.environ, config)
    try:
        _be_program(source, variables, ())
        status = 0
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    ctypes.CDLL(None).exit(status)
