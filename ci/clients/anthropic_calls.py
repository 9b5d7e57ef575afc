"""anthropic's client: messages, streams, tools, token counts, a bad call."""

from typing import Any

import anthropic
from calls import Calls, Server, require_refusal

calls = Calls()
# The client no longer has this argument, but the server accepts it.
GREEDY = {"temperature": 0}
MESSAGES: Any = [{"role": "user", "content": "def main("}]


def client(server: Server) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=300)


def create(server: Server, **options: Any) -> Any:
    given = {"messages": MESSAGES, "max_tokens": 12, "extra_body": GREEDY, **options}
    return client(server).messages.create(model=server.model, **given)


@calls.add("message")
def _(server: Server) -> str:
    answer = create(server)
    assert answer.role == "assistant"
    assert answer.content[0].type == "text"
    assert 0 < answer.usage.output_tokens <= 12
    return repr(answer.content[0].text)


@calls.add("message with a system prompt")
def _(server: Server) -> str:
    answer = create(server, system="Answer in code.", stop_sequences=["\n\n\n"])
    assert answer.stop_reason in ("max_tokens", "end_turn", "stop_sequence")
    return answer.stop_reason


@calls.add("message, stream")
def _(server: Server) -> str:
    whole = create(server).content[0].text
    options = {"messages": MESSAGES, "max_tokens": 12, "extra_body": GREEDY}
    with client(server).messages.stream(model=server.model, **options) as stream:
        assert "".join(stream.text_stream) == whole
        assert stream.get_final_message().stop_reason in ("max_tokens", "end_turn")
    return "the whole text, then its reason to stop"


@calls.add("message, a tool is required")
def _(server: Server) -> str:
    tool = {
        "name": "look_up",
        "description": "Looks a name up.",
        "strict": True,
        "input_schema": {
            "type": "object",
            "properties": {"size": {"type": "integer", "minimum": 0, "maximum": 99}},
            "required": ["size"],
            "additionalProperties": False,
        },
    }
    choice = {"type": "tool", "name": "look_up"}
    # JSON allows white space, which a small model may repeat until its tokens are used up; this
    # client's calls have no penalty.
    given = {"tools": [tool], "tool_choice": choice, "extra_body": {"temperature": 1.0}}
    answers = (create(server, max_tokens=96, **given) for _ in range(8))
    blocks = (block for answer in answers for block in answer.content)
    use = next(block for block in blocks if block.type == "tool_use")
    assert isinstance(use.input["size"], int)
    return f"{use.name}({use.input})"


@calls.add("count of tokens")
def _(server: Server) -> str:
    counted = client(server).messages.count_tokens(model=server.model, messages=MESSAGES)
    assert counted.input_tokens == create(server).usage.input_tokens
    return f"{counted.input_tokens}, as many as the call itself counts"


@calls.add("refused: an unknown model")
def _(server: Server) -> str:
    create = client(server).messages.create
    return require_refusal(
        lambda: create(model="another", messages=MESSAGES, max_tokens=1),
        anthropic.NotFoundError,
        "another",
    )


if __name__ == "__main__":
    calls.run()
