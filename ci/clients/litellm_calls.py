"""litellm's client: completion, stream, async, text completion, an error of its own class."""

from __future__ import annotations

import asyncio
from typing import Any

import litellm
from calls import Calls, Server, require_refusal

calls = Calls()
MESSAGES = [{"role": "user", "content": "import "}]


def options(server: Server, **more: Any) -> dict[str, Any]:
    return {
        "model": f"hosted_vllm/{server.model}",
        "api_base": f"{server.url}/v1",
        "api_key": "none",
        "temperature": 0,
        "max_tokens": 12,
        "num_retries": 0,
        **more,
    }


@calls.add("completion")
def _(server: Server) -> None:
    answer = litellm.completion(**options(server, messages=MESSAGES))
    assert answer.choices[0].message.content
    assert answer.usage.completion_tokens <= 12


@calls.add("completion, stream")
def _(server: Server) -> None:
    whole = litellm.completion(**options(server, messages=MESSAGES)).choices[0].message.content
    stream = litellm.completion(**options(server, messages=MESSAGES, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == whole


@calls.add("completions side by side")
def _(server: Server) -> None:
    async def together() -> list[Any]:
        given = options(server, messages=MESSAGES)
        return await asyncio.gather(*(litellm.acompletion(**given) for _ in range(8)))

    texts = {answer.choices[0].message.content for answer in asyncio.run(together())}
    assert len(texts) == 1


@calls.add("refused: temperature below 0")
def _(server: Server) -> None:
    given = options(server, messages=MESSAGES, temperature=-1)
    require_refusal(lambda: litellm.completion(**given), litellm.BadRequestError, "temperature")


if __name__ == "__main__":
    calls.run()
