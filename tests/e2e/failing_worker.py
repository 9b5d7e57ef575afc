"""A worker whose model can be made to fail in one micro-batch, for tests of what happens then."""

from __future__ import annotations

from typing import Any

from vllm_davinci.multistream import current_micro_batch


class FailingWorker:
    """Mixed into the worker by vLLM's option worker_extension_cls."""

    model_runner: Any
    rank: int

    def fail_once_in(self, micro_batch: int, layer: int, rank: int | None = None) -> None:
        """The next time that a micro-batch comes to a layer's MLP, it raises there.

        rank: on this one only; None is on each
        """
        if rank not in (None, self.rank):
            return

        def fail(module: Any, inputs: Any) -> None:
            if current_micro_batch() == micro_batch:
                hook.remove()
                raise RuntimeError(f"planted in micro-batch {micro_batch}, layer {layer}")

        mlp = self.model_runner.get_model().model.layers[layer].mlp
        hook = mlp.register_forward_pre_hook(fail)
