"""A server's middleware: messages at start-up and in answers, and how requests end."""

import argparse
import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.testclient import TestClient
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware
from vllm.v1.engine.exceptions import EngineDeadError

from vllm_davinci.core.config.environment_variables import FAULT_REPORT
from vllm_davinci.core.process import fault_report, middleware, shutdown
from vllm_davinci.core.process.fault_report import leave_report
from vllm_davinci.core.process.middleware import (
    MIDDLEWARE,
    AccessNotice,
    CauseInErrors,
    EndedRequests,
    add_to_server,
)

TOLD = create_error_response(EngineDeadError()).error.message
CAUSE = 'rank 1 failed: "no memory"\n'
ESCAPED = 'rank 1 failed: \\"no memory\\"\\n'


@pytest.fixture
def report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(FAULT_REPORT.key, str(tmp_path / "report"))
    return tmp_path / "report"


def answered(status: int, *bodies: str) -> list[dict[str, Any]]:
    """Sends these bodies through the middleware; returns the messages to the client."""
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


def test_a_server_has_the_middleware_once_beside_the_user_s(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fault_report.os, "environ", dict(os.environ))
    parser: Any = argparse.ArgumentParser()
    parser.add_argument("--middleware", action="append", default=["first"])
    for _ in range(2):
        add_to_server(parser)
    names = [f"vllm_davinci.core.process.middleware.{each.__name__}" for each in MIDDLEWARE]
    assert parser.parse_args([]).middleware == ["first", *names]
    assert parser.parse_args(["--middleware=own"]).middleware == ["first", *names, "own"]
    assert "vllm-davinci-fault-" in os.environ[FAULT_REPORT.key]


def test_a_command_without_middleware_is_unchanged():
    parser: Any = argparse.ArgumentParser()
    add_to_server(parser)
    assert vars(parser.parse_args([])) == {}


@pytest.mark.parametrize(
    ("tokens", "said"), [(["secret"], "need an API key"), ([], "need no API key")]
)
def test_the_log_says_whether_a_key_is_needed(tokens, said, monkeypatch):
    lines: list[str] = []
    monkeypatch.setattr(middleware.logger, "info", lines.append)
    inner = [Middleware(AuthenticationMiddleware, tokens=tokens)] if tokens else []
    # In vLLM's order: middleware that is added later is outside.
    app = Starlette(middleware=[Middleware(AccessNotice), Middleware(CauseInErrors), *inner])
    assert TestClient(app).get("/v1/models").status_code == (401 if tokens else 404)
    (line,) = lines
    assert said in line and "--api-key" in line


@pytest.fixture
def _own_handlers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restores signal handlers after the test, because the process continues."""
    monkeypatch.setattr(shutdown, "_after", lambda seconds, work: None)
    monkeypatch.setattr(shutdown, "Remains", lambda roots: None)
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, lambda number, frame: None) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


def ended(
    path: str, *sent: dict[str, Any], drains_s: int = 0, finishes_after_s: float | None = None
) -> list[dict[str, Any]]:
    """Returns what a client gets from a request that has sent these messages when SIGTERM arrives.

    finishes_after_s: when the request itself sends its last message
    """
    got: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            for message in sent:
                await send(message)
            await asyncio.sleep(3600 if finishes_after_s is None else finishes_after_s)
            await send({"type": "http.response.body", "body": b"last"})

    async def receive() -> Any:
        return {}

    async def send(message: Any) -> None:
        got.append(message)

    async def serve() -> None:
        engine = SimpleNamespace(vllm_config=SimpleNamespace(shutdown_timeout=drains_s))
        server = SimpleNamespace(should_exit=False)
        state = SimpleNamespace(engine_client=engine, server=server)
        outer = EndedRequests(app)
        await outer({"type": "lifespan", "app": SimpleNamespace(state=state)}, receive, send)
        request = asyncio.create_task(outer({"type": "http", "path": path}, receive, send))
        await asyncio.sleep(0.05)
        signal.raise_signal(signal.SIGTERM)
        await asyncio.wait_for(request, 30)
        await asyncio.wait_for(outer({"type": "http", "path": path}, receive, send), 30)

    asyncio.run(serve())
    return got


START = {"type": "http.response.start", "status": 200}
EVENTS = {**START, "headers": [(b"Content-Type", b"text/event-stream; charset=utf-8")]}
WITH_LENGTH = {**START, "headers": [(b"Content-Length", b"100")]}
CHUNK = {"type": "http.response.body", "body": b"data: {}\n\n", "more_body": True}


@pytest.mark.usefixtures("_own_handlers")
class TestEndedRequests:
    def test_a_request_without_an_answer_gets_an_error(self) -> None:
        start, body, *later = ended("/v1/completions")
        assert start["status"] == 503
        assert dict(start["headers"])[b"content-length"] == str(len(body["body"])).encode()
        assert b'"code": 503' in body["body"]
        assert later == [start, body]  # of the next request

    def test_a_stream_ends_with_an_error_event(self) -> None:
        *_, chunk, last, _, _ = ended("/v1/completions", EVENTS, CHUNK)
        assert chunk == CHUNK
        assert last["body"].startswith(b'data: {"error": ')
        assert last["body"].endswith(b"\n\ndata: [DONE]\n\n")
        assert not last.get("more_body")

    def test_messages_of_anthropic_have_their_own_event(self) -> None:
        *_, last, _, body = ended("/v1/messages", EVENTS, CHUNK)
        assert last["body"].startswith(b'event: error\ndata: {"type": "error", ')
        assert b"overloaded_error" in body["body"]

    def test_a_body_of_known_length_is_cut(self) -> None:
        assert ended("/v1/files", WITH_LENGTH, CHUNK)[:-2] == [WITH_LENGTH, CHUNK]

    def test_a_request_that_drains_may_finish(self) -> None:
        *_, last, _, _ = ended("/v1/completions", EVENTS, drains_s=20, finishes_after_s=0.2)
        assert last["body"] == b"last"
