"""Several residual streams per token: a sublayer reads them as one row and writes back to all.

    x, mixing = connection.collapse(streams)       # [T, n, D] -> [T, D]
    streams = connection.expand(sublayer(x), streams, mixing)

DeepSeek-V4 and GLM-5.3 mix the streams by a matrix whose rows and columns sum to one, HY-V4 keeps
them separate: FAMILIES has one row per family.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn


@dataclass(frozen=True)
class StreamFamily:
    """The differences between model families.

    is_mixed:      a doubly stochastic matrix mixes the streams between two sublayers
    adds_post_eps: adds eps to the weights with which a sublayer's output is written
    learned_head:  collapses the last streams with learned weights; otherwise takes their mean
    """

    is_mixed: bool = True
    adds_post_eps: bool = False
    learned_head: bool = True


# By model_type of a checkpoint's text configuration.
FAMILIES = {
    "deepseek_v4": StreamFamily(),
    "glm5_next_text": StreamFamily(learned_head=False),
    "hy_v4": StreamFamily(is_mixed=False, adds_post_eps=True),
}


@dataclass(frozen=True)
class StreamRule:
    """The streams of one model.

    post_factor:    upper limit of the weights with which a sublayer's output is written
    sinkhorn_steps: passes over columns, with passes over rows in between
    eps:            added to weights and to divisors
    norm_eps:       eps of the root mean square of a token's streams
    """

    family: StreamFamily
    num_streams: int
    hidden_size: int
    post_factor: float
    sinkhorn_steps: int
    eps: float
    norm_eps: float

    @classmethod
    def of_model(cls, config: Any, family: str | None = None) -> "StreamRule":
        """The rule of a model.

        config: of the text model, with transformers' names
        family: its model_type in the checkpoint, if the configuration has another one
        """
        return cls(
            family=FAMILIES[family or config.model_type],
            num_streams=config.hc_mult,
            hidden_size=config.hidden_size,
            post_factor=getattr(config, "hc_magnitude", 2.0),
            sinkhorn_steps=getattr(config, "hc_sinkhorn_iters", 0),
            eps=config.hc_eps,
            norm_eps=config.rms_norm_eps,
        )


class StreamMixing(NamedTuple):
    """Weights with which a sublayer's output is written, both fp32.

    post: [num_tokens, num_streams]
    comb: [num_tokens, num_streams, num_streams], from (first) and to; None: streams are not mixed
    """

    post: torch.Tensor
    comb: torch.Tensor | None


class StreamConnection(nn.Module):
    """Reads and writes the streams for one sublayer. Parameters are fp32, named as in released
    files: `fn`, `base` and `scale`; their rows are those of pre, post and comb."""

    def __init__(self, rule: StreamRule) -> None:
        super().__init__()
        self.rule = rule
        num = rule.num_streams
        self._sizes = [num, num, num * num] if rule.family.is_mixed else [num, num]
        rows = sum(self._sizes)
        self.fn = _fp32(rows, num * rule.hidden_size)
        self.base = _fp32(rows)
        self.scale = _fp32(len(self._sizes))

    def collapse(self, streams: torch.Tensor) -> tuple[torch.Tensor, StreamMixing]:
        """The input of the sublayer, and the weights for writing its output.

        streams: [num_tokens, num_streams, hidden_size]
        Returns [num_tokens, hidden_size] in the dtype of streams; sums are fp32.
        Source: Xie et al. 2026, mHC; transformers' DeepseekV4HyperConnection.
        """
        rule = self.rule
        parts = _normed_products(streams, self.fn, rule.norm_eps).split(self._sizes, dim=-1)
        bases = self.base.split(self._sizes)
        logits = [
            torch.addcmul(base, part, scale)
            for part, base, scale in zip(parts, bases, self.scale.unbind(), strict=True)
        ]
        pre = logits[0].sigmoid().add_(rule.eps)
        post = logits[1].sigmoid().mul_(rule.post_factor)
        if rule.family.adds_post_eps:
            post.add_(rule.eps)
        comb = None
        if rule.family.is_mixed:
            square = logits[2].unflatten(-1, (rule.num_streams, rule.num_streams))
            comb = doubly_stochastic(square, rule.sinkhorn_steps, rule.eps)
        return _weighted_sum(streams, pre), StreamMixing(post, comb)

    def expand(
        self, output: torch.Tensor, streams: torch.Tensor, mixing: StreamMixing
    ) -> torch.Tensor:
        """The streams after the sublayer: post_j * output + sum over i of comb[i, j] * streams_i.

        output: [num_tokens, hidden_size]
        Returns [num_tokens, num_streams, hidden_size] in the dtype of streams; sums are fp32.
        """
        kept = streams.float()
        if mixing.comb is not None:
            kept = torch.bmm(mixing.comb.transpose(1, 2), kept)
        written = torch.addcmul(kept, mixing.post.unsqueeze(-1), output.float().unsqueeze(1))
        return written.to(streams.dtype)


class StreamHead(nn.Module):
    """Collapses the streams after the last layer into one hidden state per token."""

    def __init__(self, rule: StreamRule) -> None:
        super().__init__()
        self.rule = rule
        if rule.family.learned_head:
            self.fn = _fp32(rule.num_streams, rule.num_streams * rule.hidden_size)
            self.base = _fp32(rule.num_streams)
            self.scale = _fp32(1)

    def forward(self, streams: torch.Tensor) -> torch.Tensor:
        """streams: [num_tokens, num_streams, hidden_size]. Returns [num_tokens, hidden_size]."""
        if not self.rule.family.learned_head:
            return streams.mean(dim=1)
        products = _normed_products(streams, self.fn, self.rule.norm_eps)
        weights = torch.addcmul(self.base, products, self.scale).sigmoid().add_(self.rule.eps)
        return _weighted_sum(streams, weights)


def doubly_stochastic(logits: torch.Tensor, steps: int, eps: float) -> torch.Tensor:
    """A matrix whose rows and columns sum to about one, by Sinkhorn and Knopp's iteration.

    logits: [num_tokens, n, n], fp32
    steps:  passes over columns; before each but the first, one over rows
    Returns a new tensor of the same shape.
    """
    comb = logits.softmax(dim=-1).add_(eps)
    comb.div_(comb.sum(dim=-2, keepdim=True).add_(eps))
    for _ in range(steps - 1):
        comb.div_(comb.sum(dim=-1, keepdim=True).add_(eps))
        comb.div_(comb.sum(dim=-2, keepdim=True).add_(eps))
    return comb


def _normed_products(streams: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Products of the normed streams of each token with rows of a weight: [num_tokens, rows]."""
    flat = streams.flatten(1).float()
    # Scales the products instead of normalizing a copy of the streams.
    factor = flat.square().mean(dim=-1, keepdim=True).add_(eps).rsqrt()
    return nn.functional.linear(flat, weight).mul_(factor)


def _weighted_sum(streams: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """weights: [num_tokens, num_streams], fp32. Returns [num_tokens, hidden_size]."""
    return torch.bmm(weights.unsqueeze(1), streams.float()).squeeze(1).to(streams.dtype)


def _fp32(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape, dtype=torch.float32), requires_grad=False)
