"""Writes the rows of libvnpu's table of chips: `generate_chips.py OUTPUT [FOLDER]`.

Each file of FOLDER, by default the package's `chips/`, becomes one row of device/chip.h's `Chip`.
"""

import pathlib
import sys
from typing import Any

PACKAGE = pathlib.Path(__file__).resolve().parent.parent / "src" / "vllm_davinci" / "vnpu"
sys.path.insert(0, str(PACKAGE / "timing"))

import chip_files  # noqa: E402  (importing it by its package would need what is being built)

NUMBERS = {
    "memory_bytes": ("", "memory"),
    "cube_cores": ("figures", "cube_cores"),
    "vector_cores": ("figures", "vector_cores"),
    "l2_bytes": ("figures", "l2_bytes"),
    "streams": ("limits", "streams"),
    "events": ("limits", "events"),
    "server_devices": ("limits", "server_devices"),
}


def allowed(numbers: Any) -> str:
    """A list of numbers, or a range, as `AllowedNumbers`."""
    if isinstance(numbers, list):
        return f"{{.listed = {{{', '.join(map(str, numbers))}}}}}"
    return f"{{.least = {numbers['least']}, .most = {numbers['most']}, .step = {numbers['step']}}}"


def fused_experts(limits: dict[str, Any]) -> str:
    fields = [f".ranks = {allowed(limits['ranks'])}"]
    fields.append(f".hidden_sizes = {allowed(limits['hidden_sizes'])}")
    for name in ("max_tokens", "max_experts", "max_local_experts"):
        fields.append(f".{name} = {int(limits[name])}")
    for name in ("shared_expert_ranks", "weights_at_dispatch"):
        fields.append(f".{name} = {str(limits[name]).lower()}")
    return f"FusedExperts{{{', '.join(fields)}}}"


def row(name: str, chip: dict[str, Any]) -> str:
    """One chip as an initialiser of `Chip`."""
    fields = [f'.name = "{name}"', f'.soc_prefix = "{chip["soc_prefix"]}"']
    generation = chip["generation"]
    fields.append(f".generation = Generation::k{generation[0].upper()}{generation[1:]}")
    fields.append(f".cann = CannRelease::k{chip['cann'].replace('.', '_')}")
    for field, (section, key) in NUMBERS.items():
        figures = chip[section] if section else chip
        fields.append(f".{field} = {chip_files.amount(figures[key])}")
    if limits := chip.get("fused_experts"):
        fields.append(f".fused_experts = {fused_experts(limits)}")
    return "{" + ", ".join(fields) + "},\n"


def main() -> None:
    output = pathlib.Path(sys.argv[1])
    folder = pathlib.Path(sys.argv[2]) if len(sys.argv) > 2 else chip_files.FOLDER
    chips = {}
    for path in sorted(folder.glob("*.toml")):
        try:
            chips[path.stem] = chip = chip_files.read_chip(path, folder)
            chip["row"] = row(path.stem, chip)
        except (KeyError, OSError, ValueError) as error:
            raise SystemExit(
                f"{path}: {error!r}. A chip states what ascend910b2.toml states."
            ) from error
    # The first prefix that fits names the chip, so that the longer ones come first.
    ordered = sorted(chips.values(), key=lambda chip: -len(chip["soc_prefix"]))
    text = "".join(chip["row"] for chip in ordered)
    if not output.exists() or output.read_text() != text:  # keeps what was built from it
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(text)


if __name__ == "__main__":
    main()
