"""A client's named and checked calls, and their results."""

import json
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass

LONGEST_ANSWER = 100  # characters, on the page


def require_refusal(
    call: Callable[[], object], error_class: type[Exception], word: str, status: int | None = None
) -> str:
    """Checks that the call raises this error, naming the parameter; returns the error's text."""
    try:
        call()
    except error_class as error:
        found = getattr(error, "status_code", None)
        if status is not None and found != status:
            raise AssertionError(f"status {found} instead of {status}: {error}") from error
        if word not in str(error):
            raise AssertionError(f"{word!r} is not in: {error}") from error
        body = getattr(error, "body", None)
        message = (body.get("error", body) if isinstance(body, dict) else {}).get("message", error)
        return f"{found}: {message}"
    raise AssertionError("the call was answered")


@dataclass(frozen=True)
class Server:
    """Address, model and features of the server that a client's program calls.

    url:       base URL without /v1
    model:     the served name
    adapter:   the served name of a LoRA adapter, or None
    tokenizer: the checkpoint's directory
    has_drafts: True if it speculates; vLLM then refuses logit_bias and min_p
    """

    url: str
    model: str
    adapter: str | None
    tokenizer: str
    has_drafts: bool = False


class Calls:
    """A program's calls: `@calls.add("name")` registers one, `run` makes all.

    A call checks its answer and summarizes it in a few words; it returns nothing if the server
    lacks the feature.
    """

    def __init__(self) -> None:
        self._calls: dict[str, Callable[[Server], str]] = {}

    def add(self, name: str) -> Callable[[Callable[[Server], str]], Callable[[Server], str]]:
        def register(call: Callable[[Server], str]) -> Callable[[Server], str]:
            self._calls[name] = call
            return call

        return register

    def run(self) -> None:
        """Reads the server from the command line; prints a JSON object per call."""
        server = Server(**json.loads(sys.argv[1]))
        for name, call in self._calls.items():
            answer, error = "", None
            try:
                answer = " ".join(call(server).split())[:LONGEST_ANSWER]
            except Exception:
                error = traceback.format_exc(limit=-2)
            if answer or error:
                print(json.dumps({"call": name, "answer": answer, "error": error}), flush=True)
