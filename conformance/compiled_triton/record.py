"""Records memory that a program's Triton kernels read and write on a virtual NPU.

`vnpu run --triton -- python record.py DIR PROGRAM [ARGUMENTS]`, or `-m MODULE`, runs the program.
For each kernel, DIR gets a module with the sources of the kernel and its functions, and launches
with all memory before and after. `replay.py DIR` repeats them where Triton compiles (a GPU), and
compares. Records the first launches of each kernel, up to MOST_LAUNCHES with different constants,
and tensors up to MOST_BYTES.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import runpy
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

from vllm_davinci.vnpu.triton_backend.driver import Launcher

MOST_LAUNCHES = 12
MOST_BYTES = 2 << 20
# These kernels read addresses from memory, which another machine does not have.
POINTERS_FROM_MEMORY = "pointer_type"


class NotRecordedError(Exception):
    """Says why a kernel or a launch cannot be repeated elsewhere."""


def source_of(kernel: JITFunction) -> str:
    """Returns a module with the kernel and everything that it uses, importing only triton and
    torch.
    """
    imports = ["import torch", "import triton", "import triton.language as tl"]
    values: list[str] = []
    functions: list[str] = []
    seen: dict[str, Any] = {}

    def add(function: JITFunction) -> None:
        tree = ast.parse(function.src)
        named = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
        local = {node.id for node in named if isinstance(node.ctx, ast.Store)}
        names = {node.id for node in named} - local
        known = {**inspect.getclosurevars(function.fn).nonlocals, **function.fn.__globals__}
        for name in sorted(names & known.keys() - {"tl", "triton", "torch"}):
            if name in seen:
                if seen[name] is not known[name]:
                    raise NotRecordedError(f"two of its functions use different {name}")
                continue
            seen[name] = known[name]
            if isinstance(known[name], JITFunction):
                add(known[name])
                if name != known[name].fn.__name__:
                    functions.append(f"{name} = {known[name].fn.__name__}")
            else:
                text = _defined(name, known[name])
                (imports if "import" in text else values).append(text)
        options = "noinline=True" if function.noinline else ""
        functions.append(f"@triton.jit({options})\n{function.src}")

    seen[kernel.fn.__name__] = kernel
    add(kernel)
    return "\n".join([*imports, *values, "\n\n".join(functions)]) + "\n"


def _defined(name: str, value: Any) -> str:
    if isinstance(value, ModuleType):
        if value.__name__.partition(".")[0] not in ("triton", "torch"):
            raise NotRecordedError(f"it uses the module {value.__name__}")
        return f"import {value.__name__} as {name}"
    if isinstance(value, tl.constexpr):
        return f"{name} = tl.constexpr({_literal(value.value)})"
    if (module := getattr(value, "__module__", "")).startswith("triton."):
        return f"from {module} import {value.__name__} as {name}"
    return f"{name} = {_literal(value)}"


def _literal(value: Any) -> str:
    if isinstance(value, tl.dtype):
        return f"tl.dtype({value.name!r})"
    if isinstance(value, float) and value in (float("inf"), -float("inf")):
        return f'float("{value}")'
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    raise NotRecordedError(f"a value of type {type(value).__name__}")


class Memory:
    """The whole storages of a launch's tensors, each once."""

    def __init__(self) -> None:
        self.storages: list[torch.UntypedStorage] = []
        self._index: dict[int, int] = {}

    def described(self, value: Any) -> Any:
        """Describes an argument: a tensor by its storage's index, a tuple by its elements."""
        if isinstance(value, tuple):
            return ("tuple", tuple(map(self.described, value)))
        if isinstance(value, JITFunction):
            return ("function", value.fn.__name__)
        if not isinstance(value, torch.Tensor):
            return ("value", _literal(value.value if isinstance(value, tl.constexpr) else value))
        storage = value.untyped_storage()
        if storage.nbytes() > MOST_BYTES:
            raise NotRecordedError(f"a tensor of {storage.nbytes() >> 20} MiB")
        if storage.data_ptr() not in self._index:
            self._index[storage.data_ptr()] = len(self.storages)
            self.storages.append(storage)
        place = self._index[storage.data_ptr()]
        return (
            *("tensor", place, value.dtype, value.storage_offset()),
            *(tuple(value.shape), tuple(value.stride())),
        )

    def copy(self) -> list[torch.Tensor]:
        """Copies the bytes of all storages to the CPU."""
        torch.npu.synchronize()
        return [
            torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).cpu().clone()
            for storage in self.storages
        ]


