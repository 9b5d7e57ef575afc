"""Options of a run of `verify`, stored in its directory, so that a second run can resume it."""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vllm_davinci.meta.supported_versions import installed_version
from vllm_davinci.verify.errors import VerificationError

FILE = "settings.json"
# Environment variables that affect results; another value needs another directory.
_VARIABLES = ("ASCEND_HOME_PATH", "VNPU_")
_PARTS = ("", "-core", "-kernels", "-models", "-multistream")
_DISTRIBUTIONS = ("vllm", "torch", "torch-npu", *(f"vllm-davinci{part}" for part in _PARTS))


@dataclass(frozen=True)
class Settings:
    """
    checkpoints: directories of models whose tokens are compared
    models:      models in whose sizes operators are called; empty: all
    ranks:       maximum number of devices in collectives
    seed:        seed of all random operands
    """

    checkpoints: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    ranks: int = 8
    seed: int = 0


def open_directory(directory: Path, settings: Settings) -> None:
    """Creates a run's directory, or opens that of the same run. Raises VerificationError."""
    told = {"settings": asdict(settings), **_surroundings()}
    told = json.loads(json.dumps(told))
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / FILE
    if not path.exists():
        path.write_text(json.dumps(told, indent=2), encoding="utf-8")
        return
    differing = [name for name, was, now in _pairs(_read(path), told) if was != now]
    if differing:
        raise VerificationError(
            f"{directory} belongs to another run: {', '.join(differing)} differ. Name another "
            "--directory, or start this one again with --restart."
        )


def settings_of(directory: Path) -> Settings:
    """Reads the settings of a run's directory."""
    told = _read(directory / FILE)["settings"]
    models = tuple(told["models"])
    return Settings(tuple(told["checkpoints"]), models, told["ranks"], told["seed"])


def _surroundings() -> dict[str, Any]:
    return {
        "variables": {
            name: value for name, value in sorted(os.environ.items()) if name.startswith(_VARIABLES)
        },
        "versions": {name: installed_version(name) for name in _DISTRIBUTIONS},
    }


def _read(path: Path) -> dict[str, Any]:
    try:
        told: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise VerificationError(f"{path}: {error}. Start again with --restart.") from error
    return told


def _pairs(was: dict[str, Any], now: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    return [
        (f"{group} {name}", was.get(group, {}).get(name), own.get(name))
        for group, own in now.items()
        for name in {*was.get(group, {}), *own}
    ]
