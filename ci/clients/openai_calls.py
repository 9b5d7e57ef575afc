"""openai's client: completions, chat, streams, structured output, tools, Responses, bad calls."""

import json
import re
from collections.abc import Iterator
from typing import Any

import openai
from calls import Calls, Server, require_refusal

calls = Calls()
PROMPT = "def main("
MESSAGES: Any = [{"role": "user", "content": "def main("}]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "size": {
            "type": "integer",
            "minimum": 0,
            "maximum": 99,
        },  # otherwise a small model continues the number
    },
    "required": ["name", "size"],
    "additionalProperties": False,
}
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks a name up.",
        "parameters": SCHEMA,
        "strict": True,  # without this, a server need not apply the schema to the arguments
    },
}
# JSON allows white space between tokens, which a small model repeats without end.
ENDS = {"frequency_penalty": 2.0}


def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=300)


def complete(server: Server, **options: Any) -> Any:
    given = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, **options}
    return client(server).completions.create(model=server.model, **given)


def chat(server: Server, **options: Any) -> Any:
    given = {"messages": MESSAGES, "max_tokens": 12, "temperature": 0, **options}
    return client(server).chat.completions.create(model=server.model, **given)


def called(tool_calls: Any) -> str:
    return ", ".join(f"{each.function.name}({each.function.arguments})" for each in tool_calls)


@calls.add("models")
def _(server: Server) -> str:
    names = [model.id for model in client(server).models.list().data]
    assert server.model in names
    assert server.adapter is None or server.adapter in names
    return ", ".join(names)


@calls.add("completion")
def _(server: Server) -> str:
    answer = complete(server)
    assert answer.choices[0].finish_reason in ("length", "stop")
    assert 0 < answer.usage.completion_tokens <= 12
    return repr(answer.choices[0].text)


@calls.add("completion, stream")
def _(server: Server) -> str:
    whole = complete(server, max_tokens=24).choices[0].text
    chunks = list(
        complete(server, max_tokens=24, stream=True, stream_options={"include_usage": True})
    )
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole
    assert chunks[-1].usage.completion_tokens > 0
    return f"{len(chunks)} chunks, the whole text, then usage"


@calls.add("completion, several prompts")
def _(server: Server) -> str:
    texts = ["import ", "class A", "    for "]
    together = complete(server, prompt=texts)
    alone = [complete(server, prompt=text).choices[0].text for text in texts]
    assert [choice.text for choice in together.choices] == alone
    return f"{len(alone)} texts, equal to those of single calls"


@calls.add("completion, token ids as prompt")
def _(server: Server) -> str:
    ids = complete(server, extra_body={"return_token_ids": True}).choices[0]
    again = complete(server, prompt=ids.prompt_token_ids).choices[0].text
    assert again == ids.text
    return f"{ids.prompt_token_ids}, and the same text for them"


@calls.add("completion, logprobs")
def _(server: Server) -> str:
    choice = complete(server, logprobs=3).choices[0]
    assert "".join(choice.logprobs.tokens) == choice.text
    for token, top in zip(
        choice.logprobs.token_logprobs, choice.logprobs.top_logprobs, strict=True
    ):
        assert token <= 0 and token >= max(top.values()) - 1e-4  # greedy: the best
    return f"first {choice.logprobs.token_logprobs[0]:.3f}, and the best 3 of each token"


@calls.add("completion, echo with logprobs")
def _(server: Server) -> str:
    choice = complete(server, echo=True, logprobs=1, max_tokens=4).choices[0]
    assert choice.text.startswith(PROMPT)
    assert choice.logprobs.token_logprobs[0] is None
    return repr(choice.text)


@calls.add("completion, n with a seed")
def _(server: Server) -> str:
    options = {"n": 3, "seed": 7, "temperature": 1.0, "max_tokens": 16}
    first, second = ([c.text for c in complete(server, **options).choices] for _ in range(2))
    assert first == second
    assert len(set(first)) > 1
    return f"{len(set(first))} different texts of 3, the same again"


