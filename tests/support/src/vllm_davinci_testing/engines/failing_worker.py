"""A worker whose model can be made to fail somewhere, for tests of what happens then."""

from __future__ import annotations

from typing import Any

import torch

from vllm_davinci.multistream import current_ubatch


class FailingWorker:
    """Mixed into the worker by vLLM's option worker_extension_cls."""

    model_runner: Any
    rank: int

    def fail_once_in(self, ubatch: int, layer: int, rank: int | None = None) -> None:
        """The next time that a ubatch comes to a layer's MLP, it raises there.

        rank: on this one only; None is on each
        """
        if rank not in (None, self.rank):
            return

        def fail(module: Any, inputs: Any) -> None:
            if current_ubatch() == ubatch:
                hook.remove()
                raise RuntimeError(f"planted in ubatch {ubatch}, layer {layer}")

        mlp = self.model_runner.get_model().model.layers[layer].mlp
        hook = mlp.register_forward_pre_hook(fail)

    def capture_again_with_a_failure(self, num_tokens: int, rank: int) -> None:
        """Captures all graphs anew; on one rank the model raises in the capture of one size."""

        def fail(module: Any, inputs: Any, kwargs: dict[str, Any]) -> None:
            is_captured = torch.npu.is_current_stream_capturing()
            if is_captured and kwargs["positions"].shape[0] == num_tokens:
                raise RuntimeError(f"planted in the capture of {num_tokens} tokens")

        model = self.model_runner.get_model()
        self.model_runner.model.clear_graphs()
        hook = None
        if rank == self.rank:
            hook = model.register_forward_pre_hook(fail, with_kwargs=True)
        self.model_runner.capture_model()
        if hook is not None:
            hook.remove()
