"""The guide's commands for several hosts run as written."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from vllm_davinci_testing.engines.server_process import START_LIMIT_S
from vllm_davinci_testing.processes.hosts import Host
from vllm_davinci_testing.processes.waiting import becomes_true

pytestmark = pytest.mark.thorough

ANSWER = "curl -s http://10.77.0.1:8000/v1/completions"


def commands_of(section: str, repository: Path) -> list[str]:
    """Returns the commands of the first host, the second host, and a client."""
    page = (repository / "docs" / "guides" / "many_hosts.md").read_text(encoding="utf-8")
    (text,) = [part for part in page.split("\n## ") if part.startswith(f"{section}\n")]
    found = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    assert len(found) == 3 and found[2].startswith(ANSWER)
    return found


def run_on(host: Host, command: str, folder: Path, log: Path) -> subprocess.Popen[bytes]:
    return host.start(["bash", "-c", f"cd {shlex.quote(str(folder))}\n{command}"], {}, log)


@pytest.mark.parametrize("section", ["One engine", "Data-parallel ranks"])
def test_the_commands_serve(section, hosts, repository, tmp_path):
    commands = commands_of(section, repository)
    (tmp_path / "checkpoints").symlink_to(repository / "checkpoints")
    logs = [tmp_path / "host1.txt", tmp_path / "host2.txt"]
    servers = [
        run_on(host, command, tmp_path, log)
        for host, command, log in zip(hosts, commands[:2], logs, strict=True)
    ]

    def text() -> str:
        return "\n".join(log.read_text(errors="replace")[-4000:] for log in logs)

    answer = tmp_path / "answer.txt"

    def is_answered() -> bool:
        assert all(server.poll() is None for server in servers), text()
        run_on(hosts[0], commands[2], tmp_path, answer).wait(120)
        return '"finish_reason":"length"' in answer.read_text(errors="replace")

    assert becomes_true(is_answered, START_LIMIT_S), text()
