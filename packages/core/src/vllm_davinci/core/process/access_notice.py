"""A server says at its start whether requests need a key.

vLLM's log has the address on which it listens, and nothing on who may ask there.
"""

from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, Any

from vllm_davinci.core.log import init_logger

if TYPE_CHECKING:
    from vllm.utils.argparse_utils import FlexibleArgumentParser

logger = init_logger(__name__)


def add_access_notice(parser: "FlexibleArgumentParser") -> None:
    """Gives a server that is started with this parser the notice."""
    middleware = parser.get_default("middleware")
    name = f"{AccessNotice.__module__}.{AccessNotice.__qualname__}"
    if middleware is not None and name not in middleware:  # else another command than a server
        parser.set_defaults(middleware=[*middleware, name])


class AccessNotice:
    """ASGI middleware that looks at what it stands around, and does nothing to requests."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app = app
        if any(type(each).__name__ == "AuthenticationMiddleware" for each in _layers(app)):
            logger.info("Requests to /v1 need an API key (--api-key, VLLM_API_KEY).")
        else:
            logger.info(
                "Requests need no API key: whoever reaches the server's address may use it. Ask "
                "for one with --api-key, or listen on this host alone with --host 127.0.0.1."
            )

    async def __call__(self, *call: Any) -> None:
        await self._app(*call)


def _layers(app: Any) -> Iterator[Any]:
    """The application and what it wraps, from outside to inside."""
    while app is not None:
        yield app
        app = getattr(app, "app", None) or getattr(app, "_app", None)
