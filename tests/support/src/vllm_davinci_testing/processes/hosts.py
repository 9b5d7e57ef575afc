"""Test hosts: namespaces of this machine with their own network.

Each has its own network, host name, process numbers and shared memory, like a machine.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from vllm_davinci_testing.processes.programs import run_to_end
from vllm_davinci_testing.processes.waiting import becomes_true

_READY_S = 30.0

# Created in a user namespace that owns all others, so that root is not needed. `--kill-child`: a
# host ends with its parent process.
_SETUP = """
set -e
hosts=$(for i in {numbers}; do echo "10.77.0.$i host$i"; done; echo "127.0.0.1 localhost")
for i in {numbers}; do
  unshare --net --uts --pid --mount --ipc --fork --kill-child sh -ec "
    hostname host$i
    mount -t proc proc /proc
    mount -t tmpfs tmpfs /dev/shm
    echo '$hosts' > /dev/shm/hosts
    mount --bind /dev/shm/hosts /etc/hosts
    ip link set lo up
    exec sleep 3600" &
  eval "holder$i=$!"
done
for i in {numbers}; do
  eval "holder=\\$holder$i"
  until host=$(cat /proc/$holder/task/$holder/children) && [ -n "$host" ] &&
      [ "$(cat /proc/${{host% }}/comm)" = sleep ]; do sleep 0.02; done
  eval "host$i=${{host% }}"
done
ip link add eth1 type veth peer name eth2
for i in {numbers}; do
  eval "host=\\$host$i"
  ip link set eth$i netns $host
  nsenter --target $host --net sh -ec "
    ip link set eth$i name eth0; ip addr add 10.77.0.$i/24 dev eth0; ip link set eth0 up"
  echo $host
done
echo ready
exec sleep 3600
"""


@dataclass(frozen=True)
class Host:
    """A test host."""

    name: str
    address: str
    process: int
    """Number on this machine of the process whose end ends the host."""

    def start(
        self, command: Sequence[str], variables: dict[str, str], output: Path
    ) -> subprocess.Popen[bytes]:
        """Starts a command on the host that writes stdout and stderr to a file."""
        with output.open("wb") as file:
            return subprocess.Popen(
                [*self._enter(), *command],
                env={**os.environ, **variables},
                stdout=file,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
            )

    def end(self) -> None:
        """Ends the host with all of its processes, like a power failure."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process, signal.SIGKILL)

    def cut_off(self) -> None:
        """Disconnects the host's network; its processes continue."""
        subprocess.run(
            [*self._enter(), "ip", "link", "set", "eth0", "down"], check=True, timeout=10
        )

    def _enter(self) -> list[str]:
        flags = ["--user", "--preserve-credentials", "--net", "--uts", "--pid", "--mount", "--ipc"]
        return ["nsenter", "--target", str(self.process), *flags, "--"]


def _skip_without_namespaces() -> None:
    """Skips the test if users may not create namespaces or networks on this machine."""
    missing = [name for name in ("unshare", "nsenter", "ip") if shutil.which(name) is None]
    if missing:
        pytest.skip(f"no hosts can be made without {', '.join(missing)}")
    asked = ["unshare", "--user", "--map-root-user", "--net", "true"]
    done = run_to_end(asked, _READY_S)
    if done.returncode != 0:
        pytest.skip(f"namespaces are forbidden here: {done.stderr.strip()}")


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Makes two hosts, host1 (10.77.0.1) and host2 (10.77.0.2), for the duration of the context."""
    _skip_without_namespaces()
    script = _SETUP.format(numbers="1 2")
    flags = ["--user", "--map-root-user", "--net", "--pid", "--mount-proc", "--fork"]
    keeper = subprocess.Popen(
        ["unshare", *flags, "--kill-child", "sh", "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert keeper.stdout is not None
        lines: list[str] = []
        while not lines or lines[-1] != "ready":
            line = keeper.stdout.readline()
            if not line:
                raise RuntimeError("The hosts' namespaces were not made: " + " ".join(lines))
            lines.append(line.strip())
        inner = [int(line) for line in lines[-3:-1]]
        processes = _processes_under(keeper.pid)
        hosts = [
            Host(f"host{i}", f"10.77.0.{i}", processes[number]) for i, number in enumerate(inner, 1)
        ]
        yield hosts[0], hosts[1]
    finally:
        keeper.kill()
        keeper.wait(_READY_S)
        if keeper.stdout is not None:
            keeper.stdout.close()


def ended_well(
    processes: Sequence[subprocess.Popen[bytes]], outputs: Sequence[Path], limit_s: float
) -> list[str]:
    """Returns the processes' outputs; fails if one does not end with status 0 within the limit."""

    def is_over() -> bool:
        ended = [each.poll() for each in processes]
        return None not in ended or any(ended)  # other processes may wait for a failed one

    done = becomes_true(is_over, limit_s)
    texts = [output.read_text(errors="replace") for output in outputs]
    for process, text in zip(processes, texts, strict=True):
        assert not process.returncode, f"ended with {process.returncode}:\n{text[-4000:]}"
    assert done, f"not all have ended after {limit_s} s:\n" + "\n".join(t[-2000:] for t in texts)
    return texts


def start_ranks(
    hosts: Sequence[Host],
    ranks_per_host: int,
    program: str | Path,
    arguments: Sequence[str],
    directory: Path,
    **variables: str,
) -> tuple[list[subprocess.Popen[bytes]], list[Path]]:
    """Starts a program once per rank, host by host, on virtual devices.

    program: source text, or a file Returns the processes, and the files that they write to.
    """
    what = [str(program)] if isinstance(program, Path) else ["-c", textwrap.dedent(program)]
    world = len(hosts) * ranks_per_host
    processes, outputs = [], []
    for rank in range(world):
        host = hosts[rank // ranks_per_host]
        own = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank % ranks_per_host),
            "WORLD_SIZE": str(world),
            "MASTER_ADDR": hosts[0].address,
            "MASTER_PORT": "29400",
            "HCCL_IF_IP": host.address,
            "OMP_NUM_THREADS": "1",
        }
        outputs.append(directory / f"rank{rank}.txt")
        command = [sys.executable, *what, *arguments]
        processes.append(host.start(command, own | variables, outputs[-1]))
    return processes, outputs


def _processes_under(process: int) -> dict[int, int]:
    """Maps process numbers in the second-innermost namespace to process numbers here."""
    found = {}
    waiting = [process]
    while waiting:
        current = waiting.pop()
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{current}/task").iterdir():
                waiting += [int(n) for n in (task / "children").read_text().split()]
            status = Path(f"/proc/{current}/status").read_text()
            numbers = next(line for line in status.splitlines() if line.startswith("NSpid:"))
            parts = [int(n) for n in numbers.split()[1:]]
            if len(parts) >= 2:
                found[parts[1]] = parts[0]
    return found
