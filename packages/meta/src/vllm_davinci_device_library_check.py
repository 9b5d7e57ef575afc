"""Explains in a few lines why torch_npu cannot start, before its import fails deep inside torch.

torch imports torch_npu by itself, in an order of entry points that is the file system's, and a
failure there is a long traceback whose last line advises to turn the device off. This module is
imported at interpreter start-up through the `.pth` file of the same name; it puts one finder in
front of the others, which does nothing until somebody imports `torch_npu`. It is one file outside
the namespace package because it runs in every Python process of the environment, whatever that
is for: each further file would cost a third of a millisecond.
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


class DeviceLibraryCheck:
    """Finds `torch_npu` as the ordinary path finder does, with a check before it is executed."""

    @staticmethod
    def find_spec(
        fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "torch_npu":
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and type(spec.loader) is SourceFileLoader:
            spec.loader = _CheckedLoader(spec.loader.name, spec.loader.path)
        return spec


class _CheckedLoader(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        from vllm_davinci.meta import device_library  # imports what start-up must not pay for

        device_library.require()
        super().exec_module(module)


if DeviceLibraryCheck not in sys.meta_path:
    sys.meta_path.insert(0, DeviceLibraryCheck)
