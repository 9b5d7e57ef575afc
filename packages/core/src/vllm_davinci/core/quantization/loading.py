"""Loading of a quantized layer's tensors, so that a bad checkpoint names its tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from vllm_davinci.core.errors import CheckpointError
from vllm_davinci.core.quantization.description import shortened

CHECK_COMMAND = "vllm-davinci check-model DIRECTORY lists everything that is wrong with it"


class RecordingLoader:
    """vLLM's weight loader of a layer, which remembers what it was given for one tensor.

    Parts of a fused layer come one by one, each with a shard id; None stands for all of it.
    """

    def __init__(
        self,
        load: Callable[..., None],
        tensor: str,
        convert: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        self._load = load
        self._convert = convert
        self.tensor = tensor
        self.shards: set[Any] = set()

    def __call__(self, parameter: Any, loaded: torch.Tensor, *shard: Any, **options: Any) -> None:
        """Raises CheckpointError when the tensor does not fit its place."""
        try:
            converted = loaded if self._convert is None else self._convert(loaded)
            self._load(parameter, converted, *shard, **options)
        except (AssertionError, RuntimeError, IndexError) as error:
            part = f", part {shard[0]!r}" if shard and shard[0] is not None else ""
            raise CheckpointError(
                f"{self.tensor}{part} has shape {list(loaded.shape)} in the checkpoint, which does "
                f"not fit its place of shape {list(parameter.shape)} on this rank ({error}). The "
                f"checkpoint does not belong to its config.json: {CHECK_COMMAND}."
            ) from error
        ids = shard[0] if shard and isinstance(shard[0], tuple) else shard or (None,)
        self.shards.update(ids)

    def missing(self, expected: Sequence[Any]) -> list[str]:
        """Parts among `expected` that did not come, as text for a message."""
        if None in self.shards:
            return []
        if not self.shards:
            return [self.tensor]
        return [f"{self.tensor} (part {part!r})" for part in expected if part not in self.shards]


def require_loaded(
    prefix: str, kind: str, loaders: Iterable[RecordingLoader], expected: Sequence[Any]
) -> None:
    """Raises CheckpointError when a tensor of the layer did not come from the checkpoint."""
    missing = [text for loader in loaders for text in loader.missing(expected)]
    if missing:
        raise CheckpointError(
            f"{prefix} is quantized as {kind}, and the checkpoint lacks {shortened(missing, 6)}. "
            f"Copy the export again or export it again: {CHECK_COMMAND}."
        )
