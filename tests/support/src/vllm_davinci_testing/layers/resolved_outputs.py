"""Quantized layers of an MLP, and how their output types are chosen."""

from collections.abc import Callable

import torch
from torch import Tensor
from vllm.model_executor.layers.linear import (
    LinearBase,
    MergedColumnParallelLinear,
    RowParallelLinear,
)

from vllm_davinci.core.quantization.resolve_outputs import OutputPlan
from vllm_davinci_testing.layers.quantized_linear import IN, Exported, build, fill, prepare


def resolve(run: Callable[[], object], *modules: torch.nn.Module) -> None:
    """Does the model runner's work after loading, with `run` as the dummy run."""
    OutputPlan(torch.nn.ModuleList(modules)).resolve([run])


def in_order(layers: list[torch.nn.Module], x: Tensor) -> Tensor:
    for layer in layers:
        x = layer(x)
    return x


def mlp(
    gate: str, down: str, dtype: torch.dtype, inter: int = 96
) -> tuple[LinearBase, LinearBase, list[Exported]]:
    kinds = {"mlp.gate_proj": gate, "mlp.up_proj": gate, "mlp.down_proj": down}
    gate_up = build(
        MergedColumnParallelLinear, IN, [inter, inter], kinds=kinds, prefix="mlp.gate_up_proj",
        params_dtype=dtype,
    )  # fmt: skip
    down_proj = build(
        RowParallelLinear, inter, IN, kinds=kinds, prefix="mlp.down_proj", params_dtype=dtype
    )
    exports = [Exported.make(gate, inter, IN, dtype, seed) for seed in (1, 2)]
    exports.append(Exported.make(down, IN, inter, dtype, 3))
    fill(gate_up, exports[0], 0)
    fill(gate_up, exports[1], 1)
    fill(down_proj, exports[2])
    return prepare(gate_up), prepare(down_proj), exports
