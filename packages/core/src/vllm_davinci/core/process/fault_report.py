"""Why an engine died, from the rank that failed to the clients of the server.

vLLM tells clients that its engine died, in words that are always the same. The rank that knows the
cause leaves it in a file whose name only the server's processes know; a middleware of the server
puts it into the answers.
"""

import atexit
import json
import os
import secrets
import tempfile
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_davinci.core.config.environment_variables import FAULT_REPORT

if TYPE_CHECKING:
    from vllm.utils.argparse_utils import FlexibleArgumentParser

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]


def add_to_server(parser: "FlexibleArgumentParser") -> None:
    """Gives a server that is started with this parser the middleware, and its ranks the file."""
    middleware = parser.get_default("middleware")
    name = f"{CauseInErrors.__module__}.{CauseInErrors.__qualname__}"
    if middleware is None or name in middleware:  # another command than a server
        return
    parser.set_defaults(middleware=[*middleware, name])
    if FAULT_REPORT.key not in os.environ:
        file = Path(tempfile.gettempdir(), f"vllm-davinci-fault-{secrets.token_hex(16)}")
        os.environ[FAULT_REPORT.key] = str(file)
        atexit.register(_remove, file, os.getpid())


def leave_report(cause: str) -> None:
    """Writes the cause where a server has asked for it; the first rank's stays."""
    if file := os.environ.get(FAULT_REPORT.key):
        with suppress(FileExistsError):
            descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(descriptor, "w") as report:
                report.write(cause)


def _reported() -> str:
    try:
        return Path(os.environ[FAULT_REPORT.key]).read_text()
    except (KeyError, FileNotFoundError):
        return ""


def _remove(file: Path, owner: int) -> None:
    if os.getpid() == owner:  # not a process forked from it
        file.unlink(missing_ok=True)


class CauseInErrors:
    """ASGI middleware: what clients are told of an engine that died has the cause with it."""

    def __init__(self, app: App) -> None:
        from vllm.v1.engine.exceptions import EngineDeadError  # vLLM imports this module first

        self._app = app
        self._told = str(EngineDeadError()).encode()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        held: list[Message] = []  # the start of an error's answer, which has its length

        async def send_with_cause(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] >= 500:
                held.append(message)
                return
            body: bytes = message.get("body", b"")
            if self._told in body and (cause := _reported()):
                body = body.replace(self._told, json.dumps(cause)[1:-1].encode())
                message = {**message, "body": body}
                _set_length(held, len(body))
            while held:
                await send(held.pop())
            await send(message)

        await self._app(scope, receive, send_with_cause if scope["type"] == "http" else send)


def _set_length(starts: list[Message], length: int) -> None:
    for start in starts:
        start["headers"] = [
            (name, str(length).encode() if name.lower() == b"content-length" else value)
            for name, value in start["headers"]
        ]
