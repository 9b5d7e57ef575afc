"""Pairs of modules between which channel scales can move without changing the model's output.

In a pair, the output of a norm or linear layer reaches the readers, which are linear layers, at
most through products with other values. Dividing a channel in the source and multiplying it in the
readers leaves the model unchanged. So outliers of activations move into weights (SmoothQuant, Xiao
et al. 2023; AWQ, Lin et al. 2024).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

# The norms of a decoder layer (the first name that exists), and the linear layers that read each.
_NORMS = {
    "self_attn": ("input_layernorm",),
    "mlp": ("pre_feedforward_layernorm", "post_attention_layernorm"),
}
_READERS = {
    "self_attn": (
        *("q_proj", "k_proj", "v_proj", "q_a_proj", "kv_a_proj_with_mqa"),
        *("indexer.wk", "indexer.weights_proj"),
    ),
    "mlp": ("gate_proj", "up_proj"),
}
_QUERY_READERS = ("q_b_proj", "indexer.wq_b")
# Tolerated change of logits, relative to their spread, when scales move: fp32 in another order.
_TOLERANCE = 1e-3
_PROBE_TOKENS = 64


@dataclass(frozen=True)
class Pair:
    """A module, the linear layers that read its output, and the mapping of channels.

    kind:    "norm", "value" or "up", for reports
    source:  name of the module whose output channels are divided
    readers: names of the linear layers whose input channels are multiplied; they share one input
    rows:    int64 [number of scales], the source row that each scale divides
    columns: int64 [in_features of a reader], the scale of each input channel
    """

    kind: str
    source: str
    readers: tuple[str, ...]
    rows: torch.Tensor
    columns: torch.Tensor

    def of_source(self, scales: torch.Tensor, size: int) -> torch.Tensor:
        """Returns the factor of each row of the source, fp32 [size]. scales: [number of scales]"""
        factors = torch.ones(size)
        factors[self.rows] = 1 / scales
        return factors

    def of_readers(self, scales: torch.Tensor) -> torch.Tensor:
        """Returns the factor of each input channel of the readers, fp32 [in_features]."""
        return scales[self.columns]

    def largest(self, of_columns: torch.Tensor) -> torch.Tensor:
        """Returns the largest value among each scale's channels. of_columns: [in_features]"""
        found = torch.zeros(len(self.rows))
        return found.scatter_reduce(0, self.columns, of_columns, "amax")


def find_pairs(model: nn.Module) -> list[Pair]:
    """Finds pairs by transformers' names in decoders; `keeping` tests them."""
    found: list[Pair] = []
    for name, module in model.named_modules():
        for part in _NORMS:
            if isinstance(getattr(module, part, None), nn.Module):
                found += _of_norm(name, module, part)
        found += [
            *_of_values(name, module),
            *_of_mlp(name, module),
            *_of_latent_query(name, module),
        ]
    return found


def _of_norm(name: str, layer: nn.Module, part: str) -> Iterator[Pair]:
    norm = next((each for each in _NORMS[part] if hasattr(layer, each)), None)
    block = getattr(layer, part)
    # Routers and all experts of a layer read one norm, and no single set of scales suits them all.
    if norm is None or hasattr(block, "experts"):
        return
    yield from _of_readers(
        f"{name}.{norm}", getattr(layer, norm), f"{name}.{part}", block, _READERS[part]
    )


def _of_latent_query(name: str, attention: nn.Module) -> Iterator[Pair]:
    norm = getattr(attention, "q_a_layernorm", None)
    if norm is not None:
        yield from _of_readers(f"{name}.q_a_layernorm", norm, name, attention, _QUERY_READERS)


def _of_readers(
    name: str, norm: nn.Module, prefix: str, block: nn.Module, names: Sequence[str]
) -> Iterator[Pair]:
    """The pair of a norm and its readers: those of the named linear layers that a block has."""
    layers = {f"{prefix}.{each}": _linear(block, each) for each in names}
    readers = [each for each, layer in layers.items() if layer is not None]
    size = getattr(norm, "weight", torch.empty(0)).numel()
    if readers and all(each is None or each.in_features == size for each in layers.values()):
        yield _plain("norm", name, readers, size)


def _of_mlp(name: str, mlp: nn.Module) -> Iterator[Pair]:
    if any(_linear(mlp, each) is None for each in ("gate_proj", "up_proj", "down_proj")):
        return
    down = _linear(mlp, "down_proj")
    assert down is not None
    yield _plain("up", f"{name}.up_proj", [f"{name}.down_proj"], down.in_features)


