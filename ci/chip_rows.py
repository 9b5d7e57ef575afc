"""Writes core's chip rows from the virtual NPU's chip files, which state each figure once."""

import json
from pathlib import Path
from typing import Any

ROWS = Path("packages/core/src/vllm_davinci/core/device/chips.json")
FIGURES = {
    "cube_cores": ("figures", "cube_cores"),
    "memory_bytes": ("", "memory"),
    "streams": ("limits", "streams"),
    "events": ("limits", "events"),
}
EXPERTS = (
    *("ranks", "hidden_sizes", "max_tokens", "max_experts", "max_local_experts"),
    *("weights_at_dispatch", "communication"),
)


def chip_rows(chip_files: Any) -> str:
    """Formats the rows, by prefix of the chip's name. chip_files:
    vllm_davinci.vnpu.timing.chip_files
    """
    rows = {}
    for path in sorted(chip_files.FOLDER.glob("*.toml")):
        chip = chip_files.read_chip(path)
        limits = chip.get("fused_experts")
        rows[chip["soc_prefix"]] = {
            "generation": chip["generation"],
            "has_bfloat16": chip["has_bfloat16"],
            **{
                name: chip_files.amount((chip[section] if section else chip)[key])
                for name, (section, key) in FIGURES.items()
            },
            "fused_experts": limits and {name: limits[name] for name in EXPERTS},
        }
    lines = [f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in sorted(rows.items())]
    return "{\n" + ",\n".join(lines) + "\n}\n"
