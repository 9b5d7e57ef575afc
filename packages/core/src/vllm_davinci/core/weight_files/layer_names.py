"""Names of a checkpoint's layers that formats and models share."""

import re
from collections.abc import Iterable

# Layers that vLLM computes as one product -> their parts in a checkpoint. A model's own
# `packed_modules_mapping` takes precedence.
FUSED_LAYERS: dict[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
}
VOCABULARY = ("lm_head", "embed_tokens")
EXPERT = re.compile(
    r"^(?P<experts>(?:.*\.)?(?:layers|mtp)\.\d+\..*experts)\.(?P<number>\d{1,9})\.(?P<part>.+)$"
)
# A norm into which outliers were moved: exporters before format 1.0.0 wrote a second copy of it.
WRAPPED_NORM = re.compile(r"^(?P<norm>.*norm)\.module\.(?P<part>weight|bias)$")


def shortened(names: Iterable[str], most: int = 3) -> str:
    """The first few of many names, for a message."""
    listed = list(names)
    rest = len(listed) - most
    return ", ".join(listed[:most]) + (f" and {rest} more" if rest > 0 else "")
