"""Runs a program and lists what a chip's compiler refuses in its Triton kernels."""

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from vllm_davinci.vnpu import environment_variables as env
from vllm_davinci.vnpu.supervised_command import run_to_end

# Triton-Ascend's own first stage, a program of its wheel that needs no chip.
ADAPTER = "triton-adapter-opt"
STAGES = (
    *("--triton-to-annotation", "--triton-to-unstructure", "--triton-to-hivm"),
    *("--triton-to-hfusion", "--triton-to-llvm", "--bubble-up-operation"),
    "--triton-to-linalg=global-kernel=false named-ops=True",
)
ADAPTER_LIMIT_S = 60.0


def check(command: list[str], adapter: Path | None) -> int:
    """Runs the command on virtual NPUs; prints each limit that its kernels exceed.

    adapter: Triton-Ascend's checker; None: the one on the path, if any
    Returns the command's status if it fails, 1 if a chip's compiler refuses a kernel, else 0.
    """
    known = str(adapter) if adapter else shutil.which(ADAPTER)
    with tempfile.TemporaryDirectory(prefix="vnpu-triton-check-") as name:
        directory = Path(name)
        variables = {
            env.VNPU_TRITON: "1",
            env.VNPU_TRITON_LIMITS: f"record:{directory}",
            "TRITON_ALWAYS_COMPILE": "1",  # a kernel from Triton's cache would not be checked
        }
        status = run_to_end(command, variables)
        kernels = sorted(directory.glob("*.ttir"))
        found = _findings(directory / "findings.jsonl")
        if known:
            found += [answer for kernel in kernels if (answer := _ask(known, kernel))]
    for each in found:
        print(f"{each['kernel']}  {each['place']}\n    {each['what']}", file=sys.stderr)
    refused = {each["kernel"] for each in found if each["is_sure"]}
    may_not = {each["kernel"] for each in found} - refused
    asked = f"{ADAPTER} was asked" if known else f"{ADAPTER} of Triton-Ascend was not found"
    print(
        f"vnpu: {len(kernels)} Triton kernels checked: a chip's compiler refuses {len(refused)}, "
        f"and {len(may_not)} may not fit; {asked}.",
        file=sys.stderr,
    )
    return status or int(bool(refused))


def _findings(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    lines = dict.fromkeys(path.read_text(encoding="utf-8").splitlines())
    return [json.loads(line) for line in lines]


def _ask(adapter: str, kernel: Path) -> dict[str, Any] | None:
    """The checker's first error about a kernel; None if it lowers the kernel."""
    try:
        ended = subprocess.run(
            [adapter, *STAGES, str(kernel), "-o", "/dev/null"],
            capture_output=True,
            text=True,
            timeout=ADAPTER_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        what = f"did not end in {ADAPTER_LIMIT_S:g} s"
    else:
        if ended.returncode == 0:
            return None
        errors = [line for line in ended.stderr.splitlines() if " error: " in line]
        what = errors[0] if errors else f"ended with status {ended.returncode}"
    name = kernel.name.split(".")[0]
    return {"kernel": name, "place": ADAPTER, "what": what, "is_sure": True}
