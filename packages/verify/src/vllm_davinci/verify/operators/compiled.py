"""Compiled operators of vllm-davinci-kernels, where it is installed, and its definitions."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

import torch
from torch import Generator, Tensor

from vllm_davinci.verify.operators.attention import STEPS, causal_mask
from vllm_davinci.verify.operators.call import OperatorCall
from vllm_davinci.verify.operators.operands import (
    BFLOAT16,
    BLOCK_SIZE,
    blocks_of,
    cos_sin,
    ends_of,
    gains,
    int8,
    normal,
    scales,
    slots_of,
    weight,
)
from vllm_davinci.verify.operators.shapes import LatentSizes, ModelSizes

GROUP = "vllm_davinci.op_providers"
TOKENS = 16
VOCABULARY = 4096
ALL_TOKENS = 2**31 - 1
Make = Callable[[Generator], dict[str, Any]]


def calls(model: ModelSizes) -> Iterator[OperatorCall]:
    for provider in (entry.load() for entry in entry_points(group=GROUP)):
        package = getattr(provider, "__name__", "")
        if importlib.util.find_spec(f"{package}.reference") is None:
            continue
        reference = import_module(f"{package}.reference")
        present = provider.supported_ops()
        for name, step, written, make in _operands(model):
            if name in present:
                function, definition = provider.load(name), getattr(reference, name)
                yield _call(name, step, function, definition, written, make)


def _call(
    name: str,
    step: str,
    function: Callable[..., Any],
    definition: Callable[..., Any],
    written: tuple[str, ...],
    make: Make,
) -> OperatorCall:
    """written: arguments that are results, too"""

    def with_written(run: Callable[..., Any], **arguments: Any) -> list[Tensor | None]:
        results = run(**arguments)
        listed = [] if results is None else [results] if isinstance(results, Tensor) else results
        return [*listed, *(arguments[each] for each in written)]

    return OperatorCall(
        f"compiled {name}", "several", f"{step}, bfloat16", make,
        lambda **arguments: with_written(function, **arguments),
        lambda **arguments: with_written(definition, **arguments),
    )  # fmt: skip


def _operands(model: ModelSizes) -> Iterator[tuple[str, str, tuple[str, ...], Make]]:
    """Name, step, arguments written in place, and arguments of each operator of the model."""
    said = f"{TOKENS} tokens"

    def norm(generator: Generator) -> dict[str, Any]:
        return {
            "x": normal(generator, TOKENS, model.hidden),
            "residual": normal(generator, TOKENS, model.hidden),
            "weight": gains(generator, model.hidden),
            "epsilon": model.epsilon,
        }

    def plain_norm(generator: Generator) -> dict[str, Any]:
        return {name: each for name, each in norm(generator).items() if name != "residual"}

    def static_norm(generator: Generator) -> dict[str, Any]:
        return {**norm(generator), "bias": None, "scale": torch.tensor([0.03]),
                "offset": torch.tensor([7], dtype=torch.int32)}  # fmt: skip

    def vocabulary(generator: Generator) -> dict[str, Any]:
        return {
            "token_ids": torch.randint(0, 2 * VOCABULARY, (TOKENS,), generator=generator),
            "weight": normal(generator, VOCABULARY, model.hidden),
            "first_row": VOCABULARY // 2,
            "num_rows": VOCABULARY,
        }

    yield "rms_norm", said, (), plain_norm
    yield "add_rms_norm", said, (), norm
    yield "add_rms_norm_dynamic_quant", said, (), norm
    yield "add_rms_norm_quant", said, (), static_norm
    yield "vocab_parallel_embedding", said, (), vocabulary
    if model.latent is None:
        yield "rotary_embedding", said, (), lambda generator: _rotary(model, generator)
        for step in STEPS:
            yield (
                "paged_attention",
                step,
                ("key_cache", "value_cache", "out"),
                lambda generator, step=step: _paged(model, step, generator),  # type: ignore[misc]
            )
    else:
        yield (
            "mla_preprocess",
            said,
            ("kv_c_cache", "k_pe_cache"),
            lambda generator: _latent(model, model.latent, generator),  # type: ignore[arg-type]
        )
    if model.all_experts:
        yield "experts", said, (), lambda generator: _experts(model, generator, quantized=False)
        yield "experts_w8a8", said, (), lambda generator: _experts(model, generator, quantized=True)


def _rotary(model: ModelSizes, generator: Generator) -> dict[str, Any]:
    angles = torch.rand(512, model.rotary_size // 2, generator=generator) * 6.28
    return {
        "positions": torch.randint(0, 512, (TOKENS,), generator=generator),
        "query": normal(generator, TOKENS, model.heads * model.head_size),
        "key": normal(generator, TOKENS, model.kv_heads * model.head_size),
        "cos_sin_cache": torch.cat([angles.cos(), angles.sin()], 1).to(BFLOAT16),
        "head_size": model.head_size,
        "is_neox_style": True,
    }


def _paged(model: ModelSizes, step: str, generator: Generator) -> dict[str, Any]:
    queries, lengths = STEPS[step]
    table, blocks = blocks_of(generator, lengths)
    kv = model.kv_heads, model.head_size
    return {
        "query": normal(generator, sum(queries), model.heads, model.head_size),
        "key": normal(generator, sum(queries), *kv),
        "value": normal(generator, sum(queries), *kv),
        "key_cache": normal(generator, blocks, BLOCK_SIZE, *kv),
        "value_cache": normal(generator, blocks, BLOCK_SIZE, *kv),
        "slot_mapping": slots_of(table, queries, lengths),
        "block_table": table,
        "actual_seq_lengths_q": ends_of(queries),
        "seq_lens": lengths,
        "mask": causal_mask(),
        "scale": model.head_size**-0.5,
        "sparse_mode": 3,
        "pre_tokens": ALL_TOKENS,
        "next_tokens": ALL_TOKENS,
        "out": torch.zeros(sum(queries), model.heads, model.head_size, dtype=BFLOAT16),
    }


def _latent(model: ModelSizes, latent: LatentSizes, generator: Generator) -> dict[str, Any]:
    lengths = [130] * TOKENS
    table, blocks = blocks_of(generator, lengths)
    cos, sin = cos_sin(generator, TOKENS, 1, 1, latent.rope)
    head = latent.nope + latent.rope
    return {
        "hidden_states": normal(generator, TOKENS, model.hidden),
        "a_weight": weight(generator, model.hidden, latent.query_rank + latent.rank + latent.rope),
        "q_a_norm": gains(generator, latent.query_rank),
        "q_b_weight": weight(generator, latent.query_rank, model.heads * head),
        "kv_a_norm": gains(generator, latent.rank),
        "W_UK": weight(generator, model.heads, latent.nope, latent.rank),
        "cos": cos,
        "sin": sin,
        "slot_mapping": slots_of(table, [1] * TOKENS, lengths).long(),
        "kv_c_cache": torch.zeros(blocks, BLOCK_SIZE, 1, latent.rank, dtype=BFLOAT16),
        "k_pe_cache": torch.zeros(blocks, BLOCK_SIZE, 1, latent.rope, dtype=BFLOAT16),
        "q_epsilon": model.epsilon,
        "kv_epsilon": model.epsilon,
        "num_decode_tokens": TOKENS,
    }


def _experts(model: ModelSizes, generator: Generator, quantized: bool) -> dict[str, Any]:
    """Few experts, of which this rank has all."""
    count, columns = 4, model.expert_intermediate
    scores = torch.rand(TOKENS, count, generator=generator)
    named = {
        "x": normal(generator, TOKENS, model.hidden),
        "topk_weights": torch.rand(TOKENS, 2, generator=generator).to(BFLOAT16),
        "topk_ids": scores.topk(2, -1)[1].int(),
    }
    rest = {"first_expert": 0, "num_experts": count}
    if not quantized:
        up = weight(generator, count, model.hidden, 2 * columns)
        return {**named, "gate_up": up, "down": weight(generator, count, columns, model.hidden),
                **rest}  # fmt: skip
    return {
        **named,
        "gate_up": int8(generator, count, model.hidden, 2 * columns),
        "gate_up_scale": scales(generator, count, 2 * columns, least=1e-4, most=3e-4),
        "down": int8(generator, count, columns, model.hidden),
        "down_scale": scales(generator, count, model.hidden, least=1e-4, most=3e-4).to(BFLOAT16),
        **rest,
    }
