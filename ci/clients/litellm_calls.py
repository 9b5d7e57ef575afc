"""litellm's client: completion, stream, async, text completion, litellm's own error class."""

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
def _(server: Server) -> str:
    answer = litellm.completion(**options(server, messages=MESSAGES))
    assert answer.choices[0].message.content
    assert answer.usage.completion_tokens <= 12
    return repr(answer.choices[0].message.content)


@calls.add("completion, stream")
def _(server: Server) -> str:
    whole = litellm.completion(**options(server, messages=MESSAGES)).choices[0].message.content
    chunks = list(litellm.completion(**options(server, messages=MESSAGES, stream=True)))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole
    return f"{len(chunks)} chunks, the whole text"


@calls.add("completions side by side")
def _(server: Server) -> str:
    async def together() -> list[Any]:
        given = options(server, messages=MESSAGES)
        return await asyncio.gather(*(litellm.acompletion(**given) for _ in range(8)))

    texts = {answer.choices[0].message.content for answer in asyncio.run(together())}
    assert len(texts) == 1
    return "8 equal texts"


@calls.add("refused: temperature below 0")
def _(server: Server) -> str:
    given = options(server, messages=MESSAGES, temperature=-1)
    return require_refusal(
        lambda: litellm.completion(**given), litellm.BadRequestError, "temperature"
    )


if __name__ == "__main__":
    calls.run()
