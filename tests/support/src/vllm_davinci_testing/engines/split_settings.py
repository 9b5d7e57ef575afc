"""Options of `dbo` under which every step that can be cut is split, decodes too."""

from __future__ import annotations

from typing import Any

SPLIT_ALWAYS: dict[str, Any] = {
    "enabled": True,
    "decode": True,
    "min_total_tokens_to_split": 2,
    "min_prefill_tokens_to_split": 1,
    "min_decode_tokens_to_split": 2,
    "imbalance_ratio": 0.5,
}
