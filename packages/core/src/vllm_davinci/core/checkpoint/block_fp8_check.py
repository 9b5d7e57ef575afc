"""The check of a checkpoint with fp8 weights in blocks: each with its scales."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from vllm_davinci.core.checkpoint.files import StoredTensor
from vllm_davinci.core.checkpoint.issues import CheckReport
from vllm_davinci.core.errors import UnsupportedFeatureError
from vllm_davinci.core.quantization import block_fp8
from vllm_davinci.core.quantization.tensors import dtype_name


def check_block_fp8(
    named: Mapping[str, Any], tensors: Mapping[str, StoredTensor], report: CheckReport
) -> None:
    """Whether every fp8 weight has the scales of its blocks, and nothing else has any.

    named: config.json's `quantization_config`
    """
    try:
        block = block_fp8.block_of(named)
    except UnsupportedFeatureError as error:
        report.problem("config.json", str(error))
        return
    assert block is not None
    for name, tensor in tensors.items():
        weight = tensors.get(name.removesuffix("_scale_inv"))
        if weight is not tensor and (weight is None or weight.dtype != block_fp8.DTYPE):
            report.problem(name, "is there, and it belongs to no fp8 weight")
        elif tensor.dtype == block_fp8.DTYPE:
            scale = tensors.get(f"{name}_scale_inv")
            expected = block.scale_shape(tensor.shape) if len(tensor.shape) == 2 else ()
            if scale is None:
                report.problem(f"{name}_scale_inv", "is missing: the weight is fp8")
            elif scale.shape != expected or scale.dtype != torch.float32:
                report.problem(
                    f"{name}_scale_inv",
                    f"is {dtype_name(scale.dtype)} {list(scale.shape)} and must be float32 "
                    f"{list(expected)}",
                )
