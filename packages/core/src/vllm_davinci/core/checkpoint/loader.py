"""vLLM's weight loader with format conversion. Raises for every missing or unexpected tensor."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from vllm.config import get_current_vllm_config
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from vllm_davinci.core.checkpoint.check import check_checkpoint
from vllm_davinci.core.checkpoint.completeness import drafts_for_target, require_complete
from vllm_davinci.core.checkpoint.tracking import LoadTracker
from vllm_davinci.core.config.architectures import name_in_vllm
from vllm_davinci.core.config.registered_names import PREFIX, REPLACED
from vllm_davinci.core.errors import CheckpointError, CoreError, UnsupportedFeatureError
from vllm_davinci.core.quantization.format import Format, Weights
from vllm_davinci.core.quantization.loading import CHECK_COMMAND, require_usable
from vllm_davinci.core.quantization.rotation import ROTATION
from vllm_davinci.core.weight_files.files import read_header, require_files
from vllm_davinci.core.weight_files.layer_names import shortened

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.config.load import LoadConfig


_registered: set[str] = set()


class NPUModelLoader(DefaultModelLoader):
    """The loader of all vLLM load formats that read tensors into host memory."""

    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(
            replace(load_config, load_format=load_config.load_format.removeprefix(PREFIX))
        )
        self._tracker: LoadTracker | None = None
        self._format: Format | None = None
        self._stored: str | None = None
        self._streams: list[Generator[tuple[str, torch.Tensor], None, None]] = []

    def load_weights(self, model: torch.nn.Module, model_config: ModelConfig) -> None:
        """Loads the weights; raises CheckpointError for damaged, missing or unused tensors.

        The message names file and tensor.
        """
        directory = Path(model_config.model)
        if directory.is_dir():
            require_files(directory)
        self._format = _format_of(model_config, get_current_vllm_config())
        # A format that describes no layers raises during conversion.
        if self._format is not None and self._format.types and directory.is_dir():
            problems = check_checkpoint(directory, self._format).problems()
            if problems:
                raise CheckpointError(
                    f"{directory} does not load. {shortened(problems)}. {CHECK_COMMAND}."
                )
        tracker = self._tracker = LoadTracker(model)
        try:
            super().load_weights(model, model_config)
        except SafetensorError:
            raise
        except (
            AssertionError, AttributeError, IndexError, KeyError, RuntimeError, ValueError
        ) as error:  # fmt: skip
            if isinstance(error, UnsupportedFeatureError):
                raise
            if tracker.is_at_end:  # vLLM noticed afterwards that tensors are missing
                self._require_complete(tracker, model, model_config)
                raise
            raise CheckpointError(_told(directory, self._stored or "", error)) from error
        finally:
            self._tracker = None
            for stream in self._streams:
                stream.close()
            self._streams.clear()
            tracker.release()
        self._require_complete(tracker, model, model_config)

    def _require_complete(
        self, tracker: LoadTracker, model: torch.nn.Module, model_config: ModelConfig
    ) -> None:
        require_complete(tracker, model, get_current_vllm_config(), self._format, model_config)

    def get_all_weights(
        self, model_config: ModelConfig, model: torch.nn.Module
    ) -> Generator[tuple[str, torch.Tensor], None, None]:
        weights: Weights = self._checked(super().get_all_weights(model_config, model))
        if self._format is not None:
            weights = self._format.converted(weights, model_config.dtype)
        weights = (
            (known_as, tensor)
            for name, tensor in weights
            if (known_as := name_in_vllm(model_config, name)) is not None
        )
        if ROTATION not in dict(model.named_parameters()):
            weights = (each for each in weights if each[0] != ROTATION)  # the drafter's
        if self._tracker is not None:
            weights = self._tracker.watch(weights)
            self._streams.append(weights)
        yield from weights

    def _checked(self, weights: Weights) -> Generator[tuple[str, torch.Tensor], None, None]:
        """Yields `weights`; `_stored` is the newest tensor's name as the file spells it."""
        for name, tensor in weights:
            self._stored = name
            require_usable(name, tensor)
            yield name, tensor


def _format_of(model_config: ModelConfig, vllm_config: VllmConfig) -> Format | None:
    """The format of a checkpoint, read by its quantization configuration.

    A drafter with its own directory is not quantized like its target.
    """
    quantization = vllm_config.quant_config
    if (
        drafts_for_target(model_config, vllm_config)
        and model_config.model != vllm_config.model_config.model
    ):
        quantization = vllm_config.get_quantization_config(model_config, vllm_config.load_config)
    return getattr(quantization, "format", None)


def register() -> None:
    """Registers this loader for the load formats that the platform names. Idempotent."""
    for load_format in REPLACED:
        name = f"{PREFIX}{load_format}"
        if name not in _registered:
            register_model_loader(name)(NPUModelLoader)
            _registered.add(name)


def _told(directory: Path, tensor: str, error: Exception) -> str:
    # vLLM's message continues with a list of all names.
    reason = str(error).split(". The available")[0] or type(error).__name__
    files = {
        name: path for path in sorted(directory.glob("*.safetensors")) for name in read_header(path)
    }
    named = reason.split()[0].removesuffix("_scale_inv")
    if isinstance(error, CoreError) and named in files:
        return f"{files[named]}: {reason}"
    file = files.get(tensor, directory)
    if isinstance(error, CoreError):
        return f"{file}: {tensor}: {reason}"
    return f"{file}: {tensor} does not fit the model of config.json: {reason}. {CHECK_COMMAND}."
