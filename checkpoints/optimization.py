"""One training step: optimizers, learning rate, expert balance, averaged weights."""

import math
import time
from typing import Any

import torch
from recipes import CONTEXT_TOKENS, Recipe
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


def routers(model: nn.Module) -> list[nn.Module]:
    """Returns the modules that select experts; none in a dense model."""
    return [m for m in model.modules() if hasattr(m, "e_score_correction_bias")]


class ExpertBalance:
    """Keeps the routed experts equally loaded without a loss term (DeepSeek-V3, 2.1.2).

    After each step, experts with more tokens than the average get a lower correction bias, others a
    higher one, by a fixed amount.
    """

    def __init__(self, model: nn.Module) -> None:
        self.loads: dict[nn.Module, Tensor] = {}
        for router in routers(model):
            router.register_forward_hook(self._count)

    def _count(
        self, router: nn.Module, inputs: tuple[Tensor], outputs: tuple[Tensor, Tensor, Tensor]
    ) -> None:
        bias = router.get_buffer("e_score_correction_bias")
        self.loads[router] = torch.bincount(outputs[2].flatten(), minlength=len(bias)).float()

    @torch.no_grad()
    def update(self, rate: float) -> None:
        for router, load in self.loads.items():
            bias = router.get_buffer("e_score_correction_bias")
            bias += rate * torch.sign(load.mean() - load)
            bias -= bias.mean()

    def imbalance(self) -> float:
        """Returns the busiest expert's load over the mean, in the worst layer; 1.0 is balanced."""
        return max((float(load.max() / load.mean()) for load in self.loads.values()), default=1.0)


class IndexerAlignment:
    """Trains indexers to prefer the rows that attention prefers (DeepSeek-V3.2 report, 2.1.1).

    Choosing rows has no gradient, so indexers learn from attention's weights on rows; attention
    does not learn from indexers.
    """

    def __init__(self, model: nn.Module) -> None:
        self._scores: list[Tensor] = []
        self._losses: list[Tensor] = []
        for module in model.modules():
            if hasattr(module, "scorer"):
                module.register_forward_pre_hook(self._detach)
                module.scorer.register_forward_hook(
                    lambda _m, _i, scores: self._scores.append(scores)
                )
            elif hasattr(getattr(module, "compressor", None), "indexer"):
                module.register_forward_hook(self._compare)

    def _detach(self, indexer: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return (*(tensor.detach() for tensor in inputs[:2]), *inputs[2:])

    def _compare(self, _m: nn.Module, _i: tuple[Any, ...], outputs: tuple[Tensor, Tensor]) -> None:
        scores = self._scores.pop()
        wanted = outputs[1].detach()[..., -scores.shape[-1] :].float().sum(1)
        wanted = wanted / wanted.sum(-1, keepdim=True).clamp_min(1e-6)
        known = scores.masked_fill(wanted == 0, -1e9).log_softmax(-1)
        self._losses.append(-(wanted * known).sum(-1).mean())

    def loss(self) -> Tensor:
        """Returns the sum of the last forward's cross entropies."""
        total = sum(self._losses, torch.zeros(()))
        self._losses.clear()
        return total


def _optimizers(model: nn.Module, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Makes Muon for matrices inside the layers, AdamW for all other parameters."""
    matrices, vectors, others = [], [], []
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            vectors.append(parameter)
        elif parameter.ndim == 2 and name.endswith("_proj.weight"):
            matrices.append(parameter)
        else:
            others.append(parameter)
    return [
        torch.optim.Muon(
            matrices,
            lr=recipe.learning_rate,
            weight_decay=recipe.weight_decay,
            adjust_lr_fn="match_rms_adamw",
        ),
        torch.optim.AdamW(
            [
                {"params": others, "weight_decay": recipe.weight_decay},
                {"params": vectors, "weight_decay": 0.0},
            ],
            lr=recipe.learning_rate,
            betas=(0.9, 0.95),
            fused=True,
        ),
    ]


class Schedule:
    """Training progress: by steps, or by time if the machine is too slow.

    A run that reaches its time limit also ends with a small learning rate and full-context
    sequences, after less text.
    """

    def __init__(self, recipe: Recipe, limit_seconds: float) -> None:
        self.recipe = recipe
        self.limit_seconds = limit_seconds
        self.started = time.monotonic()

    def elapsed_seconds(self) -> float:
        return time.monotonic() - self.started

    def progress(self, step: int) -> float:
        """Returns progress from 0 to 1 after `step` steps."""
        return max(step / self.recipe.steps, self.elapsed_seconds() / self.limit_seconds)

    def learning_rate(self, step: int) -> float:
        """Returns the learning rate: linear warm-up, then cosine decay to 2 % of the peak."""
        warmup = min(1.0, (step + 1) / self.recipe.warmup_steps)
        cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, self.progress(step))))
        return self.recipe.learning_rate * warmup * (0.02 + 0.98 * cosine)

    def sequence_tokens(self, step: int) -> int:
        late = self.progress(step) >= 1 - self.recipe.full_context_share
        return CONTEXT_TOKENS if late else self.recipe.sequence_tokens


class Training:
    """A model in training: processes losses and averages the weights."""

    def __init__(self, model: nn.Module, recipe: Recipe, averages_buffers: bool) -> None:
        self.model = model
        self.recipe = recipe
        has_tables = not all(buffer.is_floating_point() for buffer in model.buffers())
        self.average = AveragedModel(
            model,
            multi_avg_fn=get_ema_multi_avg_fn(recipe.average_decay),
            use_buffers=averages_buffers and not has_tables,
        )
        self.balance = ExpertBalance(model)
        self.alignment = IndexerAlignment(model)
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        self._optimizers = _optimizers(model, recipe)

    def learn(self, loss: Tensor, step: int, learning_rate: float) -> None:
        """Applies the gradients of the scalar `loss` in step `step`, counted from 1."""
        (loss + self.alignment.loss()).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate
            optimizer.step()
            optimizer.zero_grad()
        self.balance.update(learning_rate * self.recipe.balance_ratio)
        if step > min(self.recipe.warmup_steps, self.recipe.steps // 2):
            self.average.update_parameters(self.model)
