"""Provider of step-time tables, which vllm-davinci-core finds through an entry point.

Step times are modelled, on a machine with a chip too, by vllm-davinci-vnpu's timing model. A table
is found by its engine, and used only if the installed timing model made it.
"""

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm_davinci.meta.supported_versions import installed_version
from vllm_davinci.planner.time_limit import time_limit

SHIPPED = Path(__file__).parent / "shipped"
"""Tables for the published deployments; `nox -s step_costs` writes them."""
STEPS = 500
"""Maximum number of modelled steps per table, over sizes, schedules and dispatch methods."""
# Topologies by the chip's generation; the first that is large enough is used.
_TOPOLOGIES = {
    "A2": ("node-of-8", "two-meshes-of-8", "nodes-of-8", "nodes-of-16"),
    "A3": ("supernode", "two-supernodes"),
}


class StepCostsFiles:
    """Finds and makes step-time tables."""

    api_version = 1

    def find(self, engine: Mapping[str, Any]) -> Path | None:
        """The engine's table from the installed timing model; None if there is none.

        A table made on this host takes precedence over a shipped one.
        """
        for folder in (cache_folder(), SHIPPED):
            file = folder / file_name(engine)
            if file.is_file() and is_current(file):
                return file
        return None

    def make(
        self, engine: Mapping[str, Any], model: str, options: Sequence[str]
    ) -> tuple[Path | None, str]:
        """Models the engine's steps in a process of its own, and caches the table."""
        if installed_version("vllm-davinci-vnpu") is None:
            return None, "vllm-davinci-vnpu, whose timing model makes one, is not installed"
        place = _place(str(engine["chip"]), _ranks(engine))
        if place is None:
            return None, f"no machine of the timing model has {_ranks(engine)} {engine['chip']}"
        chip, topology = place
        file = cache_folder() / file_name(engine)
        file.parent.mkdir(parents=True, exist_ok=True)
        unfinished = file.with_suffix(f".{os.getpid()}")
        asked = [f"--model={model}", f"--chip={chip}", f"--topology={topology}", *options]
        said = model_steps(asked, unfinished, time_limit(STEPS))
        if said is not None:
            last = said.strip().splitlines()[-1:] or ["no message"]
            return None, f"modelling the steps failed: {last[0]}"
        unfinished.replace(file)
        return file, f"modelled just now, as {chip} in {topology}"


def model_steps(options: Sequence[str], file: Path, limit_s: float) -> str | None:
    """Writes the file in a process of its own. Returns its stderr on failure, else None.

    options: of `vllm-davinci dry-run`
    """
    command = [*(sys.executable, "-m", "vllm_davinci.meta", "dry-run"), f"--step-costs={file}"]
    try:
        done = subprocess.run(
            [*command, *options], capture_output=True, text=True, timeout=limit_s, check=False
        )
    except subprocess.TimeoutExpired:
        return f"it took more than {limit_s:.0f} s"
    return None if done.returncode == 0 else done.stderr


def file_name(engine: Mapping[str, Any]) -> str:
    """File name of an engine's table."""
    digest = hashlib.sha256(json.dumps(dict(engine), sort_keys=True).encode()).hexdigest()
    readable = re.sub(r"[^a-z0-9]+", "-", str(engine.get("architecture", "")).lower()).strip("-")
    return f"{readable}-{digest[:16]}.json"


def cache_folder() -> Path:
    """Folder of the tables made on this host."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "vllm-davinci" / "step_costs"


def is_current(file: Path) -> bool:
    """True if the installed timing model made the file, or if none is installed."""
    if installed_version("vllm-davinci-vnpu") is None:
        return True
    from vllm_davinci.vnpu.timing import load_machine

    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        machine = load_machine(content["chip"], content["topology"])
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return bool(content.get("figures") == machine.hash)


def _ranks(engine: Mapping[str, Any]) -> int:
    return int(engine["tensor_parallel_size"]) * int(engine["data_parallel_size"])


def _place(soc: str, ranks: int) -> tuple[str, str] | None:
    """The timing model's chip of this name, and the smallest topology with that many ranks."""
    from vllm_davinci.vnpu import VirtualDeviceError
    from vllm_davinci.vnpu.timing import chip_names, load_machine
    from vllm_davinci.vnpu.timing.chip_files import FOLDER, read_chip

    for chip in chip_names():
        described = read_chip(FOLDER / f"{chip}.toml")
        if described["soc"] != soc and not soc.startswith(described.get("soc_prefix", "\0")):
            continue
        for topology in _TOPOLOGIES.get(described.get("generation", ""), ()):
            try:
                load_machine(chip, topology).require_ranks(ranks)
            except VirtualDeviceError:
                continue
            return chip, topology
    return None
