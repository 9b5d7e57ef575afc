"""Makes torchvision's Python parts importable if its compiled library cannot be loaded.

The package index has torchvision built for CUDA, whose library does not load with a torch without
CUDA. torchvision ignores that until it describes two of the library's operators to torch; then its
import fails, and with it the import of transformers. Image processors need torchvision, but neither
operator.
"""

from pathlib import Path

import torch

# Operators that torchvision describes with or without its library.
_SCHEMAS = {
    "nms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}
_declared: torch.library.Library | None = None  # declarations end with this object


def declare_missing(torchvision: str) -> bool:
    """Declares the operators if this torchvision cannot. Returns True if it did.

    torchvision: file of the package about to be imported
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
