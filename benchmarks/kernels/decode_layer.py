"""One decode layer of DeepSeek-V3 on one device: torch_npu's operators and our compiled stages."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch_npu

import vllm_davinci.kernels

EPSILON = 1e-6

# Stages by name, in a layer's order. `norm` returns the sum, and its norm for `preprocess`.
Stages = dict[str, Callable[..., Any]]


@dataclass(frozen=True)
class Sizes:
    """Sizes of a layer on one of two TP ranks, named as in DeepSeek-V3's config.json.

    One device cannot have a whole layer: attention supports at most 64 query heads per cache head.
    """

    hidden: int = 7168
    heads: int = 64
    q_lora_rank: int = 1536
    kv_lora_rank: int = 512
    nope: int = 128
    rope: int = 64
    value: int = 128
    experts: int = 256
    intermediate: int = 2048
    top_k: int = 8
    groups: int = 8
    chosen_groups: int = 4
    scaling_factor: float = 2.5
    block_size: int = 128
    context: int = 1024


def made(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Allocates device memory without initializing it."""
    return torch.empty(sizes, dtype=dtype, device="npu")


class Layer:
    """The layer's weights and the step's inputs: caches, lengths, rows."""

    def __init__(self, num_tokens: int) -> None:
        s = self.sizes = Sizes()
        self.x, self.residual = made(num_tokens, s.hidden), made(num_tokens, s.hidden)
        self.input_norm, self.post_norm = made(s.hidden), made(s.hidden)
        # Linear weights are stored as [out, in] and used transposed.
        self.a_weight = made(s.q_lora_rank + s.kv_lora_rank + s.rope, s.hidden).t()
        self.q_a_norm, self.kv_a_norm = made(s.q_lora_rank), made(s.kv_lora_rank)
        self.q_b_weight = made(s.heads * (s.nope + s.rope), s.q_lora_rank).t()
        self.W_UK = made(s.heads, s.nope, s.kv_lora_rank)
        self.W_UV = made(s.heads, s.kv_lora_rank, s.value)
        self.o_weight = made(s.hidden, s.heads * s.value).t()
        self.cos, self.sin = (made(num_tokens, 1, 1, s.rope) for _ in range(2))
        self.slots = torch.arange(num_tokens).npu()
        num_blocks = num_tokens * (s.context // s.block_size)
        self.kv_c_cache = made(num_blocks, s.block_size, 1, s.kv_lora_rank)
        self.k_pe_cache = made(num_blocks, s.block_size, 1, s.rope)
        self.kv_c_flat, self.k_pe_flat = (
            cache.flatten(2) for cache in (self.kv_c_cache, self.k_pe_cache)
        )
        self.block_table = torch.arange(num_blocks).view(num_tokens, -1).int().npu()
        self.actual_seq_lengths_q = list(range(1, num_tokens + 1))
        self.seq_lens = [s.context - 7 * n for n in range(num_tokens)]
        self.router = made(s.experts, s.hidden).t()
        self.correction_bias = made(s.experts, dtype=torch.float32)
        self.gate_up = made(s.experts, s.hidden, 2 * s.intermediate)
        self.down = made(s.experts, s.intermediate, s.hidden)
        self.scale = (s.nope + s.rope) ** -0.5

    def named(self, names: str) -> dict[str, Any]:
        """Returns the attributes with these names as keyword arguments."""
        return {name: getattr(self, name) for name in names.split()}


def norm_of_sum(
    layer: Layer, x: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the norm of x + residual, and x + residual."""
    normalized, _, total = torch_npu.npu_add_rms_norm(x, layer.residual, weight, EPSILON)
    return normalized, total


def prepare_attention(
    layer: Layer, q: torch.Tensor, kv: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes the result of `preprocess` from the projections' results."""
    s = layer.sizes
    q_nope, q_rope = q.view(-1, s.heads, s.nope + s.rope).split([s.nope, s.rope], dim=-1)
    torch_npu.npu_kv_rmsnorm_rope_cache(
        kv[:, None, None, :],
        layer.kv_a_norm,
        layer.cos,
        layer.sin,
        layer.slots,
        layer.k_pe_cache,
        layer.kv_c_cache,
        epsilon=EPSILON,
        cache_mode="PA_BNSD",
        is_output_kv=False,
    )
    q_rope = torch_npu.npu_interleave_rope(q_rope.unsqueeze(2), layer.cos, layer.sin)
    absorbed = torch_npu.npu_transpose_batchmatmul(
        q_nope, layer.W_UK, perm_x1=(1, 0, 2), perm_x2=(0, 1, 2), perm_y=(1, 0, 2)
    )
    return absorbed, q_rope.squeeze(2)


def attend(layer: Layer, absorbed: torch.Tensor, q_rope: torch.Tensor) -> torch.Tensor:
    """Attends over the MLA cache, then projects the values up."""
    s = layer.sizes
    out, _ = torch_npu.npu_fused_infer_attention_score(
        absorbed,
        layer.kv_c_flat,
        layer.kv_c_flat,
        query_rope=q_rope,
        key_rope=layer.k_pe_flat,
        sparse_mode=0,
        block_table=layer.block_table,
        actual_seq_lengths=layer.actual_seq_lengths_q,
        actual_seq_lengths_kv=layer.seq_lens,
        num_heads=s.heads,
        num_key_value_heads=1,
        scale=layer.scale,
        input_layout="TND_NTD",
        block_size=s.block_size,
    )
    return torch_npu.npu_transpose_batchmatmul(
        out, layer.W_UV, perm_x1=(0, 1, 2), perm_x2=(0, 1, 2), perm_y=(1, 0, 2)
    ).flatten(1)


def chosen_experts(layer: Layer, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns weights and ids of each token's experts, both [num_tokens, top_k]."""
    s = layer.sizes
    weights, ids, _ = torch_npu.npu_moe_gating_top_k(
        logits,
        s.top_k,
        bias=layer.correction_bias,
        k_group=s.chosen_groups,
        group_count=s.groups,
        group_select_mode=1,
        norm_type=1,
        routed_scaling_factor=s.scaling_factor,
    )
    return weights.to(layer.x.dtype), ids


def rows_by_expert(
    layer: Layer, x: torch.Tensor, ids: torch.Tensor, **quantization: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns rows sorted by expert, each choice's row, rows per expert, and scales of int8
    rows.
    """
    experts = layer.sizes.experts
    return torch_npu.npu_moe_init_routing_v2(
        x,
        ids,
        active_num=ids.numel(),
        expert_num=experts,
        expert_tokens_num_type=1,
        expert_tokens_num_flag=True,
        active_expert_range=[0, experts],
        **quantization,
    )


def sum_by_token(
    rows: torch.Tensor, weights: torch.Tensor, row_of_assignment: torch.Tensor
) -> torch.Tensor:
    """Sums the experts' results by token."""
    return torch_npu.npu_moe_finalize_routing(
        rows.unsqueeze(0), None, None, None, weights, row_of_assignment, None, drop_pad_mode=3
    )


def composed(layer: Layer) -> Stages:
    """Returns the stages as torch_npu calls, as core runs them without vllm-davinci-kernels."""
    s = layer.sizes

    def preprocess(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        joint = torch.mm(x, layer.a_weight)
        normed = torch_npu.npu_rms_norm(joint[:, : s.q_lora_rank], layer.q_a_norm, EPSILON)[0]
        q = torch.mm(normed, layer.q_b_weight)
        return prepare_attention(layer, q, joint[:, s.q_lora_rank :])

    def experts(x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        weights, ids = chosen_experts(layer, logits)
        rows, row_of_assignment, counts, _ = rows_by_expert(layer, x, ids)
        for weight in (layer.gate_up, layer.down):
            if weight is layer.down:
                rows = torch_npu.npu_swiglu(rows)
            rows = torch_npu.npu_grouped_matmul(
                [rows], [weight], group_list=counts, split_item=2, group_type=0, group_list_type=1
            )[0]
        return sum_by_token(rows, weights, row_of_assignment)

    return {
        "norm": lambda x: norm_of_sum(layer, x, layer.input_norm),
        "preprocess": preprocess,
        "attend": partial(attend, layer),
        "project": lambda x: torch.mm(x, layer.o_weight),
        "post_norm": lambda x: norm_of_sum(layer, x, layer.post_norm),
        "experts": experts,
    }


def attend_at_once(layer: Layer) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """`attend` as one compiled call."""
    names = "kv_c_cache k_pe_cache block_table actual_seq_lengths_q seq_lens W_UV scale"
    decode = partial(
        vllm_davinci.kernels.load("mla_decode_attention"), mask=None, **layer.named(names)
    )
    return lambda absorbed, q_rope: decode(ql_nope=absorbed, q_pe=q_rope)


def preprocess_at_once(
    layer: Layer, operator: str, weights: str, **others: None
) -> Callable[..., tuple[torch.Tensor, ...]]:
    """`preprocess` as one compiled call. hidden_scale: scales if hidden_states are int8"""
    given = layer.named(f"{weights} q_a_norm kv_a_norm W_UK cos sin kv_c_cache k_pe_cache")
    return partial(
        vllm_davinci.kernels.load(operator),
        **{**given, **others, "slot_mapping": layer.slots},
        q_epsilon=EPSILON,
        kv_epsilon=EPSILON,
        num_decode_tokens=len(layer.x),
    )


def experts_at_once(
    layer: Layer, operator: str, weights: str
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Selects and computes the routed experts in one call."""
    s = layer.sizes
    routed_experts = partial(
        vllm_davinci.kernels.load(operator),
        **layer.named(f"correction_bias {weights}"),
        top_k=s.top_k,
        num_groups=s.groups,
        num_chosen_groups=s.chosen_groups,
        is_sigmoid=True,
        scaling_factor=s.scaling_factor,
        first_expert=0,
        num_experts=s.experts,
    )
    return lambda x, logits: routed_experts(x=x, router_logits=logits)


def ours(layer: Layer) -> Stages:
    """Returns the same stages, each as one compiled call."""
    add_rms_norm = vllm_davinci.kernels.load("add_rms_norm")
    preprocess = preprocess_at_once(layer, "mla_preprocess", "a_weight q_b_weight")
    return {
        "norm": lambda x: add_rms_norm(
            x=x, residual=layer.residual, weight=layer.input_norm, epsilon=EPSILON
        ),
        "preprocess": lambda x: preprocess(hidden_states=x)[:2],
        "attend": attend_at_once(layer),
        "project": lambda x: torch.mm(x, layer.o_weight),
        "post_norm": lambda x: add_rms_norm(
            x=x, residual=layer.residual, weight=layer.post_norm, epsilon=EPSILON
        ),
        "experts": experts_at_once(layer, "routed_experts", "gate_up down"),
    }
