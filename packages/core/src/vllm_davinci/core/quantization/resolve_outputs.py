"""Finds, at start, the norms and projections that quantize for their readers.

The readers of an output depend on the step: few or many tokens, decodes, prefills or neither, with
or without padding. Dummy runs cover all cases before the first step: those without attention before
memory is measured, those with attention once there is a KV cache.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Protocol

import torch
from vllm.config import CUDAGraphMode, VllmConfig

from vllm_davinci.core.config.parsing import get_config
from vllm_davinci.core.layers.norm import NPURMSNorm
from vllm_davinci.core.layers.quantized_activation import InputScale, Output, OutputKind, Readers
from vllm_davinci.core.log import init_logger
from vllm_davinci.core.quantization.config import AscendQuantizationConfig
from vllm_davinci.core.quantization.linear_method import QuantizedLinearMethodBase

logger = init_logger(__name__)


class Producer(Protocol):
    """A layer whose readers decide the form of its output."""

    output: Output

    def can_return(self, kind: OutputKind | InputScale) -> bool: ...


class OutputPlan:
    """The output kinds of all producers in a loaded model.

    A producer whose readers all quantize alike quantizes in its own launch; a producer with any
    other reader, or none, returns floats.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._producers = dict(_producers(model))
        self._readers = {name: Readers() for name in self._producers}

    def resolve(self, dummy_runs: Iterable[Callable[[], object]]) -> list[str]:
        """Sets the kinds by the readers in these runs and in all earlier ones.

        dummy_runs: each runs the model once; every rank does so at the same time
        Returns the names of producers that quantized until now and must return floats.
        """
        before = {name: producer.output for name, producer in self._producers.items()}
        for name, producer in self._producers.items():
            producer.output = self._readers[name]
        try:
            for run in dummy_runs:
                run()
        finally:
            for producer in self._producers.values():
                producer.output = OutputKind.FLOAT
        for name, producer in self._producers.items():
            if producer.can_return(kind := self._readers[name].kind()):
                producer.output = kind
        return [
            name
            for name, producer in self._producers.items()
            if producer.output is OutputKind.FLOAT and before[name] is not OutputKind.FLOAT
        ]

    def check_with_attention(
        self, vllm_config: VllmConfig, longest: int, dummy_run: Callable[..., object]
    ) -> None:
        """Checks the plan, made from steps without attention, against steps with attention.

        longest:   tokens of the longest prefill that a dummy run may have
        dummy_run: vLLM's `_dummy_run`, which every rank calls at the same time
        """
        sizes = {min(size, longest) for size in step_sizes(vllm_config)[1:]}
        batches: list[tuple[int, dict[str, bool]]] = [(1, {"uniform_decode": True})]
        batches += [(size, {"create_mixed_batch": True}) for size in sorted(sizes)]
        eager = {"cudagraph_runtime_mode": CUDAGraphMode.NONE, "force_attention": True}
        self.check(
            partial(dummy_run, size, skip_eplb=True, **kind, **eager) for size, kind in batches
        )

    def check(self, dummy_runs: Iterable[Callable[[], object]]) -> None:
        """Like `resolve`, after memory was measured with the plan; logs what has changed."""
        if self._producers and (changed := self.resolve(dummy_runs)):
            logger.warning(
                "Steps with attention read as floats what other steps read as integers: %s. These "
                "layers return floats in all steps, which takes more memory than was measured.",
                ", ".join(changed),
            )


def resolved_plan(
    vllm_config: VllmConfig, model: torch.nn.Module, dummy_run: Callable[..., object]
) -> OutputPlan | None:
    """The plan of a model with quantized inputs, from steps without attention; else None.

    dummy_run: vLLM's `_dummy_run`, which every rank calls at the same time
    """
    quantization = vllm_config.quant_config
    if not isinstance(quantization, AscendQuantizationConfig):
        return None
    if not quantization.description.quantizes_inputs:
        return None
    plan = OutputPlan(model)
    plan.resolve(
        partial(dummy_run, size, skip_eplb=True, is_profile=True)
        for size in step_sizes(vllm_config)
    )
    return plan


def step_sizes(vllm_config: VllmConfig) -> list[int]:
    """Token counts of dummy runs that cover every path which depends on the number of tokens.

    One token; a number that ranks must pad; the first one that is not decode-only, which may
    use another dispatch method; the first one that runs sequence parallel, and one that is then
    padded.
    """
    scheduler, ranks = vllm_config.scheduler_config, vllm_config.parallel_config
    sizes = {1, ranks.tensor_parallel_size + 1}
    if ranks.data_parallel_size > 1:
        sizes.add(scheduler.max_num_seqs + 1)
    sequence_parallel = get_config(vllm_config).sequence_parallel
    if sequence_parallel.enabled and ranks.tensor_parallel_size > 1:
        sizes |= {sequence_parallel.min_tokens, sequence_parallel.min_tokens + 1}
    most = scheduler.max_num_batched_tokens
    return sorted({min(size, most) for size in sizes})


def _producers(model: torch.nn.Module) -> Iterator[tuple[str, Producer]]:
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if isinstance(module, NPURMSNorm) and module.covers_rows:
            yield name, module
        elif isinstance(method, QuantizedLinearMethodBase) and method.can_return(OutputKind.SUMS):
            yield name, method
