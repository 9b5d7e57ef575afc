"""When do drafts pay? Compares steps with and without them, by the number of requests.

A step's time does not depend on which drafts are accepted, so one run that accepts all serves every
acceptance rate.
"""

import argparse
import json
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from vllm_davinci.planner.dry_run.process import report_of
from vllm_davinci.planner.errors import DryRunError

# Minimum number of modelled steps per number of requests; their median counts.
_STEPS = 3


class BySize(NamedTuple):
    """Modelled step times of `requests` requests, in picoseconds, without and with drafts."""

    requests: int
    plain_ps: int
    drafted_ps: int

    def gain(self, tokens: float) -> float:
        """Throughput with drafts over throughput without, at `tokens` accepted tokens per step."""
        return tokens * self.plain_ps / self.drafted_ps

    @property
    def break_even(self) -> float:
        """Tokens per request and step above which drafts pay."""
        return self.drafted_ps / self.plain_ps


def check_acceptance(rates: Sequence[float], num_drafts: int) -> str | None:
    """Says what is wrong with the acceptance rates by position, or None."""
    if len(rates) != num_drafts:
        return (
            f"--acceptance has {len(rates)} rates, and --speculative-config has {num_drafts} "
            "drafts (num_speculative_tokens): state one for each"
        )
    if not all(0 <= rate <= 1 for rate in rates) or list(rates) != sorted(rates, reverse=True):
        return (
            f"--acceptance {','.join(map(str, rates))}: expected rates from 0 to 1, none above "
            "the one before it, as vLLM logs them"
        )
    return None


def measure(options: argparse.Namespace, engine_arguments: list[str]) -> dict[str, Any]:
    """The report of --acceptance. Raises DryRunError for contradicting options."""
    plain, speculation = _without_drafts(engine_arguments)
    num_drafts = speculation["num_speculative_tokens"]
    if (problem := check_acceptance(options.acceptance, num_drafts)) is not None:
        raise DryRunError(f"{problem}.")
    sizes = _sizes(options.requests)
    reports = [
        report_of(options, *_work(options, sizes, rows, asked), "--requests")
        for rows, asked in ((1, plain), (1 + num_drafts, engine_arguments))
    ]
    times = [
        _medians(report, rows) for report, rows in zip(reports, (1, 1 + num_drafts), strict=True)
    ]
    found = [BySize(size, *(of[size] for of in times)) for size in sizes]
    tokens = 1 + sum(options.acceptance)
    return {
        "modelled": True,
        "machine": reports[0]["machine"]["title"],
        "figures": reports[0]["machine"]["hash"],
        "model": options.model,
        "world_size": reports[0]["world_size"],
        "speculative_config": speculation,
        "acceptance": list(options.acceptance),
        "tokens_per_step": tokens,
        "steps": [
            {**size._asdict(), "gain": size.gain(tokens), "break_even": size.break_even}
            for size in found
        ],
    }


def told(report: dict[str, Any]) -> str:
    """The report as text."""
    tokens = report["tokens_per_step"]
    lines = [
        f"{report['model']} as rank 0 of {report['world_size']} on {report['machine']}.",
        "All times are modelled; nothing here was measured on an NPU.",
        f"A step gives each request {tokens:.2f} tokens at these rates: no gain is above that.",
        "requests  without, ms  with, ms   gain  pays from tokens a step",
    ]
    for step in report["steps"]:
        lines.append(
            f"{step['requests']:8}  {step['plain_ps'] / 10**9:11.3f}  "
            f"{step['drafted_ps'] / 10**9:8.3f}  {step['gain']:5.2f}  {step['break_even']:.2f}"
        )
    paying = [step["requests"] for step in report["steps"] if step["gain"] > 1]
    lost = [step["requests"] for step in report["steps"] if step["gain"] <= 1]
    if not paying:
        lines.append("Drafts pay for none of these.")
    elif lost:
        lines.append(f"Drafts pay for {_listed(paying)} requests, not for {_listed(lost)}.")
    else:
        lines.append("Drafts pay for all of these.")
    return "\n".join(lines)


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def _without_drafts(engine_arguments: list[str]) -> tuple[list[str], dict[str, Any]]:
    """Splits the options into those without --speculative-config, and its value."""
    parser = argparse.ArgumentParser(prog="vllm-davinci dry-run", allow_abbrev=False)
    parser.add_argument("--speculative-config", "-sc", type=json.loads)
    try:
        known, others = parser.parse_known_args(engine_arguments)
        num_drafts = known.speculative_config["num_speculative_tokens"]
    except (TypeError, KeyError, argparse.ArgumentError) as error:
        raise DryRunError(
            "--acceptance needs a drafter: add --speculative-config as JSON, with "
            "num_speculative_tokens."
        ) from error
    if not isinstance(num_drafts, int) or num_drafts < 1:
        raise DryRunError(f"num_speculative_tokens {num_drafts!r}: expected at least 1.")
    return others, known.speculative_config


def _sizes(most: int) -> list[int]:
    """Numbers of requests to model: powers of two, and the maximum."""
    return sorted({most, *(1 << power for power in range(most.bit_length()) if 1 << power <= most)})


def _work(
    options: argparse.Namespace, sizes: Sequence[int], rows: int, engine_arguments: list[str]
) -> tuple[list[str], int, list[str]]:
    """Returns options of requests that end in groups, so that each of the sizes decodes at some
    time, their number of steps, and engine options.

    If prompts take several steps, outputs are longer by as many, so that all requests decode
    together for some steps.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--max-num-batched-tokens", type=int)
    parser.add_argument("--max-model-len")
    given, _ = parser.parse_known_args(engine_arguments)
    prompts = [options.prompt_tokens[n % len(options.prompt_tokens)] for n in range(max(sizes))]
    prefills = -(-sum(prompts) // (given.max_num_batched_tokens or sum(prompts)))
    gap = prefills + _STEPS + 1
    outputs = [
        1 + rows * (prefills + gap * sum(size > number for size in sizes))
        for number in range(max(sizes))
    ]
    work = [
        f"--requests={max(sizes)}",
        f"--prompt-tokens={','.join(map(str, prompts))}",
        f"--output-tokens={','.join(map(str, outputs))}",
    ]
    if given.max_model_len is None:  # with room for drafts after the last token
        longest = max(sum(pair) for pair in zip(prompts, outputs, strict=True))
        engine_arguments = [*engine_arguments, f"--max-model-len={longest + 2 * rows}"]
    return work, prefills + max(outputs), engine_arguments


def _medians(report: dict[str, Any], rows: int) -> dict[int, int]:
    """Median step time by number of requests, of steps with `rows` rows per request."""
    times: dict[int, list[int]] = {}
    for step in report["steps"]:
        if set(step["tokens"]) == {rows}:
            times.setdefault(len(step["tokens"]), []).append(step["modelled"]["host_ps"])
    return {size: round(statistics.median(each)) for size, each in times.items()}
