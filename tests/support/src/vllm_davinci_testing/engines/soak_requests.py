"""A soak's requests: prompts with shared prefixes, adapters, images, aborts, invalid requests."""

import base64
import io
import json
import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import httpx

from vllm_davinci_testing.engines import pictures

LIMIT_S = 120.0
# The server closes connections that are idle for 5 s, and a request sent at that moment gets no
# answer.
REUSE = httpx.Limits(keepalive_expiry=2.0)
NUM_TEXTS, NUM_IMAGES = 48, 6
ADAPTERS = ("base", "adapter1", "adapter2")
# Body and path of requests that are refused with a status of 400 to 499.
NONSENSE: tuple[tuple[bytes, str], ...] = (
    (b"{", "/v1/completions"),
    (b"\xff\xfe\x00", "/v1/completions"),
    (b"[]", "/v1/completions"),
    (b'{"model": "base"}', "/v1/completions"),
    (b'{"model": "nobody", "prompt": [1]}', "/v1/completions"),
    (b'{"model": "base", "prompt": [1], "max_tokens": -1}', "/v1/completions"),
    (b'{"model": "base", "prompt": [1], "max_tokens": 1e12}', "/v1/completions"),
    (b'{"model": "base", "prompt": [1], "temperature": "NaN"}', "/v1/completions"),
    (b'{"model": "base", "prompt": [1], "temperature": -3}', "/v1/completions"),
    (b'{"model": "base", "prompt": [1], "n": 100000}', "/v1/completions"),
    (b'{"model": "base", "prompt": [1], "top_p": 7}', "/v1/completions"),
    (b'{"model": "base", "prompt": [1], "logprobs": 100000}', "/v1/completions"),
    (b'{"model": "base", "prompt": [99999999]}', "/v1/completions"),
    (b'{"model": "base", "prompt": [-5]}', "/v1/completions"),
    (b'{"model": "base", "prompt": [' + b"1," * 5000 + b"1]}", "/v1/completions"),
    (b'{"model": "base", "prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}", "/v1/completions"),
    (b'{"model": "base", "messages": 7}', "/v1/chat/completions"),
    (b"{}", "/v1/nothing"),
)


@dataclass
class Tally:
    """Counts of outcomes, and the right answers. Thread-safe."""

    answers: dict[str, list[int]] = field(default_factory=dict)
    finished: int = 0
    aborted: int = 0
    refused: int = 0
    wrong: list[str] = field(default_factory=list)

    @property
    def requests(self) -> int:
        return self.finished + self.aborted + self.refused + len(self.wrong)

    def note_wrong(self, what: str) -> None:
        """Prints a problem immediately, because a run may take an hour."""
        print(f"wrong: {what}", flush=True)
        self.wrong.append(what)


class Clients:
    """Sends random requests. text, images: addresses of the servers; "" if absent"""

    def __init__(self, text: str, images: str, seed: int) -> None:
        self.tally = Tally()
        self._text, self._images = text, images
        draw = random.Random(seed)
        shared = [[draw.randrange(256) for _ in range(130)] for _ in range(4)]
        self._prompts = [
            (draw.choice(shared) if number % 2 else [])
            + [draw.randrange(256) for _ in range(draw.choice((1, 5, 40, 90)))]
            for number in range(NUM_TEXTS)
        ]

    def learn(self) -> None:
        """Gets the right answers, one request at a time."""
        with httpx.Client(timeout=LIMIT_S) as client:
            for name in range(NUM_TEXTS):
                self._of_text(client, name)
            for name in range(NUM_IMAGES if self._images else 0):
                self._of_image(client, name)
        self.tally.finished = 0

    def send(self, seed: int, goes_on: Callable[[], bool]) -> None:
        """Runs one client until the end of the soak."""
        draw = random.Random(seed)
        with httpx.Client(timeout=LIMIT_S, limits=REUSE) as client:
            while goes_on():
                chance = draw.random()
                try:
                    if chance < 0.1:
                        self._abort(client, draw)
                    elif chance < 0.2:
                        self._nonsense(client, *draw.choice(NONSENSE))
                    elif chance < 0.3 and self._images:
                        self._of_image(client, draw.randrange(NUM_IMAGES))
                    else:
                        self._of_text(client, draw.randrange(NUM_TEXTS))
                except httpx.HTTPError as error:
                    self.tally.note_wrong(f"{type(error).__name__}: {error}")

    def _of_text(self, client: httpx.Client, number: int) -> None:
        body = {
            "model": ADAPTERS[number % len(ADAPTERS)],
            "prompt": self._prompts[number],
            "max_tokens": (1, 4, 16, 48)[number % 4],
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        answer = client.post(f"{self._text}/v1/completions", json=body)
        self._compare(f"text {number}", answer)

    def _of_image(self, client: httpx.Client, number: int) -> None:
        file = io.BytesIO()
        pictures.image(56 + 28 * (number % 3), 56, seed=number).save(file, "png")
        url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
        content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "it"}]
        body = {
            "model": "base",
            "messages": [{"role": "user", "content": content}],
            "max_tokens": 8,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        answer = client.post(f"{self._images}/v1/chat/completions", json=body)
        self._compare(f"image {number}", answer)

    def _compare(self, name: str, answer: httpx.Response) -> None:
        if answer.status_code != 200:
            self.tally.note_wrong(f"{name}: {answer.status_code} {answer.text[:300]}")
            return
        tokens = answer.json()["choices"][0]["token_ids"]
        right = self.tally.answers.setdefault(name, tokens)
        if tokens == right:
            self.tally.finished += 1
        else:
            self.tally.note_wrong(f"{name}: {tokens}, and alone {right}")

    def _abort(self, client: httpx.Client, draw: random.Random) -> None:
        """Disconnects in the middle of an answer."""
        body = {"model": draw.choice(ADAPTERS), "prompt": draw.choice(self._prompts)}
        body |= {"max_tokens": 60, "ignore_eos": True, "stream": True}
        lines = draw.randrange(20)
        url = f"{self._text}/v1/completions"
        with client.stream("POST", url, content=json.dumps(body)) as answer:
            events: Any = answer.iter_lines()
            for _ in range(lines):
                with suppress(StopIteration):
                    next(events)
        self.tally.aborted += 1

    def _nonsense(self, client: httpx.Client, body: bytes, path: str) -> None:
        kind = {"content-type": "application/json"}
        answer = client.post(f"{self._text}{path}", content=body, headers=kind)
        if 400 <= answer.status_code < 500:
            self.tally.refused += 1
        else:
            self.tally.note_wrong(f"{body[:80]!r}: {answer.status_code} {answer.text[:200]}")
