"""Compiled operators of the installed packages."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib.metadata import entry_points
from typing import Any

import torch
from torch import Generator, Tensor

from vllm_davinci import operators
from vllm_davinci.operators.calls.call import OperatorCall
from vllm_davinci.operators.calls.operands import (
    BFLOAT16,
    BLOCK_SIZE,
    CAUSAL,
    CAUSAL_MASK,
    STEPS,
    blocks_of,
    cos_sin,
    ends_of,
    gains,
    int8,
    integers,
    normal,
    scales,
    slots_of,
    table,
    weight,
    zeros,
)
from vllm_davinci.operators.calls.sizes import LatentSizes, ModelSizes

GROUP = "vllm_davinci.op_providers"
TOKENS = 16
VOCABULARY = 4096
EXPERTS, TOP_K = 4, 2  # this rank has all of them
ALL_TOKENS = 2**31 - 1
STREAMS = 4
# Arguments that are written in place, and so count as results.
WRITTEN = {
    "paged_attention": ("key_cache", "value_cache", "out"),
    "mla_preprocess": ("kv_c_cache", "k_pe_cache"),
    "rotate_pairs": ("x",),
    "compress_tokens": ("projected", "states"),
}
Row = tuple[str, str, Mapping[str, Any]]  # operator, step, operands


def calls(model: ModelSizes) -> Iterator[OperatorCall]:
    for provider in (entry.load() for entry in entry_points(group=GROUP)):
        present = provider.supported_ops()
        for name, step, operands in _rows(model):
            if name in present:
                yield OperatorCall(
                    f"compiled {name}", "several", f"{step}, bfloat16", operands,
                    _with_written(provider.load(name), WRITTEN.get(name, ())),
                    _with_written(getattr(operators, name), WRITTEN.get(name, ())),
                )  # fmt: skip


def _with_written(run: Callable[..., Any], written: tuple[str, ...]) -> Callable[..., Any]:
    def made(**arguments: Any) -> list[Tensor | None]:
        results = run(**arguments)
        listed = [] if results is None else [results] if isinstance(results, Tensor) else results
        return [*listed, *(arguments[each] for each in written)]

    return made


def _rows(model: ModelSizes) -> Iterator[Row]:
    said, hidden = f"{TOKENS} tokens", normal(TOKENS, model.hidden)
    norm = {"x": hidden, "weight": gains(model.hidden), "epsilon": model.epsilon}
    of_sum = {**norm, "residual": hidden}
    yield "rms_norm", said, norm
    yield "add_rms_norm", said, of_sum
    yield "add_rms_norm_dynamic_quant", said, of_sum
    given = {"scale": torch.tensor([0.03]), "offset": torch.tensor([7], dtype=torch.int32)}
    yield "add_rms_norm_quant", said, {**of_sum, "bias": None, **given}
    yield (
        "vocab_parallel_embedding", said,
        {
            "token_ids": integers(0, 2 * VOCABULARY, TOKENS),
            "weight": normal(VOCABULARY, model.hidden),
            "first_row": VOCABULARY // 2,
            "num_rows": VOCABULARY,
        },
    )  # fmt: skip
    yield "collapse_streams", said, _streams(model)
    yield (
        "expand_streams", said,
        {
            "output": hidden,
            "streams": normal(TOKENS, STREAMS, model.hidden),
            "post": scales(TOKENS, STREAMS, least=0.0, most=2.0),
            "comb": scales(TOKENS, STREAMS, STREAMS, least=0.0, most=0.5),
        },
    )  # fmt: skip
    if model.has_common:
        for name, operands in _rows_of_groups():
            yield name, said, operands
    if model.latent:
        yield "mla_preprocess", said, _latent(model, model.latent)
    else:
        yield "rotary_embedding", said, _rotary(model)
        for step in STEPS:
            yield "paged_attention", step, _paged(model, step)
    if model.all_experts:
        yield "experts", said, _experts(model)
        yield "experts_w8a8", said, _integer_experts(model)


def _streams(model: ModelSizes) -> dict[str, Any]:
    """Arguments for DeepSeek-V4's streams: all are mixed, with 20 Sinkhorn passes."""
    rows = torch.tensor([STREAMS, STREAMS, STREAMS**2])
    places = torch.arange(STREAMS**2)
    groups = torch.stack([places // STREAMS, places % STREAMS])
    width, num = STREAMS * model.hidden, int(rows.sum())
    return {
        "streams": normal(TOKENS, STREAMS, model.hidden),
        "gain": torch.ones(width),
        "fn": normal(num, width, dtype=torch.float32, scale=width**-0.5),
        "base": normal(num, dtype=torch.float32),
        "scale": scales(3, least=0.5, most=1.5),
        "scale_of_row": torch.arange(3).repeat_interleave(rows),
        "addends": torch.tensor([1e-6, 0.0]).repeat_interleave(STREAMS),
        "factors": torch.tensor([1.0, 2.0]).repeat_interleave(STREAMS),
        "sums": (groups.unsqueeze(1) == groups.unsqueeze(2)).float(),
        "eps": torch.full((STREAMS**2,), 1e-6),
        "norm_eps": model.epsilon,
        "sinkhorn_steps": 20,
    }


def _rows_of_groups() -> Iterator[tuple[str, dict[str, Any]]]:
    """Calls with DeepSeek-V4's sizes: overlapping groups of 4 tokens."""
    size, heads, rows, width, chosen = 512, 8, 4096, 640, 512
    numbers, index = integers(0, rows, TOKENS, width), normal(TOKENS, 64, 128)
    yield (
        "row_numbers",
        {
            "places": integers(0, 1024, TOKENS, width),
            "requests": torch.arange(TOKENS).unsqueeze(1),
            "block_table": integers(0, 512, TOKENS, 32, dtype=torch.int32),
            "rows_per_page": 32,
            "rows_per_block": 880,
        },
    )
    angles = cos_sin(TOKENS, 1, 64, dtype=torch.float32)
    yield "rotate_pairs", {"x": normal(TOKENS, heads, size), **angles}
    yield (
        "compress_tokens",
        {
            "projected": normal(TOKENS, 4 * size, dtype=torch.float32),
            "ape": normal(4, 2 * size, dtype=torch.float32),
            "places": torch.arange(TOKENS) % 4,
            "states": normal(rows, 4 * size, dtype=torch.float32),
            "numbers": torch.arange(TOKENS),
            "entries": integers(0, rows, TOKENS // 4, 8),
            "is_missing": torch.arange(8).expand(TOKENS // 4, 8) < 2,
            "overlaps": True,
            "at_once": 2,
        },
    )
    yield (
        "attend_to_rows",
        {
            "query": normal(TOKENS, heads, size),
            "rows": normal(rows, size),
            "numbers": numbers,
            "is_hidden": torch.arange(width).expand(TOKENS, width) > 600,
            "scale": size**-0.5,
            "sinks": normal(heads, dtype=torch.float32),
            "at_once": 5,
        },
    )
    yield (
        "choose_rows",
        {
            "query": index,
            "weights": normal(TOKENS, 64, dtype=torch.float32, scale=2**-6),
            "keys": normal(rows, 128, dtype=torch.float32),
            "places": torch.arange(rows),
            "num_visible": integers(chosen, rows, TOKENS, 1),
            "width": chosen,
            "at_once": 5,
        },
    )


def _rotary(model: ModelSizes) -> dict[str, Any]:
    return {
        "positions": integers(0, 512, TOKENS),
        "query": normal(TOKENS, model.heads * model.head_size),
        "key": normal(TOKENS, model.kv_heads * model.head_size),
        "cos_sin_cache": table(512, model.rotary_size),
        "head_size": model.head_size,
        "is_neox_style": True,
    }


def _paged(model: ModelSizes, step: str) -> dict[str, Any]:
    queries, lengths = STEPS[step]
    kv, blocks = (model.kv_heads, model.head_size), blocks_of(lengths)
    cache, rows = normal(blocks.numel(), BLOCK_SIZE, *kv), normal(sum(queries), *kv)
    return {
        "query": normal(sum(queries), model.heads, model.head_size),
        "key": rows,
        "value": rows,
        "key_cache": cache,
        "value_cache": cache,
        "slot_mapping": slots_of(queries, lengths),
        "block_table": blocks,
        "actual_seq_lengths_q": ends_of(queries),
        "seq_lens": lengths,
        "mask": CAUSAL_MASK,
        "scale": model.head_size**-0.5,
        "sparse_mode": CAUSAL,
        "pre_tokens": ALL_TOKENS,
        "next_tokens": ALL_TOKENS,
        "out": zeros(sum(queries), model.heads, model.head_size),
    }


def _latent(model: ModelSizes, latent: LatentSizes) -> dict[str, Any]:
    lengths = [130] * TOKENS
    blocks = blocks_of(lengths).numel(), BLOCK_SIZE, 1
    head = latent.nope + latent.rope
    return {
        "hidden_states": normal(TOKENS, model.hidden),
        "a_weight": weight(model.hidden, latent.query_rank + latent.rank + latent.rope),
        "q_a_norm": gains(latent.query_rank),
        "q_b_weight": weight(latent.query_rank, model.heads * head),
        "kv_a_norm": gains(latent.rank),
        "W_UK": weight(model.heads, latent.nope, latent.rank),
        **cos_sin(TOKENS, 1, 1, latent.rope),
        "slot_mapping": slots_of([1] * TOKENS, lengths).long(),
        "kv_c_cache": zeros(*blocks, latent.rank),
        "k_pe_cache": zeros(*blocks, latent.rope),
        "q_epsilon": model.epsilon,
        "kv_epsilon": model.epsilon,
        "num_decode_tokens": TOKENS,
    }


def _assigned(model: ModelSizes) -> dict[str, Any]:
    def ids(generator: Generator) -> Tensor:
        return torch.rand(TOKENS, EXPERTS, generator=generator).topk(TOP_K, -1)[1].int()

    return {
        "x": normal(TOKENS, model.hidden),
        "topk_weights": scales(TOKENS, TOP_K, least=0.0, most=1.0, dtype=BFLOAT16),
        "topk_ids": ids,
        "first_expert": 0,
        "num_experts": EXPERTS,
    }


def _experts(model: ModelSizes) -> dict[str, Any]:
    columns = model.expert_intermediate
    return {
        **_assigned(model),
        "gate_up": weight(EXPERTS, model.hidden, 2 * columns),
        "down": weight(EXPERTS, columns, model.hidden),
    }


def _integer_experts(model: ModelSizes) -> dict[str, Any]:
    columns, small = model.expert_intermediate, partial(scales, least=1e-4, most=3e-4)
    return {
        **_assigned(model),
        "gate_up": int8(EXPERTS, model.hidden, 2 * columns),
        "gate_up_scale": small(EXPERTS, 2 * columns),
        "down": int8(EXPERTS, columns, model.hidden),
        "down_scale": small(EXPERTS, model.hidden, dtype=BFLOAT16),
    }
