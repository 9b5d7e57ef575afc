"""Runs steps as ubatches, without vLLM's knowledge."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.forward_context import get_forward_context, override_forward_context
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.ubatch_utils import UBatchSlice

from vllm_davinci.core import components
from vllm_davinci.core.config.parsing import get_config
from vllm_davinci.core.ubatch.planned_step import WHOLE
from vllm_davinci.core.ubatch.split_forward import SplitForward
from vllm_davinci.core.ubatch.splitter import StepSplitter
from vllm_davinci.core.ubatch.step_facts import BatchFacts, ScheduledStep


class StepPlans:
    """Plans each step when its metadata is built, and runs the model's forward as planned.

    vLLM's own ubatches are two equal ones in threads. Here vLLM always sees whole steps and gets
    their metadata, which a drafter also reads; the model gets the metadata of the ubatches.

    decode_query_len: tokens of a decoding request
    """

    def __init__(
        self, vllm_config: VllmConfig, decode_query_len: int, supports_mm_inputs: bool
    ) -> None:
        splits = get_config(vllm_config).dbo.enabled
        scheduler = components.stream_scheduler() if splits else None
        self.splitter = StepSplitter(vllm_config, scheduler, decode_query_len, supports_mm_inputs)
        self.split_forward = None if scheduler is None else SplitForward(scheduler, vllm_config)
        self._decode_query_len = decode_query_len
        self._facts: BatchFacts | None = (
            None  # facts of the step being prepared; None: a dummy step
        )
        self._planned = WHOLE
        self._metadata: Any = None  # metadata of the step as it is run
        self._is_of_drafter = False

    def take_model(self, model: Any) -> None:
        """Makes a loaded model's forward run as planned, if any step may be split."""
        if self.split_forward is None:
            return
        self.split_forward.prepare(model)
        forward = model.forward

        def run(*args: Any, **inputs: Any) -> Any:
            return self._run(forward, *args, **inputs)

        model.forward = run

    def take_batch(self, facts: BatchFacts) -> None:
        """Call it for a step with requests, before its metadata is built."""
        self._facts = facts

    def begin(self) -> None:
        """Resets the plan to a whole step without requests; called before and after each step."""
        self._planned, self._facts = WHOLE, None

    @contextmanager
    def drafting(self) -> Iterator[None]:
        """Inside, metadata stays whole, because it is a drafter's."""
        self._is_of_drafter = True
        try:
            yield
        finally:
            self._is_of_drafter = False

    def as_run(
        self,
        metadata: dict[str, Any],
        batch: InputBatch,
        mode: CUDAGraphMode,
        for_capture: bool,
        build: Callable[[int, UBatchSlice], dict[str, Any]],
    ) -> Any:
        """Plans a step, the same on all data-parallel ranks; each calls it once per step.

        metadata: by layer, of the whole step
        build:    builds the metadata of a ubatch, by its number
        Returns the metadata with which the model runs: by layer; per ubatch in a split step.
        """
        if self._is_of_drafter or not self.splitter.is_needed:
            return metadata
        facts, self._facts = self._facts, None
        lengths = batch.num_scheduled_tokens
        step = ScheduledStep(lengths, facts is not None, precedes_graph=for_capture)
        self._planned = self.splitter.plan(step, mode, batch.num_tokens_after_padding, facts)
        split = self._planned.split
        built: Any = metadata
        decodes = bool(lengths.max() <= self._decode_query_len)
        if split is not None and not decodes:
            built = [build(index, part) for index, part in enumerate(split.slices())]
        self._metadata = self._planned.metadata(built, decodes)
        return self._metadata

    def _run(self, forward: Callable[..., Any], *args: Any, **inputs: Any) -> Any:
        split = self._planned.split
        if split is None or self.split_forward is None:
            return forward(*args, **inputs)
        context = get_forward_context()
        num_tokens = inputs["positions"].shape[-1]
        of_parts = replace(
            context,
            attn_metadata=self._metadata,
            slot_mapping=self._planned.slots(context.slot_mapping, num_tokens),
        )
        with override_forward_context(of_parts):
            # Captures omit embeddings if there are none.
            whole = {"inputs_embeds": None} | inputs
            return self.split_forward.run(split, forward, *args, **whole)


class DummyLengths:
    """Lengths of a dummy step's requests; vLLM would give all the same number of tokens.

    query_lens: [num_reqs], new tokens of each; seq_lens: [num_reqs] int32, all its tokens
    """

    def __init__(self, query_lens: tuple[int, ...], seq_lens: torch.Tensor) -> None:
        self._query_lens = np.array(query_lens, dtype=np.int32)
        self._seq_lens = seq_lens

    def write(self, batch: InputBatch) -> None:
        """Writes them into vLLM's batch with the same numbers of requests and tokens."""
        lengths = self._query_lens
        ends = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        batch.num_scheduled_tokens = lengths
        batch.query_start_loc_np = ends
        batch.query_start_loc.copy_(torch.from_numpy(ends))
        batch.seq_lens.copy_(self._seq_lens)
        batch.seq_lens_cpu_upper_bound = self._seq_lens.clone()
        batch.num_computed_tokens_np = self._seq_lens.numpy() - lengths
