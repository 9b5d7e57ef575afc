"""A proxy for two engines in its own process, which can be killed and restarted.

It sends each prompt to the prefill engine, and the address of its blocks to the decode engine, as
`Pair` does.
"""

import json
import os
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx

from vllm_davinci_testing.engines.disaggregated import REQUEST_LIMIT_S, Answer, Pair, answer_of, ask
from vllm_davinci_testing.engines.server_process import ForkedServer, answers
from vllm_davinci_testing.processes.fork_server import fork_context
from vllm_davinci_testing.processes.ranks import free_port
from vllm_davinci_testing.processes.waiting import becomes_true

START_LIMIT_S = 60


class ProxiedPair(Pair):
    """Engines behind a proxy."""

    def __init__(self, model: Path, directory: Path, *options: str, **settings: Any) -> None:
        self._engines_file = directory / "engines.json"
        self._engines = {"model": str(model)}
        super().__init__(model, directory, *options, **settings)
        self._port = free_port()
        self.start_proxy()

    def _start(self, role: str) -> ForkedServer:
        """Starts a server; gives the proxy the new port of a restarted engine."""
        server = super()._start(role)
        self._engines[role] = server.url
        written = self._engines_file.with_suffix(".new")
        written.write_text(json.dumps(self._engines), encoding="utf-8")
        written.replace(self._engines_file)
        return server

    def start_proxy(self) -> None:
        """Starts the proxy at the previous one's address."""
        self._proxy = fork_context().Process(target=_serve, args=(self._port, self._engines_file))
        self._proxy.start()
        assert becomes_true(self._proxy_answers, START_LIMIT_S), "the proxy does not answer"

    def kill_proxy(self) -> None:
        """Kills the proxy; clients' connections break."""
        self._proxy.kill()
        self._proxy.join(10)

    def is_ready(self) -> bool:
        return self._proxy_answers() and super().is_ready()

    def complete(self, prompt: list[int], max_tokens: int) -> Answer:
        """Sends a request as a client, which knows only the proxy."""
        answered = httpx.post(
            f"http://127.0.0.1:{self._port}",
            json={"prompt": prompt, "max_tokens": max_tokens},
            timeout=2 * REQUEST_LIMIT_S,
        )
        answered.raise_for_status()
        return Answer(**answered.json())

    def close(self) -> None:
        self.kill_proxy()
        super().close()

    def _proxy_answers(self) -> bool:
        return answers(self._port, "/")


def _serve(port: int, engines: Path) -> None:
    os.setsid()
    _Proxy.engines = engines
    with ThreadingHTTPServer(("127.0.0.1", port), _Proxy) as server:
        server.serve_forever()


class _Proxy(BaseHTTPRequestHandler):
    """Handles a client's request {"prompt": [...], "max_tokens": n} and returns an Answer."""

    engines: Path

    def do_GET(self) -> None:
        self._send(HTTPStatus.OK, {})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        try:
            answer = self._complete(asked["prompt"], asked["max_tokens"])
        except (httpx.TransportError, httpx.HTTPStatusError) as error:
            self._send(HTTPStatus.BAD_GATEWAY, {"error": str(error)})
            return
        self._send(HTTPStatus.OK, answer._asdict())

    def _complete(self, prompt: list[int], max_tokens: int) -> Answer:
        known = json.loads(self.engines.read_text(encoding="utf-8"))
        begin = {"do_remote_decode": True, "do_remote_prefill": False}
        first = ask(known["kv_producer"], known["model"], prompt, 1, begin)
        told = first["kv_transfer_params"]
        return answer_of(ask(known["kv_consumer"], known["model"], prompt, max_tokens, told))

    def _send(self, status: HTTPStatus, value: dict[str, Any]) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Logs nothing."""