def _of_values(name: str, attention: nn.Module) -> Iterator[Pair]:
    """The pair of values and output projection: several query heads read one head's values."""
    output = _linear(attention, "o_proj")
    if output is None:
        return
    channels = torch.arange(output.in_features)
    reader = (f"{name}.o_proj",)
    if (latent := _linear(attention, "kv_b_proj")) is not None:
        width = getattr(attention, "v_head_dim", 0)
        if not width or output.in_features % width:
            return
        heads = output.in_features // width
        keys = latent.out_features // heads - width  # rows before the values of a head
        rows = channels + keys * (channels // width + 1)
        yield Pair("value", f"{name}.kv_b_proj", reader, rows, channels)
    elif (value := _linear(attention, "v_proj")) is not None:
        width = getattr(attention, "head_dim", 0)
        if not width or value.out_features % width or output.in_features % value.out_features:
            return
        heads = output.in_features // value.out_features  # query heads per value head
        columns = channels // width // heads * width + channels % width
        rows = torch.arange(value.out_features)
        yield Pair("value", f"{name}.v_proj", reader, rows, columns)


def _plain(kind: str, source: str, readers: Sequence[str], size: int) -> Pair:
    channels = torch.arange(size)
    return Pair(kind, source, tuple(readers), channels, channels)


def _linear(module: nn.Module, name: str) -> nn.Linear | None:
    child: object = module
    for part in name.split("."):
        child = getattr(child, part, None)
    return child if isinstance(child, nn.Linear) else None


@torch.no_grad()
def fold(model: nn.Module, pair: Pair, scales: torch.Tensor) -> None:
    """Moves scales in place, in the model's weights and biases. scales: fp32 [number of scales]"""
    for name, each in folds(model, [(pair, scales)]).items():
        parameter = model.get_parameter(name)
        parameter.copy_(each.applied(parameter))


@torch.no_grad()
def keeping(model: nn.Module, pairs: list[Pair], window: torch.Tensor) -> tuple[list[Pair], str]:
    """The pairs whose scales can move without a change, and why others cannot (empty if none).

    Tests each kind in all layers at once, with scales between 1/2 and 2, on the start of a window.
    A norm that multiplies by 1 + weight, another reader of a norm, or a function after the values
    changes the logits, whatever the names suggest.
    window: int64 [1, tokens]
    """
    tokens = window[:, :_PROBE_TOKENS]
    expected = model(input_ids=tokens, use_cache=False).logits
    generator = torch.Generator().manual_seed(0)
    kept: set[str] = set()
    refused: list[str] = []
    for kind in dict.fromkeys(pair.kind for pair in pairs):
        tried = [pair for pair in pairs if pair.kind == kind]
        scales = [
            torch.rand(len(pair.rows), generator=generator).mul(2).sub(1).exp2() for pair in tried
        ]
        for pair, each in zip(tried, scales, strict=True):
            fold(model, pair, each)
        moved = model(input_ids=tokens, use_cache=False).logits
        for pair, each in zip(tried, scales, strict=True):
            fold(model, pair, 1 / each)
        if (moved - expected).abs().mean() <= _TOLERANCE * expected.std():
            kept.add(kind)
        else:
            refused.append(
                f"{len(tried)} pairs of kind {kind}, which would change what the model computes"
            )
    return [pair for pair in pairs if pair.kind in kept], "; ".join(refused)


@dataclass(frozen=True)
class Fold:
    """The factors of one tensor. rows: fp32 [out], columns: fp32 [in]; None: ones"""

    rows: torch.Tensor | None = None
    columns: torch.Tensor | None = None

    def applied(self, tensor: torch.Tensor) -> torch.Tensor:
        """Applies factors in fp32. tensor: weight [out, in], or bias or norm's weight [out]"""
        result = tensor.to(torch.float32)
        if self.rows is not None:
            result = result * (self.rows if result.dim() == 1 else self.rows.unsqueeze(1))
        return result if self.columns is None else result * self.columns


def folds(model: nn.Module, moved: Iterable[tuple[Pair, torch.Tensor]]) -> dict[str, Fold]:
    """Tensor -> its factors from moved scales. A module has at most one fold as source and one as
    reader."""
    found: dict[str, Fold] = {}
    for pair, scales in moved:
        source = dict(model.get_submodule(pair.source).named_parameters())
        rows = pair.of_source(scales, len(source["weight"]))
        for part in source:
            name = f"{pair.source}.{part}"
            found[name] = replace(found.get(name, Fold()), rows=rows)
        for reader in pair.readers:
            name = f"{reader}.weight"
            found[name] = replace(found.get(name, Fold()), columns=pair.of_readers(scales))
    return found