class Recorder:
    """Writes launches into a directory; `skipped` has reasons by kernel."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.skipped: dict[str, str] = {}
        self.taken: Counter[str] = Counter()
        self._sources: dict[int, str] = {}

    def source(self, kernel: JITFunction) -> str:
        """Returns the name of the module with the kernel's source, which is written once."""
        if id(kernel) not in self._sources:
            text = source_of(kernel)
            if POINTERS_FROM_MEMORY in text:
                raise NotRecordedError("it reads addresses from memory")
            name = f"{kernel.fn.__name__}_{hashlib.sha256(text.encode()).hexdigest()[:8]}"
            (self.directory / f"{name}.py").write_text(text, encoding="utf-8")
            self._sources[id(kernel)] = name
        return self._sources[id(kernel)]

    def launches(
        self, launcher: RecordingLauncher, grid: tuple[int, ...], values: Any
    ) -> Iterator[None]:
        """Records the memory before and after a launch, which runs at the yield."""
        kernel = launcher.source.fn
        name = f"{kernel.fn.__module__}.{kernel.fn.__name__}"
        constants = repr(sorted(launcher.source.constants.items(), key=repr))
        variant = f"{name} {constants} {launcher.source.signature}"
        if self.taken[name] == MOST_LAUNCHES or self.taken[variant] == 2:
            yield
            return
        memory = Memory()
        try:
            record: dict[str, Any] = {
                "kernel": name,
                "function": kernel.fn.__name__,
                "source": self.source(kernel),
                "grid": grid,
                "options": {"num_warps": launcher.num_warps},
                "arguments": [memory.described(value) for value in values],
            }
        except (NotRecordedError, OSError, SyntaxError) as error:
            self.skipped[name] = str(error)
            yield
            return
        record["before"] = memory.copy()
        yield
        record["after"] = memory.copy()
        self.taken.update([name, variant])
        torch.save(record, self.directory / f"{record['source']}-{self.taken[name]}.pt")


class RecordingLauncher(Launcher):
    """The virtual NPU's launcher, which also records each launch."""

    recorder: Recorder

    def __init__(self, src: Any, metadata: Any) -> None:
        super().__init__(src, metadata)
        self.source = src
        self.num_warps = metadata.num_warps

    def __call__(self, *given: Any) -> None:
        grid, values = given[:3], given[9:]
        around = self.recorder.launches(self, grid, values)
        next(around)
        super().__call__(*given)
        next(around, None)


def main() -> None:
    directory, *program = sys.argv[1:]
    Path(directory).mkdir(parents=True, exist_ok=True)
    RecordingLauncher.recorder = recorder = Recorder(Path(directory).resolve())
    triton.runtime.driver.active.launcher_cls = RecordingLauncher
    is_module = program[0] == "-m"
    sys.argv = program[is_module:]
    sys.path[0] = "" if is_module else str(Path(program[0]).resolve().parent)
    try:
        (runpy.run_module if is_module else runpy.run_path)(
            sys.argv[0], run_name="__main__", **({"alter_sys": True} if is_module else {})
        )
    finally:
        kernels = {name for name in recorder.taken if " " not in name}
        num_launches = sum(recorder.taken[name] for name in kernels)
        print(f"{len(kernels)} kernels, {num_launches} launches recorded")
        for name in sorted(recorder.skipped.keys() - kernels):
            print(f"not recorded: {name}: {recorder.skipped[name]}")


if __name__ == "__main__":
    main()
