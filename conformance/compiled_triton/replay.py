"""Repeats recorded launches of Triton kernels where Triton compiles, and compares the memory.

`python replay.py DIR [--json FILE]` needs a GPU, torch and triton, but nothing of this project.
`record.py` wrote DIR on a virtual NPU. Each kernel runs in a process of its own. The table says how
many launches of each kernel left the same bits, and by how much the others differ. Without a GPU,
Triton's interpreter runs the kernels.
"""

import argparse
import importlib
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

LIMIT_S = 240.0
FLOATS = ("float16", "bfloat16", "float32", "float64")


def of_kernel(directory: Path, source: str) -> list[dict[str, Any]]:
    """Repeats the launches of one recorded module; returns a result for each."""
    import torch

    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"
    sys.path.insert(0, str(directory))
    module = importlib.import_module(source)
    results = []
    for path in sorted(directory.glob(f"{source}-*.pt"), key=lambda p: int(p.stem.split("-")[-1])):
        record = torch.load(path, weights_only=False)
        result = {"kernel": record["kernel"], "launch": path.stem}
        try:
            result |= repeat(record, module, torch)
        except Exception as error:
            result["error"] = f"{type(error).__name__}: {error}"[:300]
        results.append(result)
    return results


def repeat(record: dict[str, Any], module: Any, torch: Any) -> dict[str, Any]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    memory = [storage.to(device, copy=True) for storage in record["before"]]
    typed: dict[int, Any] = {}

    def value(described: tuple[Any, ...]) -> Any:
        kind, *rest = described
        if kind == "tuple":
            return tuple(map(value, rest[0]))
        if kind == "function":
            return getattr(module, rest[0])
        if kind == "value":
            return eval(rest[0], {"tl": importlib.import_module("triton.language")})
        place, dtype, offset, shape, stride = rest
        typed.setdefault(place, dtype)
        view = torch.empty(0, dtype=dtype, device=device)
        return view.set_(memory[place].untyped_storage(), offset, shape, stride)

    arguments = list(map(value, record["arguments"]))
    getattr(module, record["function"])[record["grid"]](*arguments, **record["options"])
    equal, worst_ulp, worst = True, 0, 0.0
    for place, expected in enumerate(record["after"]):
        found = memory[place].cpu()  # waits until the kernel has ended
        if torch.equal(found, expected):
            continue
        equal = False
        dtype = typed[place]
        if str(dtype).removeprefix("torch.") not in FLOATS:
            count = int((found.view(dtype) != expected.view(dtype)).sum())
            return {"equal": False, "integers": count}
        ulp, difference = distance(found.view(dtype), expected.view(dtype), torch)
        worst_ulp, worst = max(worst_ulp, ulp), max(worst, difference)
    return {"equal": equal, "ulp": worst_ulp, "difference": worst}


def distance(found: Any, expected: Any, torch: Any) -> tuple[int, float]:
    """Returns the largest distance of two tensors, in units in the last place and relative to the
    largest element.
    """
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[found.element_size()]
    differ = found.view(bits) != expected.view(bits)
    differ &= ~(found.isnan() & expected.isnan())
    if not differ.any():
        return 0, 0.0
    one, other = found[differ], expected[differ]

    def order(values: Any) -> Any:
        whole = values.view(bits).to(torch.int64)
        return torch.where(whole < 0, -(whole & torch.iinfo(bits).max), whole)

    ulp = int((order(one) - order(other)).abs().max())
    finite = expected[expected.isfinite()].double().abs()
    scale = float(finite.max()) if finite.numel() else 1.0
    return ulp, float((one.double() - other.double()).abs().max()) / max(scale, 1e-30)


def in_process(directory: Path, source: str) -> list[dict[str, Any]]:
    command = [sys.executable, __file__, str(directory), "--kernel", source]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return [{"kernel": source, "launch": source, "error": f"no result within {LIMIT_S:.0f} s"}]
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return [{"kernel": source, "launch": source, "error": last[:300]}]
    results: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return results


def summary(results: list[dict[str, Any]]) -> list[str]:
    lines = [f"{'kernel':70}  launches  same bits  worst"]
    for kernel in sorted({result["kernel"] for result in results}):
        its = [result for result in results if result["kernel"] == kernel]
        worst = "".join(
            f"{result['launch']}: {result['error']}" for result in its if "error" in result
        )[:200]
        if not worst and (integers := sum(result.get("integers", 0) for result in its)):
            worst = f"{integers} integers differ"
        if not worst and any(not result["equal"] for result in its):
            ulp = max(result["ulp"] for result in its)
            worst = f"{ulp} ulp, {max(result['difference'] for result in its):.1e} of the largest"
        same = sum(result.get("equal", False) for result in its)
        lines.append(f"{kernel[-70:]:70}  {len(its):8}  {same:9}  {worst}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--kernel", help=argparse.SUPPRESS)  # set in child processes
    parser.add_argument("--json", type=Path, help="file for versions and results")
    parser.add_argument("--processes", type=int, default=8)
    options = parser.parse_args()
    if options.kernel:
        print(json.dumps(of_kernel(options.directory, options.kernel)))
        return
    sources = sorted(path.stem for path in options.directory.glob("*.py"))
    with ThreadPoolExecutor(options.processes) as pool:
        found = pool.map(lambda name: in_process(options.directory, name), sources)
        results = [result for of_kernel in found for result in of_kernel]
    import torch
    import triton

    versions = {"torch": torch.__version__, "triton": triton.__version__}
    has_gpu = torch.cuda.is_available()
    versions["device"] = torch.cuda.get_device_name() if has_gpu else "Triton's interpreter"
    print(versions, *summary(results), sep="\n")
    if options.json:
        text = json.dumps({"versions": versions, "results": results}, indent=1)
        options.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