@calls.add("completion, stop")
def _(server: Server) -> str:
    whole = complete(server, max_tokens=32).choices[0].text
    word = whole[len(whole) // 2 :][:2]
    choice = complete(server, max_tokens=32, stop=[word]).choices[0]
    assert choice.finish_reason == "stop"
    assert choice.text == whole[: whole.index(word)]
    return f"the text before {word!r}"


@calls.add("completion, logit bias")
def _(server: Server) -> str:
    ids = complete(server, extra_body={"return_token_ids": True}).choices[0].token_ids
    options = {"logit_bias": {str(ids[0]): -100}, "extra_body": {"return_token_ids": True}}
    if server.has_drafts:
        return require_refusal(
            lambda: complete(server, **options), openai.APIStatusError, "logit_bias", 400
        )
    biased = complete(server, **options).choices[0].token_ids
    assert biased[0] != ids[0]
    return f"first token {biased[0]} in the place of {ids[0]}"


@calls.add("completion, penalties")
def _(server: Server) -> str:
    options = {"max_tokens": 48, "extra_body": {"repetition_penalty": 1.8, "ignore_eos": True}}
    plain = complete(server, max_tokens=48, extra_body={"ignore_eos": True}).choices[0].text
    penalized = complete(server, presence_penalty=1.5, frequency_penalty=1.5, **options)
    assert penalized.choices[0].text != plain
    return "another text than without"


@calls.add("completion, min_p, top_k, top_p, min_tokens")
def _(server: Server) -> str:
    extra = {"top_k": 5, "min_p": 0.05, "min_tokens": 8}
    options = {"temperature": 0.8, "top_p": 0.9, "seed": 3, "extra_body": extra}
    if server.has_drafts:
        require_refusal(lambda: complete(server, **options), openai.APIStatusError, "min_p", 400)
        del extra["min_p"]
    count = complete(server, **options).usage.completion_tokens
    assert count >= 8
    return f"{count} tokens"


@calls.add("completion, bad words")
def _(server: Server) -> str:
    first = complete(server, max_tokens=1).choices[0].text
    extra = {"bad_words": [first.strip() or first]}
    other = complete(server, max_tokens=1, extra_body=extra).choices[0].text
    assert other.strip() != first.strip()
    return f"{other!r} in the place of {first!r}"


@calls.add("completion, regular expression")
def _(server: Server) -> str:
    extra = {"structured_outputs": {"regex": r"[a-c]{3}-[0-9]{4}"}}
    text = complete(server, max_tokens=24, extra_body=extra).choices[0].text
    assert re.fullmatch(r"[a-c]{3}-[0-9]{4}", text), text
    return repr(text)


@calls.add("completion, choice")
def _(server: Server) -> str:
    extra = {"structured_outputs": {"choice": ["north", "south"]}}
    text = complete(server, extra_body=extra).choices[0].text
    assert text in ("north", "south")
    return repr(text)


@calls.add("completion, grammar")
def _(server: Server) -> str:
    grammar = 'root ::= ("a" | "b") "=" [0-9] [0-9]?'
    extra = {"structured_outputs": {"grammar": grammar}}
    text = complete(server, extra_body=extra).choices[0].text
    assert re.fullmatch(r"[ab]=[0-9]{1,2}", text), text
    return repr(text)


@calls.add("completion, adapter")
def _(server: Server) -> str:
    if server.adapter is None:
        return ""
    create = client(server).completions.create
    adapted = create(model=server.adapter, prompt=PROMPT, max_tokens=12, temperature=0).choices[0]
    assert adapted.text != complete(server).choices[0].text
    return repr(adapted.text)


@calls.add("chat")
def _(server: Server) -> str:
    answer = chat(server)
    assert answer.choices[0].message.role == "assistant"
    usage = answer.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    return repr(answer.choices[0].message.content)


@calls.add("chat, stream")
def _(server: Server) -> str:
    whole = chat(server, max_tokens=24).choices[0].message.content
    stream: Iterator[Any] = chat(server, max_tokens=24, stream=True)
    deltas = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
    assert "".join(deltas) == whole
    return f"{len(deltas)} chunks, the whole text"


@calls.add("chat, several messages")
def _(server: Server) -> str:
    messages = [
        {"role": "system", "content": "Answer in code."},
        {"role": "user", "content": "import "},
        {"role": "assistant", "content": "os"},
        {"role": "user", "content": [{"type": "text", "text": "def "}]},
    ]
    text = chat(server, messages=messages).choices[0].message.content
    assert text is not None
    return repr(text)


@calls.add("chat, logprobs")
def _(server: Server) -> str:
    content = chat(server, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    assert all(len(token.top_logprobs) >= 2 for token in content)
    return f"{len(content)} tokens, each with the best 2"


@calls.add("chat, JSON schema")
def _(server: Server) -> str:
    form = {
        "type": "json_schema",
        "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True},
    }
    text = chat(server, max_tokens=96, response_format=form).choices[0].message.content
    found = json.loads(text)
    assert set(found) == {"name", "size"} and isinstance(found["size"], int)
    return json.dumps(found)


@calls.add("chat, JSON object")
def _(server: Server) -> str:
    form = {"type": "json_object"}
    answer = chat(server, max_tokens=120, response_format=form, stop=["\n\n\n"]).choices[0]
    assert answer.message.content.lstrip().startswith("{")
    return repr(answer.message.content)


@calls.add("chat, tools required")
def _(server: Server) -> str:
    one = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
    answer = chat(server, max_tokens=160, **ENDS, **one).choices[0]
    assert answer.message.tool_calls
    for call in answer.message.tool_calls:
        assert call.function.name == "look_up"
        assert set(json.loads(call.function.arguments)) == {"name", "size"}
    return called(answer.message.tool_calls)


@calls.add("chat, a named tool")
def _(server: Server) -> str:
    choice = {"type": "function", "function": {"name": "look_up"}}
    given = {"tools": [TOOL], "tool_choice": choice}
    message = chat(server, max_tokens=96, **ENDS, **given).choices[0].message
    (call,) = message.tool_calls
    assert set(json.loads(call.function.arguments)) == {"name", "size"}
    return called(message.tool_calls)


@calls.add("chat, tools auto")
def _(server: Server) -> str:
    message = chat(server, tools=[TOOL], tool_choice="auto").choices[0].message
    assert message.content or message.tool_calls
    return called(message.tool_calls) if message.tool_calls else repr(message.content)


@calls.add("chat, n with a seed")
def _(server: Server) -> str:
    texts = [
        [choice.message.content for choice in chat(server, n=2, seed=5, temperature=1.0).choices]
        for _ in range(2)
    ]
    assert texts[0] == texts[1]
    return "2 texts, the same again"


@calls.add("responses")
def _(server: Server) -> str:
    answer = client(server).responses.create(
        model=server.model, input="def main(", max_output_tokens=12, temperature=0
    )
    assert answer.output_text
    return repr(answer.output_text)


@calls.add("responses, stream")
def _(server: Server) -> str:
    stream = client(server).responses.create(
        model=server.model, input="import ", max_output_tokens=12, temperature=0, stream=True
    )
    kinds = [event.type for event in stream]
    assert "response.output_text.delta" in kinds
    assert kinds[-1] in ("response.completed", "response.incomplete")
    return f"{len(kinds)} events, the last {kinds[-1]}"


BAD: dict[str, tuple[int, str, dict[str, Any]]] = {
    "temperature below 0": (400, "temperature", {"temperature": -1}),
    "top_p above 1": (400, "top_p", {"top_p": 2}),
    "max_tokens 0": (400, "max_tokens", {"max_tokens": -1}),
    "a prompt that is too long": (400, "context", {"prompt": "x = 1\n" * 4000}),
    "n of 0": (400, "n", {"n": 0}),
    "an unknown token in logit_bias": (400, "logit_bias", {"logit_bias": {"99999999": 1}}),
    "too many logprobs": (400, "logprobs", {"logprobs": 500}),
    "a prompt without tokens": (400, "prompt", {"prompt": []}),
    "token ids out of the vocabulary": (400, "vocabulary", {"prompt": [99999999]}),
    "a grammar that cannot be read": (
        400,
        "grammar",
        {"extra_body": {"structured_outputs": {"grammar": "root ::= ("}}},
    ),
    "a regular expression that cannot be read": (
        400,
        "regex",
        {"extra_body": {"structured_outputs": {"regex": "(["}}},
    ),
}
for _name, _case in BAD.items():

    @calls.add(f"refused: {_name}")
    def _(server: Server, case: tuple[int, str, dict[str, Any]] = _case) -> str:
        status, word, options = case
        return require_refusal(
            lambda: complete(server, **options), openai.APIStatusError, word, status
        )


@calls.add("refused: an unknown model")
def _(server: Server) -> str:
    create = client(server).completions.create
    return require_refusal(
        lambda: create(model="another", prompt="x", max_tokens=1), openai.NotFoundError, "another"
    )


if __name__ == "__main__":
    calls.run()
