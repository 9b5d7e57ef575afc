"""Error messages for checkpoints that did not load completely."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from vllm_davinci.core.checkpoint.check import check_checkpoint
from vllm_davinci.core.config.registered_names import WITHOUT_FILES
from vllm_davinci.core.errors import CheckpointError, CoreError
from vllm_davinci.core.layers.norm import NPURMSNorm
from vllm_davinci.core.quantization.config import AscendQuantizationConfig
from vllm_davinci.core.quantization.format import Format
from vllm_davinci.core.quantization.loading import CHECK_COMMAND
from vllm_davinci.core.quantization.scheme import FLOAT
from vllm_davinci.core.weight_files.layer_names import shortened


def damaged_files(directory: Path) -> Iterator[tuple[Path, str]]:
    """Safetensors files with an unreadable header or a wrong size, with the reason."""
    for path in sorted(directory.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            yield path, str(error)


@contextmanager
def explained(model: str, quantization: object) -> Iterator[None]:
    """Wraps weight loading; turns errors caused by the checkpoint into CheckpointError.

    model: a directory or a name on the hub
    """
    try:
        yield
    except SafetensorError as error:
        raise CheckpointError(describe_damage(model, error)) from error
    except (KeyError, ValueError) as error:
        if isinstance(error, CoreError) or not isinstance(quantization, AscendQuantizationConfig):
            raise
        told = describe_failure(model, quantization.description, error)
        if told is None:
            raise
        raise CheckpointError(told) from error


def describe_damage(model: str, cause: Exception) -> str:
    """The message for `model`, a directory or a name on the hub, that fails with `cause`."""
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


def describe_failure(model: str, description: Format, cause: KeyError | ValueError) -> str | None:
    """The message for a tensor of the checkpoint that the model's own loader rejects.

    model: a directory or a name on the hub
    Returns None if the checkpoint is not known to be the cause.
    """
    directory = Path(model)
    if directory.is_dir() and (problems := check_checkpoint(directory).problems()):
        return f"{model} does not load. {shortened(problems)}. {CHECK_COMMAND}."
    if not isinstance(cause, KeyError):
        return None
    tensor = str(cause.args[0])  # model's name, maybe without its first part
    weight = f"{tensor.rpartition('.')[0]}.weight"
    entry = next((kind for name, kind in description.types.items() if name.endswith(weight)), None)
    told = "has no entry" if entry is None else f"is {entry}"
    return (
        f"{model} has {tensor}, which the model does not have: {weight} {told} in "
        f"{description.source}. A layer without an entry is {FLOAT} and has no scales. Copy "
        f"the description of these weights: {CHECK_COMMAND}."
    )


def check_loaded(model: torch.nn.Module, quantization: object, load_format: str) -> None:
    """Logs what a quantized checkpoint lacks; raises CheckpointError if it is required."""
    if not isinstance(quantization, AscendQuantizationConfig):
        return
    quantization.log_missing()
    if load_format != WITHOUT_FILES:
        require_norm_biases(model, quantization.description)


def require_norm_biases(model: torch.nn.Module, description: Format) -> None:
    """Raises CheckpointError if a norm of this stage lacks the bias that the description lists."""
    lost = [
        f"{name}.bias"
        for name, module in model.named_modules()
        if isinstance(module, NPURMSNorm)
        and f"{name}.bias" in description.types
        and module.is_plain
    ]
    if lost:
        raise CheckpointError(
            f"{description.source} has an entry for {shortened(lost, 6)}, and no file has the "
            "tensor: layers after these norms would get wrong inputs. Copy the export again: "
            f"{CHECK_COMMAND}."
        )
