"""The cause of an engine's death in what a server answers."""

from __future__ import annotations

import argparse
import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.engine.exceptions import EngineDeadError

from vllm_davinci.core.config.environment_variables import FAULT_REPORT
from vllm_davinci.core.process import fault_report
from vllm_davinci.core.process.fault_report import CauseInErrors, add_to_server, leave_report

TOLD = str(EngineDeadError())
CAUSE = 'rank 1 failed: "no memory"\n'
ESCAPED = 'rank 1 failed: \\"no memory\\"\\n'


@pytest.fixture
def report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(FAULT_REPORT.key, str(tmp_path / "report"))
    return tmp_path / "report"


def answered(status: int, *bodies: str) -> list[dict[str, Any]]:
    """Sends these bodies through the middleware; the messages that a client gets."""
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        length = str(len("".join(bodies))).encode()
        headers = [(b"content-length", length), (b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        for body in bodies:
            await send({"type": "http.response.body", "body": body.encode()})

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {}

    asyncio.run(CauseInErrors(app)({"type": "http"}, receive, send))
    return sent


def test_an_answer_has_the_first_cause_and_its_length(report: Path):
    leave_report(CAUSE)
    leave_report("a later one")
    assert report.stat().st_mode & 0o777 == 0o600
    start, body = answered(500, f'{{"error": "{TOLD}"}}')
    assert body["body"].decode() == f'{{"error": "{ESCAPED}"}}'
    assert dict(start["headers"])[b"content-length"] == str(len(body["body"])).encode()


def test_an_event_of_a_stream_has_the_cause(report: Path):
    leave_report(CAUSE)
    _, first, last = answered(200, "data: {}\n\n", f'data: {{"error": "{TOLD}"}}\n\n')
    assert first["body"] == b"data: {}\n\n"
    assert last["body"].decode() == f'data: {{"error": "{ESCAPED}"}}\n\n'


@pytest.mark.parametrize("status", [200, 500, 503])
def test_answers_are_passed_on_where_nothing_was_reported(status: int, report: Path):
    start, body = answered(status, TOLD)
    assert (start["status"], body["body"].decode()) == (status, TOLD)
    assert dict(start["headers"])[b"content-length"] == str(len(TOLD)).encode()


def test_a_server_has_the_middleware_once_beside_the_user_s(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(fault_report.os, "environ", dict(os.environ))
    parser: Any = argparse.ArgumentParser()
    parser.add_argument("--middleware", action="append", default=[])
    for _ in range(2):
        add_to_server(parser)
    name = "vllm_davinci.core.process.fault_report.CauseInErrors"
    assert parser.parse_args([]).middleware == [name]
    assert parser.parse_args(["--middleware=own"]).middleware == [name, "own"]
    assert "vllm-davinci-fault-" in os.environ[FAULT_REPORT.key]


def test_a_command_without_middleware_is_left_alone():
    parser: Any = argparse.ArgumentParser()
    add_to_server(parser)
    assert vars(parser.parse_args([])) == {}
