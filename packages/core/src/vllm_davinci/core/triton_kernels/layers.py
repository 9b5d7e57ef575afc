"""Stand-ins for kernels of models' layers, which vLLM launches only where Triton is usable.

Parameters are the kernels' without `_ptr`. Nothing here reads from the device; results have the
bits of vLLM's own torch code for devices without Triton.
"""

from typing import Any

import torch


def bilinear_pos_embed(
    embed: torch.Tensor,
    output: torch.Tensor,
    H: int,
    W: int,
    h_scale: float,
    w_scale: float,
    NUM_GRID: int,
    M_SIZE: int,
    HIDDEN_DIM: int,
    BLOCK_D: int,
    **_: Any,
) -> None:
    """Interpolates an encoder's position embeddings (models/qwen3_vl.py).

    embed:  [NUM_GRID * NUM_GRID, hidden]; output: [frames * H * W, hidden], blocks of
            M_SIZE * M_SIZE patches that are merged later in sequence
    """
    from vllm.model_executor.models.qwen3_vl import pos_embed_interpolate_native

    frames = output.shape[0] // (H * W)
    sizes = frames, H, W, NUM_GRID, M_SIZE
    output.copy_(pos_embed_interpolate_native(embed, *sizes, output.dtype))


def minimax_qk_var(
    qkv: torch.Tensor, var: torch.Tensor, row_stride: int, q_size: int, kv_size: int, **_: Any
) -> None:
    """Writes mean squares of a rank's queries and keys (layers/minimax_rms_norm/rms_norm_tp.py).

    qkv: [num_tokens, q_size + 2 * kv_size]; var: [num_tokens, 2] fp32
    """
    for place, part in enumerate(qkv.split([q_size, kv_size, kv_size], dim=-1)[:2]):
        var[:, place].copy_(part.to(torch.float32).pow(2).mean(dim=-1))


def minimax_rms_apply(
    qkv: torch.Tensor,
    var: torch.Tensor,
    q_w: torch.Tensor,
    k_w: torch.Tensor,
    q_out: torch.Tensor,
    k_out: torch.Tensor,
    row_stride: int,
    q_size: int,
    kv_size: int,
    tp_world: int,
    eps: float,
    **_: Any,
) -> None:
    """Normalizes queries and keys. var: [num_tokens, 2] fp32, sums of all ranks' mean squares"""
    parts = qkv.split([q_size, kv_size, kv_size], dim=-1)
    scales = torch.rsqrt(var / tp_world + eps)
    for place, (weight, out) in enumerate(((q_w, q_out), (k_w, k_out))):
        normalized = parts[place].to(torch.float32) * scales[:, place : place + 1] * weight
        out.copy_(normalized)
