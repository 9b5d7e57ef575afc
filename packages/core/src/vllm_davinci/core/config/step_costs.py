"""Whom a file of `dbo.costs` is for: durations of another model, chip or layout decide wrongly."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm import platforms

from vllm_davinci.core.errors import ConfigurationError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_AGAIN = (
    "`vllm-davinci dry-run ... --split-costs FILE` with this engine's options writes one for it."
)


def engine_of_costs(vllm_config: "VllmConfig") -> dict[str, str | int | bool]:
    """Lists what durations of steps depend on, by name, as such a file states it."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    return {
        "architecture": model.architectures[0],
        "hidden_size": model.get_hidden_size(),
        "layers": int(model.hf_text_config.num_hidden_layers),
        "quantization": str(model.quantization or "none"),
        "dtype": str(model.dtype).removeprefix("torch."),
        "chip": platforms.current_platform.get_device_name(),
        "tensor_parallel_size": parallel.tensor_parallel_size,
        "data_parallel_size": parallel.data_parallel_size,
        "enable_expert_parallel": parallel.enable_expert_parallel,
    }


def refuse_costs_of_others(path: str, vllm_config: "VllmConfig") -> None:
    """Raises ConfigurationError for a file that is missing, or made for another engine."""
    file = Path(path)
    if not file.is_file():
        raise ConfigurationError(
            f"dbo.costs = {path!r} is no file. `vllm-davinci dry-run --split-costs FILE` writes "
            "one."
        )
    try:
        stated: Any = json.loads(file.read_text(encoding="utf-8"))["engine"]
        made_for = dict(stated)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(
            f"dbo.costs = {path!r} does not say what engine it was made for "
            f"({type(error).__name__}: {error}). {_AGAIN}"
        ) from error
    differences = [
        f"{name} {made_for.get(name)!r}, here {value!r}"
        for name, value in engine_of_costs(vllm_config).items()
        if made_for.get(name) != value
    ]
    if differences:
        raise ConfigurationError(
            f"dbo.costs = {path!r} was made for another engine: {'; '.join(differences)}. {_AGAIN}"
        )
