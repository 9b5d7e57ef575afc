"""Runs checks right before torch_npu or torchvision is executed, which may fail without them.

It also prepares the command `vllm`, whose imports take seconds (meta.vllm_command).

torch_npu: torch imports it automatically; a failure prints a long traceback whose last line advises
           to turn the device off. A check before the import explains the cause in a few lines.
           torchvision: built for CUDA, it cannot be imported with a torch without CUDA unless two
           operators are declared first.

This module is imported at interpreter start-up through the `.pth` file of the same name; it puts
one finder in front of the others, which does nothing until one of the two is imported. It is one
file outside the namespace package because every Python process of the environment runs it, and each
further file would cost a third of a millisecond.
"""

from __future__ import annotations

import sys
from importlib.machinery import PathFinder, SourceFileLoader

# False at run time and true for type checkers: `typing` would cost more than all of the rest.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType


class ImportHooks:
    """Finds the packages of LOADERS like the usual path finder, and gives them our loader."""

    @staticmethod
    def find_spec(
        fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        loader = LOADERS.get(fullname)
        if loader is None:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and type(spec.loader) is SourceFileLoader:
            spec.loader = loader(spec.loader.name, spec.loader.path)
        return spec


# Start-up must not pay for what the loaders import.
class _TorchNPULoader(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        from vllm_davinci.meta import device_library

        if device_library.require():
            super().exec_module(module)
        else:
            module.__getattr__ = device_library.absent  # type: ignore[method-assign]


class _TorchvisionLoader(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        from vllm_davinci.meta import torchvision_operators

        torchvision_operators.declare_missing(self.path)
        super().exec_module(module)


LOADERS: dict[str, type[SourceFileLoader]] = {
    "torch_npu": _TorchNPULoader,
    "torchvision": _TorchvisionLoader,
}

if ImportHooks not in sys.meta_path:
    sys.meta_path.insert(0, ImportHooks)
    if sys.orig_argv[1:] and sys.orig_argv[1].endswith("/vllm"):
        from vllm_davinci.meta import vllm_command

        vllm_command.prepare(sys.orig_argv[2:])
