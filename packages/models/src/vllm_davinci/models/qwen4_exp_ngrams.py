"""Embeddings of n-grams in Qwen3.8-Flash-Next: hashed tables, gated into the residual streams."""

from collections.abc import Iterable, Mapping
from itertools import accumulate
from math import ceil, isqrt
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_gather,
)
from vllm.model_executor.layers.linear import MergedColumnParallelLinear

from vllm_davinci.core.attention.compressed.row_cache import RowCacheLayer, RowKind
from vllm_davinci.core.attention.compressed.step_tokens import StepTokens
from vllm_davinci.core.checkpoint.check import quantization_config
from vllm_davinci.core.errors import RELEASE, CheckpointError, UnsupportedFeatureError
from vllm_davinci.core.layers.residual_streams import StreamNorm, StreamRule

# Pages of the convolution's rows that hold a block's tokens: a row has all streams.
CONV_PAGES = 8
# Most elements of gathered rows at once.
ELEMENTS = 2**24
_MASK = 2**64 - 1
_LAYERS_APART = 10007


def _splitmix64(value: int) -> int:
    """Source: Steele et al. 2014, Fast Splittable Pseudorandom Number Generators."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def multipliers(config: Any, table: int) -> list[int]:
    """Odd factors of the ids of an n-gram, the newest first; products fit into 63 bits."""
    half = max(1, (2**63 - 1) // max(config.vocab_size, 1) // 2)
    seed = config.seed + _LAYERS_APART * table
    mixed = (
        _splitmix64((seed + 0x9E3779B97F4A7C15 * number) & _MASK)
        for number in range(1, config.ngram_size + 1)
    )
    return [2 * (each % half) + 1 for each in mixed]


def primes_from(start: int, first: int, count: int) -> list[int]:
    """Returns `count` primes from `start` on, after leaving out the `first` smallest ones."""
    found: list[int] = []
    number = start
    while len(found) < first + count:
        if number > 1 and all(number % each for each in range(2, isqrt(number) + 1)):
            found.append(number)
        number += 1
    return found[first:]


def has_fp8_rows(config: Any, quantization: Mapping[str, Any]) -> bool:
    """True if the checkpoint's tables hold fp8, by vLLM's rule.

    config:       of the text model; `ple_embedding_dtype` takes precedence
    quantization: config.json's section of that name
    Raises UnsupportedFeatureError for another dtype.
    """
    stated = getattr(config, "ple_embedding_dtype", None)
    if stated not in (None, "float8_e4m3fn"):
        raise UnsupportedFeatureError(
            f"config.json has ple_embedding_dtype {stated!r}, and {RELEASE} reads tables of "
            "n-grams in 16 bits or float8_e4m3fn. Choose another checkpoint."
        )
    keys = ("modules_to_not_convert", "ignored_layers")
    kept = [name for key in keys for name in quantization.get(key) or ()]
    is_fp8 = quantization.get("quant_method") == "fp8"
    return stated is not None or (is_fp8 and not any("ngram_embedding" in name for name in kept))


class NGramTable(nn.Module):
    """One layer's tables, each of a hash. Tensor-parallel ranks have whole tables.

    table:  number of the layer among those with tables; rank: one of `ranks`
    is_fp8: keeps rows in 8 bits: these NPUs have no fp8, and a lookup finds each byte's value
    """

    loads_shards = True  # whose rows are not divided as ranks are

    def __init__(
        self, config: Any, table: int, rank: int, ranks: int, is_fp8: bool = False
    ) -> None:
        super().__init__()
        orders, per_order = config.ngram_size - 1, config.heads_per_ngram
        num_tables = orders * per_order
        if num_tables % ranks:
            raise UnsupportedFeatureError(
                f"--tensor-parallel-size {ranks} does not divide the model's {num_tables} tables "
                f"of n-grams, and {RELEASE} does not divide a table. Use a divisor."
            )
        sizes = primes_from(config.ngram_vocab_size_base, table * num_tables, num_tables)
        ends = list(accumulate(sizes))
        padding = config.make_ngram_vocab_size_divisible_by
        padded = ceil(ends[-1] / padding) * padding
        self._shard_rows = ceil(padded / config.split_ngram_parts)
        first = rank * num_tables // ranks
        own = slice(first, first + num_tables // ranks)
        self._start, self._end = (0, *ends)[own.start], ends[own.stop - 1]
        self._factors = multipliers(config, table)
        starts = (end - size - self._start for end, size in zip(ends, sizes, strict=True))
        orders_of = (number // per_order for number in range(num_tables))
        self._tables = list(zip(orders_of, sizes, starts, strict=True))[own]
        size = config.ple_embed_dim // num_tables
        rows = torch.empty(self._end - self._start, size, dtype=torch.int8 if is_fp8 else None)
        self.weight = nn.Parameter(rows, requires_grad=False)
        self.values: torch.Tensor | None
        self.register_buffer("values", None, persistent=False)
        if is_fp8:
            self.weight_scale = nn.Parameter(torch.empty(1), requires_grad=False)
            codes = torch.arange(-128, 128, dtype=torch.int8, device="cpu")
            values = codes.view(torch.float8_e4m3fn).to(self.weight_scale.dtype)
            self.values = values.to(self.weight_scale.device)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids: [num_tokens, ngram_size], int64, the newest first, as `inside_texts` gives them

        Returns this rank's columns: [num_tokens, ple_embed_dim / ranks].
        """
        newest, *older = (each * by for each, by in zip(ids.unbind(1), self._factors, strict=True))
        hashes = list(accumulate(older, _xor, initial=newest))[1:]
        rows = torch.stack(
            [hashes[order] % size + start for order, size, start in self._tables], dim=1
        )
        found = self.weight.index_select(0, rows.flatten()).view(len(ids), -1)
        if self.values is None:
            return found
        values = self.values.index_select(0, found.flatten().int() + 128)
        return values.view(found.shape) * self.weight_scale

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Copies this rank's rows of a released file's shards, `shard_N.weight`, and their scale.

        Raises CheckpointError for rows of another dtype than config.json's.
        """
        loaded = {"weight"}
        for name, rows in weights:
            if name == "weight_scale" and self.values is not None:
                self.weight_scale.copy_(rows.view(1))
                loaded.add(name)
                continue
            if (rows.dtype == torch.float8_e4m3fn) != (self.values is not None):
                raise CheckpointError(
                    f"{name} of n-grams holds {rows.dtype}, and config.json (quantization_config, "
                    "ple_embedding_dtype) says otherwise. Copy config.json again."
                )
            if self.values is not None:
                rows = rows.view(torch.int8)
            start = self._shard_rows * int(name.removeprefix("shard_").partition(".")[0])
            low, high = max(start, self._start), min(start + len(rows), self._end)
            if low < high:
                self.weight[low - self._start : high - self._start].copy_(
                    rows[low - start : high - start]
                )
        return loaded


def _xor(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Bitwise exclusive or of integers, by operators whose dtypes are documented."""
    common = first.bitwise_and(second)
    return (first - common) + (second - common)


