"""ASGI middleware of vLLM's server, added through the default of --middleware.

It logs at start whether requests need a key, adds the cause of an engine's death to responses, and
ends open requests when the server shuts down.
"""

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from typing import TYPE_CHECKING, Any

from vllm_davinci.core.log import init_logger
from vllm_davinci.core.process import fault_report
from vllm_davinci.core.process.shutdown import SignalledEnd

if TYPE_CHECKING:
    from vllm.utils.argparse_utils import FlexibleArgumentParser

logger = init_logger(__name__)

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

ENDS = "The server is shutting down, and has ended this request. Send it to another server."
# Interval between checks whether the engine of a draining server has ended.
LOOKS_EVERY_S = 0.1


def add_to_server(parser: "FlexibleArgumentParser") -> None:
    """Adds the middleware to servers started with this parser, and the report to their ranks."""
    middleware = parser.get_default("middleware")
    if middleware is None:  # the command does not start a server
        return
    names = [f"{each.__module__}.{each.__qualname__}" for each in MIDDLEWARE]
    if not set(names) & set(middleware):
        parser.set_defaults(middleware=[*middleware, *names])
        fault_report.name_file()


class AccessNotice:
    """Logs whether requests need a key; vLLM logs only the address. Changes no request."""

    def __init__(self, app: App) -> None:
        self._app = app
        if any(type(each).__name__ == "AuthenticationMiddleware" for each in _layers(app)):
            logger.info("Requests to /v1 need an API key (--api-key, VLLM_API_KEY).")
        else:
            logger.info(
                "Requests need no API key: anyone who reaches the server's address may use it. "
                "Require one with --api-key, or listen on this host only with --host 127.0.0.1."
            )

    async def __call__(self, *call: Any) -> None:
        await self._app(*call)


def _layers(app: Any) -> Iterator[Any]:
    """The application and the applications it wraps, outermost first."""
    while app is not None:
        yield app
        app = getattr(app, "app", None) or getattr(app, "_app", None)


class CauseInErrors:
    """Adds the cause to vLLM's responses about a dead engine, which never name it."""

    def __init__(self, app: App) -> None:
        from vllm.v1.engine.exceptions import EngineDeadError  # vLLM imports this module first

        self._app = app
        self._words = EngineDeadError.CLIENT_MESSAGE.encode()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        held: list[Message] = []  # the start of an error response, which includes its length

        async def send_with_cause(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] >= 500:
                held.append(message)
                return
            body: bytes = message.get("body", b"")
            if self._words in body and (cause := fault_report.read()):
                body = body.replace(self._words, json.dumps(cause)[1:-1].encode())
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


class EndedRequests:
    """Ends open requests with an error as soon as the server shuts down.

    vLLM 0.33 ends its engine and the task that passes tokens on, then waits without a timeout for
    the connections of requests that wait for tokens. With --shutdown-timeout open requests have
    that time to finish.
    """

    def __init__(self, app: App) -> None:
        self._app = app
        self._open: set[asyncio.Task[Any]] = set()
        self._is_ending = asyncio.Event()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" and threading.current_thread() is threading.main_thread():
            # vLLM has just installed its signal handlers.
            self._follow_signals(scope["app"].state)
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        answer = _Answer(scope["path"], send)
        task = asyncio.current_task()
        assert task is not None
        if self._is_ending.is_set():
            await answer.end()
            return
        self._open.add(task)
        try:
            await self._app(scope, receive, answer.send)
        except asyncio.CancelledError:
            if not self._is_ending.is_set():
                raise
            task.uncancel()
            await answer.end()
        finally:
            self._open.discard(task)

    def _follow_signals(self, state: Any) -> None:
        engine = getattr(state, "engine_client", None)
        drains_s = float(engine.vllm_config.shutdown_timeout) if engine is not None else 0.0
        loop = asyncio.get_running_loop()

        async def end() -> None:
            end_s = loop.time() + drains_s
            while loop.time() < end_s and not state.server.should_exit:
                await asyncio.sleep(LOOKS_EVERY_S)
            self._is_ending.set()
            loop.set_exception_handler(_report_unless_ended)
            for task in self._open:
                task.cancel()

        def begin() -> None:  # runs in a signal handler
            self._ends = asyncio.run_coroutine_threadsafe(end(), loop)

        SignalledEnd(drains_s, begin)


def _report_unless_ended(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Leaves out the errors of handlers whose requests were ended before their engine."""
    from vllm.v1.engine.exceptions import EngineDeadError  # vLLM imports this file as it starts

    if not isinstance(context.get("exception"), EngineDeadError):
        loop.default_exception_handler(context)


class _Answer:
    """The response to one request: what has been sent, and its end as an error."""

    def __init__(self, path: str, send: Send) -> None:
        self._send = send
        self._is_of_anthropic = "/v1/messages" in path
        self._headers: dict[bytes, bytes] | None = None  # set once the response has begun
        self._is_whole = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._headers = {name.lower(): value for name, value in message.get("headers", ())}
        elif message["type"] == "http.response.body":
            self._is_whole = not message.get("more_body", False)
        await self._send(message)

    async def end(self) -> None:
        """Sends the error as the response, or as the last event of a stream that has begun."""
        if self._headers is None:
            body = self._error()
            headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
            headers += [(b"content-length", str(len(body)).encode())]
            await self._send({"type": "http.response.start", "status": 503, "headers": headers})
            await self._send({"type": "http.response.body", "body": body})
        elif not self._is_whole and b"content-length" not in self._headers:
            is_stream = self._headers.get(b"content-type", b"").startswith(b"text/event-stream")
            await self._send(
                {"type": "http.response.body", "body": self._event() if is_stream else b""}
            )

    def _error(self) -> bytes:
        if self._is_of_anthropic:
            error = {"type": "error", "error": {"type": "overloaded_error", "message": ENDS}}
        else:
            words = {"message": ENDS, "type": "ServiceUnavailableError", "param": None, "code": 503}
            error = {"error": words}
        return json.dumps(error).encode()

    def _event(self) -> bytes:
        if self._is_of_anthropic:
            return b"event: error\ndata: " + self._error() + b"\n\n"
        return b"data: " + self._error() + b"\n\ndata: [DONE]\n\n"


# The last one added is outermost.
MIDDLEWARE = (CauseInErrors, AccessNotice, EndedRequests)
