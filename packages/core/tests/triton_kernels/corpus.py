"""Lowers every Triton kernel of the installed vLLM for virtual NPUs, with guessed signatures.

`python corpus.py FILE`, without a device. FILE gets a line for each kernel: its name, and "lowered"
or what refused it: "guess" if no guess compiles, else vnpu's text. Guesses follow names.
"""

import contextlib
import importlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import triton.language as tl
import vllm
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from vllm_davinci.vnpu.triton_backend.compiler import VirtualBackend, lower, simplify
from vllm_davinci.vnpu.triton_backend.driver import VirtualDriver

ROOT = Path(vllm.__file__).parent
INTEGER = re.compile(
    r"stride|num|size|idx|index|len|^n_|count|offset|^[MNKHBTDLSG]$|_[mnkhbdts]$|max_|rank|head|"
    r"dim|rows|cols|tokens|start|end|block|batch|^(m|n|k|b|h|t|s|d|v)$|mask_val|width|pad|seq"
)
FLOAT = re.compile(r"scale$|eps|alpha|beta$|theta|limit|threshold|factor|^p$|softcap|scaling|value")
POINTER = re.compile(r"ptr|table|tensor|loc|cache$|out|indices$|^(q|k|v|o|x|y|a|b|c|g|w|do|dq)$")
# Elements behind pointers, flags, sizes of blocks.
GUESSES = (("fp32", False, 64), ("fp32", True, 64), ("i32", False, 64), ("bf16", False, 16))
FLAG = re.compile(r"^(IS|HAS|USE|DO|ENABLE|APPLY|STORE|OUTPUT|LOAD|REVERSE|TRANS|EVEN|ADD|MASK)")


def module_names() -> Iterator[str]:
    for file in sorted(ROOT.rglob("*.py")):
        if "triton.jit" in file.read_text(encoding="utf-8"):
            yield ".".join(("vllm", *file.relative_to(ROOT).with_suffix("").parts))


def kernels() -> Iterator[tuple[str, JITFunction[Any]]]:
    """vLLM's Triton kernels, without functions that other kernels call."""
    found: dict[str, JITFunction[Any]] = {}
    for name in module_names():
        try:
            module = importlib.import_module(name)
        except Exception as error:  # another vendor's library is missing
            print(f"{name}: {error}", file=sys.stderr)
            continue
        for attribute, value in vars(module).items():
            while not isinstance(value, JITFunction) and hasattr(value, "fn"):
                value = value.fn  # autotuned
            if isinstance(value, JITFunction) and value.fn.__module__ == name:
                found[f"{name}.{attribute}"] = value
    sources = {name: each.src for name, each in found.items()}
    called = set(re.findall(r"\b(\w+)\(", "\n".join(sources.values())))
    for name, each in found.items():
        if name.rsplit(".", 1)[1] not in called - {each.fn.__name__} or "program_id" in each.src:
            yield name, each


def guesses(kernel: JITFunction[Any]) -> Iterator[tuple[dict[str, str], dict[tuple[int], Any]]]:
    """Types of the parameters and values of the constants."""
    for element, flag, size in GUESSES:
        signature: dict[str, str] = {}
        constants: dict[tuple[int], Any] = {}
        for place, parameter in enumerate(kernel.params):
            name = parameter.name
            if parameter.is_constexpr:
                signature[name] = "constexpr"
                constants[(place,)] = constant_of(name, parameter, flag, size)
            elif name.endswith(("_ptr", "ptrs")) or POINTER.search(name.lower()):
                integral = re.search(r"ids|idx|indices|lens|loc|table|count|num|pos|mapping", name)
                signature[name] = "*i32" if integral and element != "i64" else f"*{element}"
            elif FLOAT.search(name):
                signature[name] = "fp32"
            else:
                signature[name] = "i32" if INTEGER.search(name) or name.islower() else f"*{element}"
        yield signature, constants


def constant_of(name: str, parameter: Any, flag: bool, size: int) -> Any:
    annotation = str(parameter.annotation)
    if FLAG.match(name.upper()) or "bool" in annotation:
        return flag
    if "dtype" in name.lower() or name.lower().endswith("_type"):
        return tl.float32
    if "ACTIVATION" in name.upper():
        return "silu"
    if re.search(r"FP8_(MIN|MAX)|^(EPS|SCALE)", name.upper()):
        return 448.0
    if parameter.has_default:
        return parameter.default
    return 1 if re.search(r"STRIDE|NUM_STAGES|CP|RANK|INTERLEAVE|GROUP_SIZE_M", name) else size


def result_of(kernel: JITFunction[Any]) -> str:
    target = VirtualDriver().get_current_target()
    backend = VirtualBackend(target)
    options = backend.parse_options({})
    for signature, constants in guesses(kernel):
        from triton._C.libtriton import ir

        context = ir.context()
        ir.load_dialects(context)
        source = ASTSource(kernel, signature, constants)
        try:
            with contextlib.redirect_stderr(None):
                module = source.make_ir(
                    target,
                    options,
                    backend.get_codegen_implementation(options),
                    backend.get_module_map(),
                    context,
                )
                simplify(module, {})
        except Exception:  # a wrong guess
            continue
        try:
            lower(module, {})
        except NotImplementedError as error:
            return str(error)
        except Exception as error:  # ours
            return f"{type(error).__name__}: {error}"
        return "lowered"
    return "guess"


if __name__ == "__main__":
    with Path(sys.argv[1]).open("w") as file:
        for name, each in kernels():
            print(json.dumps([name, result_of(each)]), file=file, flush=True)
