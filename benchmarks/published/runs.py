"""Dry-runs the published steps of DeepSeek-R1 W8A8, each once."""

from __future__ import annotations

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
# Of the published command: prompts of 4096 tokens and 1536 new ones; here their mean, from where a
# few steps are taken.
DECODE = (
    *("--requests=24", "--prompt-tokens=4864", "--output-tokens=6"),
    "--max-num-batched-tokens=8192",
)
DECODE_STEP = [1] * 24
# Requests per second, published, with all-to-alls and without overlap.
SERIAL_ALL_TO_ALL = 0.90
ALL_TO_ALL = {"moe_communication": "all_to_all"}
NEVER = {"min_total_tokens_to_split": 1 << 30}
PUBLISHED = {"overlap": "published"}
SERIAL_ORDER = {**PUBLISHED, "dbo": NEVER}


class Runs:
    """Dry-runs on the modelled machine, each made once."""

    def __init__(self, args: argparse.Namespace, directory: Path) -> None:
        self.chip, self.topology, self.routing = args.chip, args.topology, args.routing
        self.directory = directory
        self.machine: dict[str, Any] = {}
        self.slower: float | None = None  # all-to-alls on the slow topology, fitted
        self.newest_host: dict[str, Any] = {}  # host time of the newest dry-run
        self._reports: dict[str, dict[str, Any]] = {}

    def report(
        self, config: dict[str, Any], *options: str, slow: bool = False, is_plain: bool = False
    ) -> dict[str, Any]:
        """slow: all-to-alls reach less of the links; is_plain: without variants of the machine"""
        topology = str(self._slow_topology()) if slow else self.topology
        key = json.dumps([config, options, topology, is_plain])
        if key not in self._reports:
            routing = f"--routing={self.routing}"
            further = (routing,) if is_plain else (routing, "--sensitivity")
            self._reports[key] = dry_run(self.chip, topology, *options, *further, config=config)
            self.newest_host = self._reports[key]["host"]
            if not slow:
                self.machine = self._reports[key]["machine"]
        return self._reports[key]

    def prefill(
        self, config: dict[str, Any], *options: str, slow: bool = False, is_plain: bool = False
    ) -> dict[str, Any]:
        """The second step of 4 x 4096 tokens, which reuses what the first created."""
        report = self.report(config, *PREFILL, *options, slow=slow, is_plain=is_plain)
        return prefill_of(report)

    def decode(self, config: dict[str, Any], *options: str) -> dict[str, Any]:
        """A decode step of 24 requests with graphs."""
        return decode_of(self.report(config, *DECODE, *options))

    def _slow_topology(self) -> Path:
        """A machine on which the serial step with all-to-alls has the published rate."""
        file = self.directory / f"{self.topology}.toml"
        if self.slower is None:
            sent = self.prefill({**SERIAL_ORDER, **ALL_TO_ALL})["modelled"]
            all_to_all_ps = (
                sent["communication_ps"]
                - self.prefill(SERIAL_ORDER)["modelled"]["communication_ps"]
            )
            missing_ps = REQUESTS * PS_PER_SECOND / SERIAL_ALL_TO_ALL - sent["host_ps"]
            slower = self.slower = 1 + missing_ps / all_to_all_ps

            def share(match: re.Match[str]) -> str:
                fitted = f"{float(match[2]) / slower:.6f}"
                return f"{match[1]}{fitted}{match[3]}low = {fitted}, high = {fitted},"

            text = (Path(timing.__file__).parent / "topologies" / file.name).read_text("utf-8")
            stated = r"(all_to_all_share = \{ value = )([\d.]+)(.*?)low = [\d.]+, high = [\d.]+,"
            slow = re.sub(stated, share, text)
            file.write_text(slow, encoding="utf-8")
        return file


def prefill_of(report: dict[str, Any]) -> dict[str, Any]:
    """The second step of a report, which reuses what the first created."""
    step: dict[str, Any] = report["steps"][1]
    return step


def decode_of(report: dict[str, Any]) -> dict[str, Any]:
    """The last step of a report in which all requests decode."""
    last: dict[str, Any] = [step for step in report["steps"] if step["tokens"] == DECODE_STEP][-1]
    return last
