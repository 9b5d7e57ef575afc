"""A worker whose model can be made to fail at a chosen point."""

from collections.abc import Callable
from functools import partial
from typing import Any

from vllm_davinci.multistream import current_ubatch


class FailingWorker:
    """Mixed into the worker by vLLM's option worker_extension_cls."""

    model_runner: Any
    rank: int

    def fail_once_in(self, ubatch: int, layer: int, rank: int | None = None) -> None:
        """Makes this ubatch raise once at a layer's MLP.

        rank: the only rank that fails; None: all
        """
        if rank not in (None, self.rank):
            return

        def fail(module: Any, inputs: Any) -> None:
            if current_ubatch() == ubatch:
                hook.remove()
                raise RuntimeError(f"planted in ubatch {ubatch}, layer {layer}")

        mlp = self.model_runner.get_model().model.layers[layer].mlp
        hook = mlp.register_forward_pre_hook(fail)

    def fail_once_in_step(
        self, part: str, calls_before: int = 0, rank: int | None = None, error: str = "planted"
    ) -> None:
        """Makes a later step raise once, in one part.

        part:         "model", "sampling", "encoder" or "drafter"
        calls_before: number of steps that pass first
        rank:         the only rank that fails; None: all
        """
        if rank not in (None, self.rank):
            return
        methods = self._methods(part)
        proper = [getattr(*method) for method in methods]
        passed = 0

        def failing(call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
            nonlocal passed
            passed += 1
            if passed <= calls_before:
                return call(*arguments, **options)
            for method, each in zip(methods, proper, strict=True):
                setattr(*method, each)  # of this object only
            raise RuntimeError(f"{error} in {part}")

        for method, each in zip(methods, proper, strict=True):
            setattr(*method, partial(failing, each))

    def _methods(self, part: str) -> list[tuple[Any, str]]:
        """Returns a part's methods; a step calls one of them."""
        runner = self.model_runner
        methods = {
            "sampling": (runner, "sample"),
            "encoder": (runner.model_state, "execute_mm_encoder"),
            "drafter": (runner.speculator, "propose"),
        }
        if part != "model":
            return [methods[part]]
        graphs = runner.cudagraph_manager
        return [(runner.model, "forward"), *([] if graphs is None else [(graphs, "run_fullgraph")])]
