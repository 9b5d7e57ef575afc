"""Finds, once after loading, the norms and projections that quantize for their readers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import torch

from vllm_davinci.core.layers.norm import NPURMSNorm
from vllm_davinci.core.layers.quantized_activation import InputScale, Output, OutputKind, Readers
from vllm_davinci.core.quantization.linear import W8A8DynamicLinearMethod


class Producer(Protocol):
    """Whose output's form depends on who reads it."""

    output: Output

    def can_return(self, kind: OutputKind | InputScale) -> bool: ...


def resolve_outputs(model: torch.nn.Module, dummy_run: Callable[[], object]) -> None:
    """Gives every producer of the model its output kind for good.

    A producer whose output is read by quantization alone, in one way, quantizes in its own launch;
    one whose output any other operator reads, or nothing, returns floats.

    model:     whose weights are loaded and processed
    dummy_run: runs the model once, of any number of tokens; as every rank does at the same time
    """
    producers = list(_producers(model))
    traced = [Readers() for _ in producers]
    for producer, readers in zip(producers, traced, strict=True):
        producer.output = readers
    try:
        dummy_run()
    finally:
        for producer in producers:
            producer.output = OutputKind.FLOAT
    for producer, readers in zip(producers, traced, strict=True):
        if producer.can_return(kind := readers.kind()):
            producer.output = kind


def _producers(model: torch.nn.Module) -> Iterator[Producer]:
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(module, NPURMSNorm) and module.covers_rows:
            yield module
        elif isinstance(method, W8A8DynamicLinearMethod) and method.can_return(OutputKind.SUMS):
            yield method