def inside_texts(ids: torch.Tensor, end: int) -> torch.Tensor:
    """Replaces ids before an end of text by it. ids: [n, ngram_size], the newest first."""
    newest, *older = ids.unbind(1)
    kept, is_after = [newest], torch.zeros_like(newest, dtype=torch.bool)
    for each in older:
        is_after = is_after | (each == end)
        kept.append(each.masked_fill(is_after, end))
    return torch.stack(kept, dim=1)


class NGramLayer(nn.Module):
    """Adds embeddings of n-grams to all streams, and a causal convolution of them."""

    def __init__(
        self, config: Any, vllm_config: VllmConfig, rule: StreamRule, table: int, prefix: str
    ) -> None:
        super().__init__()
        self._shape = rule.num_streams, rule.hidden_size
        width = rule.num_streams * rule.hidden_size
        ranks = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
        stored = quantization_config(vllm_config.model_config.hf_config.to_dict())
        self.table = NGramTable(config, table, *ranks, has_fp8_rows(config, stored))
        self._sizes = [width, rule.hidden_size]
        self.kv_proj = MergedColumnParallelLinear(
            config.ple_embed_dim,
            self._sizes,
            bias=False,
            quant_config=vllm_config.quant_config,
            disable_tp=True,
            prefix=f"{prefix}.kv_proj",
        )
        self.norm_key, self.norm_query, self.norm_conv = (StreamNorm(rule) for _ in range(3))
        taps, self._dilation = config.ple_conv_kernel_size, config.ngram_size
        self.conv1d: Any = nn.Module()
        self.conv1d.weight = nn.Parameter(torch.empty(width, 1, taps), requires_grad=False)
        kind = RowKind(
            width,
            vllm_config.model_config.dtype,
            window=(taps - 1) * self._dilation + 1,
            pages=CONV_PAGES,
        )
        self.inputs = RowCacheLayer(kind, f"{prefix}.inputs")

    def forward(
        self, streams: torch.Tensor, ids: torch.Tensor, step: StepTokens | None
    ) -> torch.Tensor:
        """The streams with embeddings added: a new tensor.

        streams: [num_tokens, num_streams, hidden_size]
        ids:     [num_tokens, ngram_size], as `inside_texts` gives them
        step:    None in a profile run
        """
        embedded = tensor_model_parallel_all_gather(self.table(ids))
        key, value = self.kv_proj(embedded)[0].split(self._sizes, dim=-1)
        key = self.norm_key(key.reshape(streams.shape))
        scores = (key * self.norm_query(streams)).sum(dim=-1) / self._shape[1] ** 0.5
        sizes = scores.abs().clamp(min=1e-6)
        signs = scores.gt(0).to(scores.dtype) - scores.lt(0).to(scores.dtype)
        gates = (signs * sizes * sizes.rsqrt()).sigmoid()
        values = gates.unsqueeze(-1) * value.unsqueeze(1)
        normed = self.norm_conv(values).flatten(1)
        streams = streams + values
        if step is not None:
            num_tokens = step.num_tokens
            self.inputs.write(step, normed[:num_tokens])
            at_once = max(1, ELEMENTS // (normed.shape[1] * self.conv1d.weight.shape[2]))
            for start in range(0, num_tokens, at_once):
                part = slice(start, min(start + at_once, num_tokens))
                tokens = step.all.positions[part], step.all.requests[part]
                added = self._convolved(*tokens).to(streams.dtype)
                streams[part] += added.view(-1, *self._shape)
        return streams

    def _convolved(self, positions: torch.Tensor, requests: torch.Tensor) -> torch.Tensor:
        """Returns [n, num_streams * hidden_size], fp32. positions, requests: [n], as in `Tokens`"""
        weight = self.conv1d.weight.squeeze(1).float()
        places = torch.arange(1 - weight.shape[1], 1, device=weight.device) * self._dilation
        positions = positions.unsqueeze(1) + places
        numbers = self.inputs.numbers(positions.clamp(min=0), requests.unsqueeze(1))
        rows = self.inputs.rows.index_select(0, numbers.flatten()).view(*numbers.shape, -1).float()
        rows.masked_fill_((positions < 0).unsqueeze(2), 0)  # which may be uninitialized
        return nn.functional.silu((rows * weight.t()).sum(dim=1))
