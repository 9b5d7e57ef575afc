"""Reads overlap decisions and accepted drafts from a running server's metrics."""

import re
import urllib.error
import urllib.request
from typing import NamedTuple

from vllm_davinci.meta.errors import ServerError

LIMIT_S = 10
_COUNT = re.compile(r"^davinci:overlap_decisions_total\{([^}]*)\} (\S+)$", re.MULTILINE)
_DRAFTS = re.compile(r"^vllm:spec_decode_num_(\w+)_total\{([^}]*)\} (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')


class Acceptance(NamedTuple):
    """Counts of drafts, over all DP ranks.

    steps:       number of pairs of request and step with drafts
    by_position: steps whose first draft was accepted, steps whose second draft was, ...
    """

    steps: int
    drafted: int
    accepted: int
    by_position: tuple[int, ...]


def metrics_text(url: str) -> str:
    """The server's metrics as text. url: its address, with or without /metrics.

    Raises ServerError if nothing answers, or if the answer is not vLLM's.
    """
    address = url.rstrip("/").removesuffix("/metrics") + "/metrics"
    try:
        with urllib.request.urlopen(address, timeout=LIMIT_S) as answer:
            text: str = answer.read().decode("utf-8", "replace")
    except (urllib.error.URLError, OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise ServerError(
            f"{address} gives no metrics: {reason}. Name the address of a running `vllm serve`, "
            "such as http://localhost:8000."
        ) from error
    if "vllm:" not in text:
        raise ServerError(f"{address} answers, and is not a vLLM server. Name another address.")
    return text


def decision_counts(text: str) -> dict[tuple[str, str], int]:
    """Steps by DP rank and reason; empty if overlap is off or no step has run yet."""
    counts: dict[tuple[str, str], int] = {}
    for labels, value in _COUNT.findall(text):
        label = dict(_LABEL.findall(labels))
        key = (label.get("engine", "0"), label.get("reason", ""))
        counts[key] = counts.get(key, 0) + int(float(value))
    return counts


def acceptance(text: str) -> Acceptance | None:
    """Accepted drafts; None if the server does not speculate or has not drafted yet."""
    totals: dict[str, int] = {}
    positions: dict[int, int] = {}
    for name, labels, value in _DRAFTS.findall(text):
        count = int(float(value))
        totals[name] = totals.get(name, 0) + count
        if name == "accepted_tokens_per_pos":
            place = int(dict(_LABEL.findall(labels)).get("position", 0))
            positions[place] = positions.get(place, 0) + count
    if not totals.get("drafts"):
        return None
    return Acceptance(
        totals["drafts"],
        totals.get("draft_tokens", 0),
        totals.get("accepted_tokens", 0),
        tuple(positions[place] for place in sorted(positions)),
    )
