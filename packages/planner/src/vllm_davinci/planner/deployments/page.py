"""Writes the page about deployments: each dry-run's results, or why it did not start."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from vllm_davinci.planner.deployments.run import Outcome
from vllm_davinci.planner.deployments.table import Deployment

_GIB = 2**30
_HEAD = """# Deployments

{stamp}Dry-runs of how released models are deployed on Ascend NPUs, as others published it: {rows}
rows of {models} models; {started} start and serve their requests, {refused} do not. Every time is
modelled: nothing here was measured on an NPU. `vllm-davinci deployments` lists the rows with their
sources, `vllm-davinci dry-run --deployment NAME` runs one. `nox -s deployments` runs all, every
night, writes such a page, and fails if a row starts, or does not start, contrary to the table.

Memory is one device's planned use, of its total. Each row runs its largest steps (prompts, decodes
with a prompt, decodes) with the planned cache. The memory of a step is its peak without weights and
cache: in vLLM's profile run (a whole step without attention) / whole / in ubatches. {split} rows
split steps, and {larger} of these need more for split steps than the profile run measures, so that
their cache is smaller. Tokens of the cache are those of one data-parallel rank. "First token" is
the time until each of a rank's requests has its first token, "token" the time of a decode step; in
brackets, both with perfect overlap.
"""
_STARTED = """
## Started

| deployment | for | chips | memory, GiB | step, GiB | cache, tokens | prompts | first token, ms | \
token, ms |
| --- | --- | --- | --- | --- | --- | --- | --- | --- |
"""
_REFUSED = """
## Did not start

| deployment | for | chip | reason |
| --- | --- | --- | --- |
"""


def page_of(rows: Mapping[str, Deployment], outcomes: Sequence[Outcome], stamp: str = "") -> str:
    """The page in Markdown. stamp: a line with date and versions of the figures"""
    started = [outcome for outcome in outcomes if outcome.reason is None]
    refused = [outcome for outcome in outcomes if outcome.reason is not None]
    models = {rows[outcome.name].checkpoint.config for outcome in outcomes}
    head = _HEAD.format(
        stamp=f"{stamp}\n\n" if stamp else "",
        rows=len(outcomes),
        models=len(models),
        started=len(started),
        refused=len(refused),
        split=sum(outcome.split_bytes > 0 for outcome in started),
        larger=sum(outcome.split_bytes > outcome.profiled_bytes for outcome in started),
    )
    return "".join(
        [
            head,
            _STARTED if started else "",
            *_lines(_started(rows[outcome.name], outcome) for outcome in started),
            _REFUSED if refused else "",
            *_lines(_refused(rows[outcome.name], outcome) for outcome in refused),
        ]
    )


def _lines(rows: Iterator[tuple[str, ...]]) -> Iterator[str]:
    for cells in rows:
        yield f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |\n"


def _started(row: Deployment, outcome: Outcome) -> tuple[str, ...]:
    used, total = outcome.used_bytes / _GIB, outcome.memory_bytes / _GIB
    steps = (outcome.profiled_bytes, outcome.whole_bytes, outcome.split_bytes)
    token = f"{outcome.token_ms:,.1f} ({outcome.token_bound_ms:,.1f})" if outcome.token_ms else ""
    return (
        row.name,
        row.role,
        f"{outcome.ranks} x {row.chip}",
        f"{used:.1f} of {total:.0f}",
        " / ".join(f"{size / _GIB:.1f}" for size in steps if size),
        f"{outcome.cache_tokens:,}",
        f"{row.requests} x {row.prompt_tokens}",
        f"{outcome.first_token_ms:,.1f} ({outcome.first_token_bound_ms:,.1f})",
        token,
    )


def _refused(row: Deployment, outcome: Outcome) -> tuple[str, ...]:
    return (row.name, row.role, row.chip, outcome.reason or "")
