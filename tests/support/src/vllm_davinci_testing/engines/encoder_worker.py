"""A worker that tells how its multimodal encoder ran."""

from __future__ import annotations

from typing import Any

import torch

from vllm_davinci.vnpu import _C


class EncoderWorker:
    """Mixed into the worker by vLLM's option worker_extension_cls."""

    def watch_encoder(self) -> None:
        """From now on, outputs and counts of each forward of `model.visual`."""
        self._forwards: list[tuple[torch.Tensor, dict[str, int]]] = []
        before: dict[str, int] = {}
        encoder = self.model_runner.get_model().visual

        def begin(module: torch.nn.Module, arguments: Any, options: Any) -> None:
            before.update(_C.host_counts())

        def end(module: torch.nn.Module, arguments: Any, output: torch.Tensor) -> None:
            counts = {name: n - before[name] for name, n in _C.host_counts().items()}
            self._forwards.append((output.cpu(), counts))

        # First of all, so that what other hooks prepare is counted too.
        encoder.register_forward_pre_hook(begin, prepend=True, with_kwargs=True)
        encoder.register_forward_hook(end)

    def encoder_forwards(self) -> list[tuple[torch.Tensor, dict[str, int]]]:
        """Output and counts of each since then: launches, synchronizations, copies_to_host."""
        return self._forwards
