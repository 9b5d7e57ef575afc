"""Which file of a checkpoint is damaged, when loading fails."""

from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError, safe_open


def damaged_files(directory: Path) -> Iterator[tuple[Path, str]]:
    """Safetensors files whose header does not read or does not fit the file, with the reason."""
    for path in sorted(directory.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            yield path, str(error)


def describe_damage(model: str, cause: Exception) -> str:
    """What to tell the user when `model`, a directory or a name, fails to load with `cause`."""
    directory = Path(model)
    files = list(damaged_files(directory)) if directory.is_dir() else []
    if not files:
        return (
            f"The weights of {model} cannot be read: {cause}. Download the checkpoint again; when "
            "it comes from a cache, delete its cached files first."
        )
    listed = "; ".join(f"{path} ({path.stat().st_size} bytes): {reason}" for path, reason in files)
    return (
        f"The weights of {model} are damaged: {listed}. Download or copy these files again and "
        "compare their sizes with the source."
    )
