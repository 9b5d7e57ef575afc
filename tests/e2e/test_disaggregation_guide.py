"""The guide's commands for disaggregated engines run as written."""

import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from vllm_davinci_testing.engines.server_process import START_LIMIT_S, answers, processes_of_session
from vllm_davinci_testing.processes.hosts import Host
from vllm_davinci_testing.processes.programs import run_to_end
from vllm_davinci_testing.processes.waiting import becomes_true

pytest.importorskip("nixl", reason="disaggregation needs nixl: pip install 'vllm-davinci[pd]'")
pytestmark = pytest.mark.thorough

PORTS = (8100, 8200)


@pytest.fixture(params=["nixl", "mooncake"])
def commands(request: pytest.FixtureRequest, repository: Path) -> list[str]:
    page = (repository / "docs" / "guides" / "disaggregation.md").read_text(encoding="utf-8")
    found = re.findall(r"```bash\n(.*?)```", page, re.DOTALL)
    assert len(found) == 5 and "pip install" in found[0]
    if request.param == "nixl":
        return found[1:3]
    pytest.importorskip("mooncake.engine", exc_type=ImportError)
    return found[3:]


@pytest.fixture
def links(repository: Path, tmp_path: Path) -> Path:
    """A folder with links to the checkpoints of the commands, which write their files there."""
    (tmp_path / "checkpoints").symlink_to(repository / "checkpoints")
    return tmp_path


@pytest.fixture
def servers(commands: list[str], links: Path) -> Iterator[None]:
    with (links / "log.txt").open("wb") as log:
        shell = subprocess.Popen(
            ["bash", "-c", f"{commands[0]}\nwait"],
            cwd=links,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        assert becomes_true(lambda: all(map(answers, PORTS)), START_LIMIT_S), (
            links / "log.txt"
        ).read_text(errors="replace")[-4000:]
        yield
    finally:
        for process in processes_of_session(shell.pid):
            process.kill()
        shell.wait(10)


@pytest.mark.usefixtures("servers")
def test_the_requests_of_the_guide_are_answered(commands: list[str], links: Path):
    ended = run_to_end(["bash", "-ec", commands[1]], 200, cwd=links)
    text = json.loads(ended.stdout)["choices"][0]["text"]
    whole = httpx.post(
        f"http://localhost:{PORTS[0]}/v1/completions",
        json={
            "model": "checkpoints/tiny_llama",
            "prompt": "import ",
            "max_tokens": 16,
            "temperature": 0,
        },
        timeout=200,
    )
    assert text == whole.json()["choices"][0]["text"]
    metrics = httpx.get(f"http://localhost:{PORTS[1]}/metrics", timeout=30).text
    assert re.search(r"vllm:external_prefix_cache_hits_total\{[^}]*\} [1-9]", metrics)
    if "NixlConnector" in commands[0]:
        assert re.search(r"vllm:nixl_bytes_transferred_count\{[^}]*\} 1\.0", metrics)
    log = (links / "log.txt").read_text(errors="replace")
    assert not re.search("failed:|checksum mismatch", log), log[-4000:]


# The guide's commands for several hosts run as written.

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
