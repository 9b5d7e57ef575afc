"""Converts GGUF files into float checkpoints that vLLM loads, with transformers' reader."""

import hashlib
import os
import shutil
import tempfile
from pathlib import Path

from vllm_davinci.meta.errors import ModelFileError

MAGIC = b"GGUF"


def is_gguf(model: Path) -> bool:
    """True if `model` is a file with the magic bytes of GGUF."""
    if not model.is_file():
        return False
    with model.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def checkpoint_directory() -> Path:
    """DAVINCI_GGUF_CACHE, or ~/.cache/vllm-davinci/gguf."""
    chosen = os.environ.get("DAVINCI_GGUF_CACHE")
    return Path(chosen) if chosen else Path.home() / ".cache" / "vllm-davinci" / "gguf"


def converted(model: Path) -> Path:
    """Converts a GGUF file into a bf16 checkpoint directory, once per file.

    The directory is named after the file's path, size and time, so that a changed file is converted
    again. Raises ModelFileError if transformers does not read this architecture or tensor type, or
    if the package `gguf`, which its reader needs, is not installed.
    """
    status = model.stat()
    fact = f"{model.resolve()}\0{status.st_size}\0{status.st_mtime_ns}"
    name = f"{model.stem}-{hashlib.sha256(fact.encode()).hexdigest()[:12]}"
    destination = checkpoint_directory() / name
    if (destination / "config.json").is_file():
        return destination
    destination.parent.mkdir(parents=True, exist_ok=True)
    # Complete or absent: a second process may convert the same file.
    partial = Path(tempfile.mkdtemp(prefix=f"{name}.", dir=destination.parent))
    try:
        _write(model, partial)
        if not destination.exists():
            partial.rename(destination)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return destination


def _write(model: Path, directory: Path) -> None:
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    source = {"pretrained_model_name_or_path": str(model.parent), "gguf_file": model.name}
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
        network = transformers.AutoModelForCausalLM.from_pretrained(
            **source,
            dtype=torch.bfloat16,
            quantization_config=transformers.GgufConfig(dequantize=True),
        )
    except ImportError as error:
        raise ModelFileError(
            f"{model}: transformers reads GGUF files with the package `gguf`, which is not "
            "installed. Run `pip install gguf`."
        ) from error
    except (KeyError, NotImplementedError, ValueError) as error:
        raise ModelFileError(
            f"{model}: transformers does not read this GGUF file ({error}). Files of Llama, Qwen "
            "and SmolLM models are read; of another model use the safetensors checkpoint."
        ) from error
    network.to(torch.bfloat16).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
