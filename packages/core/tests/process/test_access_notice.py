"""A server's log says whether requests need a key."""

from __future__ import annotations

import argparse
import asyncio
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.testclient import TestClient
from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware

from vllm_davinci.core.process import access_notice
from vllm_davinci.core.process.access_notice import AccessNotice, add_access_notice
from vllm_davinci.core.process.fault_report import CauseInErrors


@pytest.mark.parametrize(
    ("tokens", "told"), [(["secret"], "need an API key"), ([], "need no API key")]
)
def test_the_log_says_whether_a_key_is_needed(
    tokens: list[str], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(access_notice.logger, "info", lines.append)
    inner = [Middleware(AuthenticationMiddleware, tokens=tokens)] if tokens else []
    # As vLLM builds it: what is added later stands outside.
    app = Starlette(middleware=[Middleware(AccessNotice), Middleware(CauseInErrors), *inner])
    assert TestClient(app).get("/v1/models").status_code == (401 if tokens else 404)
    (line,) = lines
    assert told in line and "--api-key" in line


def test_calls_pass_unchanged() -> None:
    calls: list[Any] = []

    async def app(*call: Any) -> None:
        calls.append(call)

    asyncio.run(AccessNotice(app)(1, 2, 3))
    assert calls == [(1, 2, 3)]


def test_only_servers_get_the_notice() -> None:
    parser: Any = argparse.ArgumentParser()
    add_access_notice(parser)
    assert parser.get_default("middleware") is None
    parser.set_defaults(middleware=["own"])
    for _ in range(2):
        add_access_notice(parser)
    name = "vllm_davinci.core.process.access_notice.AccessNotice"
    assert parser.get_default("middleware") == ["own", name]
