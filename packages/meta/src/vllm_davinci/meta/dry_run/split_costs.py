"""Measures an engine's steps whole and split into ubatches, for the option `dbo.costs`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from vllm_davinci.meta.dry_run.process import report_of

# Tokens of the steps that are compared where the command names none.
SIZES = (128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_NEVER = 1 << 30


def measure(
    options: argparse.Namespace, engine_arguments: list[str], sizes: Sequence[int]
) -> dict[str, Any]:
    """Content of the file of `dbo.costs`, in modelled picoseconds. Raises DryRunError.

    Two dry-runs, each with a prompt of each size by itself; the second one splits them all.
    """
    work = [f"--requests={len(sizes)}", "--concurrency=1", "--output-tokens=1"]
    work.append(f"--prompt-tokens={','.join(map(str, sizes))}")
    whole, split = (
        report_of(options, work, _with_thresholds(engine_arguments, least), "--prompt-tokens")
        for least in (_NEVER, 0)
    )
    return {
        "modelled": True,
        "machine": whole["machine"]["title"],
        "figures": whole["machine"]["hash"],
        "model": whole["model"],
        "world_size": whole["world_size"],
        "engine": whole["engine"],
        "steps": [
            {"tokens": tokens, "whole": _duration(a), "split": _duration(b)}
            for tokens, a, b in zip(sizes, whole["steps"], split["steps"], strict=True)
        ],
    }


def _duration(step: dict[str, Any]) -> int:
    return int(step["modelled"]["host_ps"])


def _with_thresholds(engine_arguments: list[str], least: int) -> list[str]:
    """The options with overlap on, for steps of at least so many tokens."""
    parser = argparse.ArgumentParser(prog="vllm-davinci dry-run", allow_abbrev=False)
    parser.add_argument("--additional-config", type=json.loads, default={})
    known, others = parser.parse_known_args(engine_arguments)
    config = known.additional_config
    dbo = {
        "split": "token",
        **config.get("dbo", {}),
        "enabled": True,
        "min_total_tokens_to_split": least,
        "min_prefill_tokens_to_split": 0,
    }
    dbo.pop("costs", None)
    return [*others, f"--additional-config={json.dumps({**config, 'dbo': dbo})}"]
