"""A worker whose model can be made to fail at a chosen place."""

from __future__ import annotations

from typing import Any

from vllm_davinci.multistream import current_ubatch


class FailingWorker:
    """Mixed into the worker by vLLM's option worker_extension_cls."""

    model_runner: Any
    rank: int

    def fail_once_in(self, ubatch: int, layer: int, rank: int | None = None) -> None:
        """The next ubatch that reaches a layer's MLP raises there.

        rank: on this rank only; None: on each
        """
        if rank not in (None, self.rank):
            return

        def fail(module: Any, inputs: Any) -> None:
            if current_ubatch() == ubatch:
                hook.remove()
                raise RuntimeError(f"planted in ubatch {ubatch}, layer {layer}")

        mlp = self.model_runner.get_model().model.layers[layer].mlp
        hook = mlp.register_forward_pre_hook(fail)

    def fail_once_at(
        self, method: str, calls_before: int = 0, rank: int | None = None, error: str = "planted"
    ) -> None:
        """A later call of a method of the runner raises once.

        method:       "_model_forward" enters the model, "_sample" takes its logits
        calls_before: calls that pass first
        rank:         on this rank only; None: on each
        """
        if rank not in (None, self.rank):
            return
        proper = getattr(self.model_runner, method)
        passed = 0

        def failing(*arguments: Any, **options: Any) -> Any:
            nonlocal passed
            passed += 1
            if passed <= calls_before:
                return proper(*arguments, **options)
            setattr(self.model_runner, method, proper)  # of this object alone
            raise RuntimeError(f"{error} in {method}")

        setattr(self.model_runner, method, failing)
