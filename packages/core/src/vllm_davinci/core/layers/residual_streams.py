"""Several residual streams per token: a sublayer reads them as one row and writes back to all.

    x, mixing = connection.collapse(streams)       # [T, n, D] -> [T, D]
    streams = connection.expand(sublayer(x), streams, mixing)

DeepSeek-V4 and GLM-5.3 mix the streams by a matrix whose rows and columns sum to one, HY-V4 keeps
them separate, Qwen3.8-Flash-Next reads them through gates of a low rank: FAMILIES has one row per
family, `connection` and `head` make its layers.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch_npu
from torch import nn
from vllm.model_executor.utils import set_weight_attrs

from vllm_davinci import operators
from vllm_davinci.core.components.fused_ops import fused_op


@dataclass(frozen=True)
class StreamFamily:
    """Properties in which the residual streams of model families differ.

    is_mixed:      a doubly stochastic matrix mixes the streams between two sublayers
    adds_post_eps: adds eps to the weights with which a sublayer's output is written
    learned_head:  collapses the last streams with learned weights; otherwise takes their mean
    is_gated:      each entry of a stream has a gate of its own, and there are no other norms
    """

    is_mixed: bool = True
    adds_post_eps: bool = False
    learned_head: bool = True
    is_gated: bool = False


# By model_type of a checkpoint's text configuration.
FAMILIES = {
    "deepseek_v4": StreamFamily(),
    "glm5_next_text": StreamFamily(learned_head=False),
    "hy_v4": StreamFamily(is_mixed=False, adds_post_eps=True),
    "qwen4_exp_text": StreamFamily(is_mixed=False, is_gated=True),
}


@dataclass(frozen=True)
class StreamRule:
    """The streams of one model.

    post_factor:    upper limit of the weights with which a sublayer's output is written
    sinkhorn_steps: passes over columns, with passes over rows in between
    eps:            added to weights and to divisors
    norm_eps:       eps of the root mean square of a token's streams
    rank:           of gates
    """

    family: StreamFamily
    num_streams: int
    hidden_size: int
    post_factor: float
    sinkhorn_steps: int
    eps: float
    norm_eps: float
    rank: int = 0

    @classmethod
    def of_model(cls, config: Any, family: str | None = None) -> "StreamRule":
        """The rule of a model.

        config: of the text model, with transformers' names
        family: its model_type in the checkpoint, if the configuration has another one
        """
        row = FAMILIES[family or config.model_type]
        return cls(
            family=row,
            num_streams=config.hc_count if row.is_gated else config.hc_mult,
            hidden_size=config.hidden_size,
            post_factor=getattr(config, "hc_magnitude", 2.0),
            sinkhorn_steps=getattr(config, "hc_sinkhorn_iters", 0),
            eps=0.0 if row.is_gated else config.hc_eps,
            norm_eps=config.rms_norm_eps,
            rank=config.hc_lowrank if row.is_gated else 0,
        )


class StreamMixing(NamedTuple):
    """Weights with which a sublayer's output is written, both fp32.

    post: [num_tokens, num_streams]
    comb: [num_tokens, num_streams, num_streams], from (first) and to; None: streams are not mixed
    """

    post: torch.Tensor
    comb: torch.Tensor | None


class StreamWriter(nn.Module):
    """Writes a sublayer's output to the streams."""

    def expand(
        self, output: torch.Tensor, streams: torch.Tensor, mixing: StreamMixing
    ) -> torch.Tensor:
        """The streams after the sublayer, as `operators.expand_streams` defines them.

        output: [num_tokens, hidden_size]
        """
        fused = fused_op(operators.expand_streams) or operators.expand_streams
        return fused(output, streams, mixing.post, mixing.comb)


