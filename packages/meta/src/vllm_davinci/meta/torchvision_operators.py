"""Lets torchvision's Python parts be imported where its compiled library cannot be loaded.

The package index holds torchvision built for CUDA. Beside a torch without CUDA its library does not
load, which torchvision passes over until it describes two of the library's operators to torch, and
then cannot be imported; nor can transformers, which imports it where it is installed. Image
processors use neither operator, but need the rest.
"""

from __future__ import annotations

from pathlib import Path

import torch

# Those that torchvision describes whether its library is there or not.
_SCHEMAS = {
    "nms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}
_declared: torch.library.Library | None = None  # declarations end with it


def declare_missing(torchvision: str) -> bool:
    """Declares them where this torchvision cannot. Returns whether it did.

    torchvision: the file of the package that is about to be imported
    """
    global _declared
    version = Path(torchvision).with_name("version.py")
    if (
        _declared is not None
        or torch.version.cuda is not None
        or not version.is_file()
        or "+cu" not in version.read_text(encoding="utf-8")
    ):
        return False
    _declared = torch.library.Library("torchvision", "FRAGMENT")
    for name, schema in _SCHEMAS.items():
        _declared.define(name + schema)
    return True
