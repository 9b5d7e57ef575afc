"""A worker that records its routers' scores, and a transformers model that uses them.

Rounding of almost equal scores may select other experts. If both sides use the same scores, only
rounding is left to compare.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

ROUTERS = ("gate", "router")


class RoutingWorker:
    """Mixed into the worker by vLLM's option worker_extension_cls."""

    model_runner: Any

    def record_routers(self) -> int:
        """Starts recording routers' scores; returns the number of routers."""
        self._answers: dict[str, list[torch.Tensor]] = {}
        routers = {
            name: module
            for name, module in self.model_runner.get_model().named_modules()
            if name.rpartition(".")[2] in ROUTERS
        }
        for name, module in routers.items():
            module.register_forward_hook(self._keeps(name))
        return len(routers)

    def _keeps(self, name: str) -> Any:
        def keep(module: torch.nn.Module, inputs: Any, output: Any) -> None:
            scores = output[0] if isinstance(output, tuple) else output
            self._answers.setdefault(name, []).append(scores.detach().clone())

        return keep

    def router_answers(self, tokens: int) -> list[torch.Tensor]:
        """Returns each router's scores in the first recorded step, [tokens, experts] fp32.

        Raises ValueError if that step had fewer tokens.
        """
        found, self._answers = self._answers, {}
        firsts = [answers[0][:tokens].float().cpu() for answers in found.values()]
        if any(len(scores) != tokens for scores in firsts):
            raise ValueError(f"{[len(scores) for scores in firsts]} rows of {tokens} tokens")
        return firsts


@contextmanager
def routed_by(network: torch.nn.Module, answers: Sequence[torch.Tensor]) -> Iterator[None]:
    """In this context, transformers' routers choose by these scores.

    A router multiplies its input by its weight: the scores replace the input, and an identity
    matrix the weight.
    """
    routers = [
        module
        for name, module in network.named_modules()
        if name.rpartition(".")[2] in ROUTERS and hasattr(module, "top_k")
    ]
    kept = [dict(vars(router)["_parameters"]) for router in routers]
    sizes = [router.hidden_dim for router in routers]
    handles = []
    for router, scores in zip(routers, answers, strict=True):
        experts = scores.shape[1]
        router.weight = torch.nn.Parameter(torch.eye(experts), requires_grad=False)
        if "bias" in router._parameters:
            router.bias = torch.nn.Parameter(torch.zeros(experts), requires_grad=False)
        router.hidden_dim = experts
        handles.append(router.register_forward_pre_hook(_given(scores)))
    try:
        yield
    finally:
        for router, parameters, size, handle in zip(routers, kept, sizes, handles, strict=True):
            handle.remove()
            router.hidden_dim = size
            for name, parameter in parameters.items():
                setattr(router, name, parameter)


def _given(scores: torch.Tensor) -> Any:
    # If scores are equal in 16 bits, operators choose the first expert, torch any.
    told = scores - torch.arange(scores.shape[1]) * 1e-6
    return lambda module, inputs: (told,)