class StreamConnection(StreamWriter):
    """Reads and writes the streams for one sublayer. Parameters are fp32, named as in released
    files: `fn`, `base` and `scale`; their rows are those of pre, post and comb."""

    gain: torch.Tensor
    scale_of_row: torch.Tensor
    addends: torch.Tensor
    factors: torch.Tensor
    sums: torch.Tensor | None
    eps: torch.Tensor | None

    def __init__(self, rule: StreamRule) -> None:
        super().__init__()
        self.rule = rule
        num, is_mixed = rule.num_streams, rule.family.is_mixed
        sizes = torch.tensor([num, num, num * num] if is_mixed else [num, num], device="cpu")
        self.fn = _fp32(int(sizes.sum()), num * rule.hidden_size)
        self.base = _fp32(int(sizes.sum()))
        self.scale = _fp32(len(sizes))
        post_eps = rule.eps if rule.family.adds_post_eps else 0.0
        constants = {
            "gain": torch.ones_like(self.fn[0]),
            "scale_of_row": torch.arange(len(sizes), device="cpu").repeat_interleave(sizes),
            "addends": _fp32_of([rule.eps, post_eps]).repeat_interleave(num),
            "factors": _fp32_of([1.0, rule.post_factor]).repeat_interleave(num),
            "sums": None,
            "eps": None,
        }
        if is_mixed:
            places = torch.arange(num * num)
            groups = torch.stack([places // num, places % num])
            is_same = groups.unsqueeze(1) == groups.unsqueeze(2)
            constants |= {"sums": is_same.float(), "eps": _fp32_of([rule.eps] * num * num)}
        for name, tensor in constants.items():
            here = None if tensor is None else tensor.to(self.fn.device)
            self.register_buffer(name, here, persistent=False)

    def collapse(self, streams: torch.Tensor) -> tuple[torch.Tensor, StreamMixing]:
        """The input of the sublayer, and the weights for writing its output.

        streams: [num_tokens, num_streams, hidden_size]
        Returns [num_tokens, hidden_size] in the dtype of streams; sums are fp32.
        """
        rule = self.rule
        weights = (
            self.fn, self.base, self.scale, self.scale_of_row, self.addends, self.factors,
            self.sums, self.eps,
        )  # fmt: skip
        if (fused := fused_op(operators.collapse_streams)) is not None:
            x, post, comb = fused(streams, self.gain, *weights, rule.norm_eps, rule.sinkhorn_steps)
            return x, StreamMixing(post, comb)
        flat = streams.flatten(1).float()
        normed = torch_npu.npu_rms_norm(flat, self.gain, rule.norm_eps)[0]
        both, comb = operators.streams.stream_weights(normed, *weights, rule.sinkhorn_steps)
        pre, post = both.chunk(2, dim=-1)
        return operators.streams.weighted_sum(flat, pre, streams.dtype), StreamMixing(post, comb)


class StreamHead(nn.Module):
    """Collapses the streams after the last layer into one hidden state per token."""

    gain: torch.Tensor

    def __init__(self, rule: StreamRule) -> None:
        super().__init__()
        self.rule = rule
        if rule.family.learned_head:
            self.fn = _fp32(rule.num_streams, rule.num_streams * rule.hidden_size)
            self.base = _fp32(rule.num_streams)
            self.scale = _fp32(1)
            self.register_buffer("gain", torch.ones_like(self.fn[0]), persistent=False)

    def forward(self, streams: torch.Tensor) -> torch.Tensor:
        """streams: [num_tokens, num_streams, hidden_size]. Returns [num_tokens, hidden_size]."""
        if not self.rule.family.learned_head:
            return streams.mean(dim=1)
        flat = streams.flatten(1).float()
        normed = torch_npu.npu_rms_norm(flat, self.gain, self.rule.norm_eps)[0]
        products = nn.functional.linear(normed, self.fn)
        weights = torch.addcmul(self.base, products, self.scale).sigmoid().add_(self.rule.eps)
        return operators.streams.weighted_sum(flat, weights, streams.dtype)


class StreamNorm(nn.Module):
    """Gemma's norm of each stream: a weight of zeros leaves its root mean square at one."""

    ones: torch.Tensor

    def __init__(self, rule: StreamRule) -> None:
        super().__init__()
        self._shape, self._eps = (rule.num_streams, rule.hidden_size), rule.norm_eps
        weight = torch.empty(rule.num_streams * rule.hidden_size)
        self.weight = nn.Parameter(weight, requires_grad=False)
        ones = torch.ones(rule.hidden_size, dtype=torch.float32)
        self.register_buffer("ones", ones, persistent=False)

    def forward(self, streams: torch.Tensor) -> torch.Tensor:
        """streams: [num_tokens, num_streams, hidden_size]. Returns a new tensor like it."""
        normed = torch_npu.npu_rms_norm(streams.float(), self.ones, self._eps)[0]
        return (normed * (self.weight.float() + 1).view(self._shape)).to(streams.dtype)


class GatedStreams(StreamWriter):
    """Reads the streams through a gate for each entry; writes with a weight for each stream.

    writes: False for the head after the last layer, whose `forward` only reads
    """

    def __init__(self, rule: StreamRule, writes: bool = True) -> None:
        super().__init__()
        self.rule = rule
        width = rule.num_streams * rule.hidden_size
        self._sizes = [rule.rank, rule.num_streams] if writes else [rule.rank]
        self.hc_norm = StreamNorm(rule)
        # Ranks have whole streams; released files have floats.
        self.down = nn.Linear(width, sum(self._sizes), bias=False).requires_grad_(False)
        self.up = nn.Linear(rule.rank, width, bias=False).requires_grad_(False)
        set_weight_attrs(self.down.weight, {"weight_loader": self._load_down})

    def _load_down(self, parameter: nn.Parameter, loaded: torch.Tensor) -> None:
        """Loads a part by its shard id: 0 for gates, 1 for the weights of outputs."""
        parameter.data.split(self._sizes)[getattr(loaded, "shard_id", 0)].copy_(loaded)

    def forward(self, streams: torch.Tensor) -> torch.Tensor:
        """Reads streams [num_tokens, num_streams, hidden_size] into [num_tokens, hidden_size]."""
        return self._read(streams)[0]

    def collapse(self, streams: torch.Tensor) -> tuple[torch.Tensor, StreamMixing]:
        """See StreamConnection."""
        x, post = self._read(streams)
        return x, StreamMixing(post[0].float().sigmoid().mul_(self.rule.post_factor), None)

    def _read(self, streams: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        normed, num = self.hc_norm(streams), self.rule.num_streams
        down, *post = (self.down(normed.flatten(1)) / num).split(self._sizes, dim=-1)
        gates = self.up(nn.functional.silu(down)).sigmoid().view_as(normed)
        return gates.mul_(normed).mean(dim=1), post


def connection(rule: StreamRule) -> "StreamConnection | GatedStreams":
    """Makes the layer that reads and writes the streams for one sublayer."""
    return GatedStreams(rule) if rule.family.is_gated else StreamConnection(rule)


def head(rule: StreamRule) -> "StreamHead | GatedStreams":
    """Makes the layer that collapses the streams after the last layer."""
    return GatedStreams(rule, writes=False) if rule.family.is_gated else StreamHead(rule)


def _fp32(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape, dtype=torch.float32), requires_grad=False)


def _fp32_of(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)  # fp32: the default is the model's dtype
