"""Linear layers: prepare the weight once after loading; each call is one launch."""

from typing import Any

import torch
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)


class NPUUnquantizedLinearMethod(UnquantizedLinearMethod):
    """x @ weight.T + bias, with the transposed view taken once.

    vLLM's parameters are tensor subclasses, for which torch calls back into Python at every
    operator; the prepared view is a plain tensor of the same memory.
    """

    def __init__(self) -> None:
        super().__init__()
        self._weight_t: torch.Tensor | None = None  # [in_features, out_features], a view

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        super().process_weights_after_loading(layer)
        weight = layer.get_parameter("weight").detach().as_subclass(torch.Tensor)
        if weight.dim() != 2:
            return  # a convolution's weight; the linear layer only divides it among ranks
        weight_t = weight.t()
        loaded = self._weight_t
        if loaded is None or loaded.shape != weight_t.shape or loaded.dtype != weight_t.dtype:
            self._weight_t = weight_t
        elif loaded.data_ptr() != weight_t.data_ptr():
            # On reload vLLM loads into a new layer and copies the values to the old memory, which
            # graphs and views read.
            loaded.copy_(weight_t)

    def apply(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x: [..., in_features]. Returns [..., out_features]."""
        weight_t = self._weight_t
        if weight_t is None or x.dim() != 2:
            return super().apply(layer, x, bias)
        return torch.mm(x, weight_t) if bias is None else torch.addmm(bias, x, weight_t)


def plain_weight(layer: Any) -> torch.Tensor | None:
    """[in_features, out_features] of a linear layer that is exactly one product.

    None for a quantized layer, one with a bias, or one whose weight is not loaded.
    """
    method = getattr(layer, "quant_method", None)
    if type(method) is not NPUUnquantizedLinearMethod or layer.bias is not None:
        return None
    return method._weight_t


def prepare_weight(layer: Any) -> None:
    """Makes an unquantized layer use the method above; call it before its weights are loaded.

    Layers replaced by NPU classes do so themselves; callers that use vLLM's own subclasses of
    linear layers call this.
    """
    # Replaces only vLLM's own class; a quantization method stays.
    if type(layer.quant_method) is UnquantizedLinearMethod:
        layer.quant_method = NPUUnquantizedLinearMethod()


class _PreparedWeight:
    """Mix-in ahead of one of vLLM's linear layers: unquantized layers use the method above."""

    quant_method: Any
    num_loads = 0  # number of loads into the layer, for tensors derived from it

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        prepare_weight(self)

    # vLLM binds a loader's arguments by these names and replaces `param`.
    def weight_loader(self, param: Any, loaded_weight: Any, *shard: Any, **options: Any) -> Any:
        self.num_loads += 1
        return super().weight_loader(param, loaded_weight, *shard, **options)  # type: ignore[misc]

    def weight_loader_v2(self, param: Any, loaded_weight: Any, *shard: Any, **options: Any) -> Any:
        self.num_loads += 1
        return super().weight_loader_v2(  # type: ignore[misc]
            param, loaded_weight, *shard, **options
        )


class NPUReplicatedLinear(_PreparedWeight, ReplicatedLinear):
    """The whole weight on every rank."""


class NPUColumnParallelLinear(_PreparedWeight, ColumnParallelLinear):
    """Output features divided over the ranks."""


class NPUMergedColumnParallelLinear(_PreparedWeight, MergedColumnParallelLinear):
    """Several column-parallel projections in one product."""


class NPUQKVParallelLinear(_PreparedWeight, QKVParallelLinear):
    """Query, key and value projections in one product."""


class NPURowParallelLinear(_PreparedWeight, RowParallelLinear):
    """Input features divided over the ranks; the sum over ranks is the layer's output."""
