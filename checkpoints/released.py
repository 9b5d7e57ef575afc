"""DeepSeek-V4's released names; transformers saves other names and its own configuration."""

import json
import re
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

# transformers' tensor name in a file -> the released name.
_NAMES = {
    r"^model\.embed_tokens\.": "embed.",
    r"^model\.norm\.": "norm.",
    r"^model\.hc_head\.hc_": "hc_head_",
    r"^model\.": "",
    r"\.attn\.norm\.": ".attn.kv_norm.",
}
_OWN_KEYS = ("layer_types", "mlp_layer_types", "compress_rates", "rope_parameters")


def released_name(name: str) -> str:
    for pattern, new in _NAMES.items():
        name = re.sub(pattern, new, name)
    return name


def rename(directory: Path, keys: dict[str, Any]) -> None:
    """Gives a saved checkpoint the released names, and its configuration the released `keys`."""
    path = directory / "model.safetensors"
    tensors = {released_name(name): tensor for name, tensor in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})
    path = directory / "config.json"
    written = json.loads(path.read_text())
    config = {key: value for key, value in written.items() if key not in _OWN_KEYS} | keys
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
