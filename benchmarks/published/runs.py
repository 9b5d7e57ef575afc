"""Published steps of DeepSeek-R1 W8A8, as options of dry-runs."""

import argparse
import json
import re
from pathlib import Path
from typing import Any

from published.deepseek_r1 import dry_run
from vllm_davinci.vnpu import timing

PS_PER_SECOND = 10**12
PS_PER_MS = 10**9
REQUESTS = 4
PROMPT_TOKENS = 4096
EXPERT_PARALLEL, NO_ASYNC = "--enable-expert-parallel", "--no-async-scheduling"
PREFILL = (
    *(f"--requests={2 * REQUESTS}", f"--concurrency={REQUESTS}", "--output-tokens=1"),
    *(f"--prompt-tokens={PROMPT_TOKENS}", EXPERT_PARALLEL),
)
# The published command has prompts of 4096 tokens and 1536 output tokens. These prompts have the
# mean length of its contexts, and a few steps follow.
DECODE = (
    *("--requests=24", "--prompt-tokens=4864", "--output-tokens=4"),
    "--max-num-batched-tokens=32768",
)
DECODE_STEP = [1] * 24
# Published requests per second with all-to-alls, without overlap.
SERIAL_ALL_TO_ALL = 0.90
ALL_TO_ALL = {"moe_communication": "all_to_all"}
NEVER = {"min_total_tokens_to_split": 1 << 30}
PUBLISHED = {"overlap": "published"}
SERIAL_ORDER = {**PUBLISHED, "dbo": NEVER}


class Runs:
    """Dry-runs on the modelled machine; each runs once."""

    def __init__(self, args: argparse.Namespace, directory: Path) -> None:
        self.chip, self.topology, self.routing = args.chip, args.topology, args.routing
        self.directory = directory
        self.machine: dict[str, Any] = {}
        self.newest_host: dict[str, Any] = {}  # host time of the newest dry-run
        self._reports: dict[str, dict[str, Any]] = {}

    def report(self, config: dict[str, Any], *options: str) -> dict[str, Any]:
        """Returns the report of a dry-run. config: the plugin's options"""
        key = json.dumps([config, options])
        if key not in self._reports:
            routing = f"--routing={self.routing}"
            found = dry_run(self.chip, self.topology, *options, routing, config=config)
            self._reports[key] = found
            self.newest_host, self.machine = found["host"], found["machine"]
        return self._reports[key]

    def prefill(self, config: dict[str, Any], *options: str) -> dict[str, Any]:
        """Returns the second prefill of 4 x 4096 tokens, which reuses what the first created."""
        return prefill_of(self.report(config, *PREFILL, *options))


def slower_all_to_alls(sent: dict[str, float], serial: dict[str, float]) -> float:
    """Returns the factor on all-to-all times that gives the serial step the published rate.

    sent, serial: the serial step with all-to-alls, and without
    """
    all_to_all_ps = sent["communication_ps"] - serial["communication_ps"]
    missing_ps = REQUESTS * PS_PER_SECOND / SERIAL_ALL_TO_ALL - sent["host_ps"]
    return 1 + missing_ps / all_to_all_ps


def write_slow_topology(file: Path, slower: float) -> None:
    """Writes a copy of the topology named like the file, with slower all-to-alls."""

    def share(match: re.Match[str]) -> str:
        fitted = f"{float(match[2]) / slower:.6f}"
        return f"{match[1]}{fitted}{match[3]}low = {fitted}, high = {fitted},"

    text = (Path(timing.__file__).parent / "topologies" / file.name).read_text("utf-8")
    stated = r"(all_to_all_share = \{ value = )([\d.]+)(.*?)low = [\d.]+, high = [\d.]+,"
    file.write_text(re.sub(stated, share, text), encoding="utf-8")


def prefill_of(report: dict[str, Any]) -> dict[str, Any]:
    """Returns a report's second step, which reuses what the first created."""
    step: dict[str, Any] = report["steps"][1]
    return step


def decode_of(report: dict[str, Any]) -> dict[str, Any]:
    """Returns a report's last step in which all requests decode."""
    last: dict[str, Any] = [step for step in report["steps"] if step["tokens"] == DECODE_STEP][-1]
    return last
