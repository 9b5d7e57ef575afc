"""The decode layer of DeepSeek-V3 with W8A8_DYNAMIC projections and experts.

Router, norms and absorbed products are floats, as in the checkpoints.
"""

from functools import partial

import torch
import torch_npu

import vllm_davinci.kernels
from kernels.decode_layer import (
    EPSILON,
    Layer,
    Stages,
    attend,
    attend_at_once,
    chosen_experts,
    experts_at_once,
    made,
    norm_of_sum,
    prepare_attention,
    preprocess_at_once,
    rows_by_expert,
    sum_by_token,
)

# int8 rows, and one scale per row.
Quantized = tuple[torch.Tensor, torch.Tensor]


class W8A8Layer(Layer):
    """The layer with int8 weights for projections and experts."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__(num_tokens)
        for name in ("a_weight", "q_b_weight", "o_weight"):
            columns, rows = getattr(self, name).t().shape
            setattr(self, name, made(columns, rows, dtype=torch.int8).t())
            setattr(self, name.replace("weight", "scale"), made(columns, dtype=torch.float32))
        for name in ("gate_up", "down"):
            num_experts, rows, columns = getattr(self, name).shape
            setattr(self, name, made(num_experts, columns, rows, dtype=torch.int8).transpose(1, 2))
        self.gate_up_scale = made(*self.gate_up.shape[::2], dtype=torch.float32)
        self.down_scale = made(*self.down.shape[::2])


def _product(rows: Quantized, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return torch_npu.npu_quant_matmul(
        rows[0], weight, scale, pertoken_scale=rows[1], output_dtype=torch.bfloat16
    )


def _project(layer: W8A8Layer, x: torch.Tensor) -> torch.Tensor:
    return _product(torch_npu.npu_dynamic_quant(x), layer.o_weight, layer.o_scale)


def composed(layer: W8A8Layer) -> Stages:
    """Returns the stages as torch_npu calls, as core runs them without vllm-davinci-kernels."""
    s = layer.sizes

    def norm(x: torch.Tensor) -> tuple[Quantized, torch.Tensor]:
        normalized, total = norm_of_sum(layer, x, layer.input_norm)
        return torch_npu.npu_dynamic_quant(normalized), total

    def preprocess(x: Quantized) -> tuple[torch.Tensor, torch.Tensor]:
        joint = _product(x, layer.a_weight, layer.a_scale)
        normed = torch_npu.npu_rms_norm(joint[:, : s.q_lora_rank], layer.q_a_norm, EPSILON)[0]
        q = _product(torch_npu.npu_dynamic_quant(normed), layer.q_b_weight, layer.q_b_scale)
        return prepare_attention(layer, q, joint[:, s.q_lora_rank :])

    def experts(x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        weights, ids = chosen_experts(layer, logits)
        rows, row_of_assignment, counts, scales = rows_by_expert(layer, x, ids, quant_mode=1)
        split = {"group_list": counts, "split_item": 2, "group_type": 0, "group_list_type": 1}
        sums = torch_npu.npu_grouped_matmul(
            [rows], [layer.gate_up], output_dtype=torch.int32, **split
        )[0]
        activated, scales = torch_npu.npu_dequant_swiglu_quant(
            sums,
            weight_scale=layer.gate_up_scale,
            activation_scale=scales,
            group_index=counts,
            activate_left=True,
            quant_mode=1,
        )
        results = torch_npu.npu_grouped_matmul(
            [activated],
            [layer.down],
            scale=[layer.down_scale],
            per_token_scale=[scales],
            output_dtype=torch.bfloat16,
            **split,
        )[0]
        return sum_by_token(results, weights, row_of_assignment)

    return {
        "norm": norm,
        "preprocess": preprocess,
        "attend": partial(attend, layer),
        "project": partial(_project, layer),
        "post_norm": lambda x: norm_of_sum(layer, x, layer.post_norm),
        "experts": experts,
    }


def ours(layer: W8A8Layer) -> Stages:
    """Returns the same stages, each except the output projection as one compiled call."""
    add_rms_norm, add_rms_norm_dynamic_quant = (
        vllm_davinci.kernels.load(name) for name in ("add_rms_norm", "add_rms_norm_dynamic_quant")
    )

    preprocess = preprocess_at_once(
        layer,
        "mla_preprocess_w8a8",
        "a_weight a_scale q_b_weight q_b_scale",
        **dict.fromkeys(("a_bias", "q_a_norm_bias", "q_input_scale", "q_input_offset", "q_b_bias")),
    )

    def norm(x: torch.Tensor) -> tuple[Quantized, torch.Tensor]:
        integers, scales, total = add_rms_norm_dynamic_quant(
            x=x, residual=layer.residual, weight=layer.input_norm, epsilon=EPSILON
        )
        return (integers, scales), total

    return {
        "norm": norm,
        "preprocess": lambda x: preprocess(hidden_states=x[0], hidden_scale=x[1])[:2],
        "attend": attend_at_once(layer),
        "project": partial(_project, layer),
        "post_norm": lambda x: add_rms_norm(
            x=x, residual=layer.residual, weight=layer.post_norm, epsilon=EPSILON
        ),
        "experts": experts_at_once(
            layer, "routed_experts_w8a8", "gate_up gate_up_scale down down_scale"
        ),
    }
