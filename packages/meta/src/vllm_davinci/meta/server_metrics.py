"""Overlap decisions that a running server has counted."""

from __future__ import annotations

import re
import urllib.error
import urllib.request

from vllm_davinci.meta.errors import ServerError

LIMIT_S = 10
_COUNT = re.compile(r"^davinci:overlap_decisions_total\{([^}]*)\} (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')


def decision_counts(url: str) -> dict[tuple[str, str], int]:
    """DP rank and reason -> steps. url: the server's address, with or without /metrics.

    Raises ServerError when nothing answers, or what answers counts no overlap decisions.
    """
    address = url.rstrip("/").removesuffix("/metrics") + "/metrics"
    try:
        with urllib.request.urlopen(address, timeout=LIMIT_S) as answer:
            text = answer.read().decode("utf-8", "replace")
    except (urllib.error.URLError, OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise ServerError(
            f"{address} gives no metrics: {reason}. Name the address of a running `vllm serve`, "
            "such as http://localhost:8000."
        ) from error
    counts: dict[tuple[str, str], int] = {}
    for labels, value in _COUNT.findall(text):
        label = dict(_LABEL.findall(labels))
        key = (label.get("engine", "0"), label.get("reason", ""))
        counts[key] = counts.get(key, 0) + int(float(value))
    if counts:
        return counts
    if "vllm:" not in text:
        raise ServerError(f"{address} answers, and is no vLLM server. Name another address.")
    raise ServerError(
        f"{address} counts no overlap decisions: overlap is off there, or the server has run no "
        "step yet. Start it with --enable-dbo, or --additional-config "
        '\'{"dbo": {"enabled": true}}\', and send it a request.'
    )
