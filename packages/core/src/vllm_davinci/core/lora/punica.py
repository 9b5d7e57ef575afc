"""Adapters' deltas for a step's rows: one product with all slots, other slots' columns zeroed.

Shapes depend only on the number of rows, nothing is read back, and a row without an adapter gets
exact zeros, so it may share a step, and a captured graph, with rows of any adapters.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.lora.punica_wrapper.punica_base import PunicaWrapperBase
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_davinci.core.errors import RELEASE, UnsupportedFeatureError
from vllm_davinci.core.inputs.ubatch_tokens import first_token_of_ubatch
from vllm_davinci.core.layers.quantized_activation import read_as_floats
from vllm_davinci.core.lora.stacked_weights import StackedSlices, columns

if TYPE_CHECKING:
    from vllm.lora.layers import LoRAMapping


class NPUPunicaWrapper(PunicaWrapperBase):
    """The slot of each row in the running step, and the products with the slots' weights.

    max_num_batched_tokens: rows of the largest step
    max_batches:            requests of the largest step
    lora_config:            vLLM's, by keyword
    """

    no_lora: bool  # no row of the step uses an adapter

    def __init__(
        self,
        max_num_batched_tokens: int,
        max_batches: int,
        device: torch.device | str,
        **kwargs: Any,
    ) -> None:
        super().__init__(max_num_batched_tokens, max_batches, device, **kwargs)
        config = kwargs["lora_config"]
        slots, rank = config.max_loras, config.max_lora_rank
        # vLLM's layer adds it to token ids; zero here, since a table's row holds all slots.
        self._embeddings_indices.zero_()
        self._slot_of_column = torch.arange(slots, device=device, dtype=torch.int32)
        self._slot_of_column = self._slot_of_column.repeat_interleave(rank)  # [slots * rank]
        shape = max(max_num_batched_tokens, max_batches), slots * rank
        self._foreign_to_token = torch.ones(shape, dtype=torch.bool, device=device)
        self._foreign_to_sample = torch.ones(shape, dtype=torch.bool, device=device)
        self._foreign_to_all: torch.Tensor | None = None  # [1, slots * rank], see `of_one_slot`
        self._slot_of_token: torch.Tensor | None = None  # see `keep_slots`
        self.no_lora = True

    def keep_slots(self) -> None:
        """Enables `slots` from the next step on."""
        if self._slot_of_token is None:
            num_tokens = self._foreign_to_token.shape[0]
            shape = (num_tokens,)
            self._slot_of_token = torch.full(shape, -1, dtype=torch.int32, device=self.device)

    def slots(self, num_tokens: int) -> torch.Tensor:
        """[num_tokens], int32: the slot of the adapter of each first token, -1 for none.

        The tokens are the step's or the running ubatch's, as in `foreign_to`.
        """
        assert self._slot_of_token is not None, "keep_slots"
        first = first_token_of_ubatch() or 0
        return self._slot_of_token[first : first + num_tokens]

    def foreign_to(self, rows: slice) -> torch.Tensor:
        """[rows, slots * rank], bool: True in columns of slots other than the token's."""
        first = first_token_of_ubatch() or 0
        return self._foreign_to_token[first + rows.start : first + rows.stop]

    def foreign_to_slots(self, slots: torch.Tensor) -> torch.Tensor:
        """Like `foreign_to`, for rows in any order. slots: [rows], int32"""
        return torch.ne(slots.unsqueeze(1), self._slot_of_column)

    def update_metadata(
        self,
        mapping: "LoRAMapping",
        lora_index_to_id: list[int | None],
        max_loras: int,
        vocab_size: int,
        **kwargs: Any,
    ) -> None:
        """Stores the slots of a step's tokens and sampled rows; two launches and one copy.

        vLLM calls it when they differ from the previous step's.
        """
        slot_of = {each: slot for slot, each in enumerate(lora_index_to_id) if each is not None}
        num_tokens = len(mapping.index_mapping)
        ids = np.fromiter(
            (*mapping.index_mapping, *mapping.prompt_mapping),
            np.int32,
            num_tokens + len(mapping.prompt_mapping),
        )
        distinct, position = np.unique(ids, return_inverse=True)
        slots = np.array([slot_of[each] if each > 0 else -1 for each in distinct.tolist()])
        self.no_lora = not (distinct > 0).any()
        on_device = async_tensor_h2d(slots.astype(np.int32)[position], device=self.device)
        of_tokens, of_samples = on_device.split([num_tokens, len(ids) - num_tokens])
        for foreign, of_rows in (
            (self._foreign_to_token, of_tokens),
            (self._foreign_to_sample, of_samples),
        ):
            rows = foreign[: of_rows.shape[0]]
            torch.ne(of_rows.unsqueeze(1), self._slot_of_column, out=rows)
        if self._slot_of_token is not None:
            self._slot_of_token[:num_tokens].copy_(of_tokens)

    @contextmanager
    def of_one_slot(self, slot: int) -> Iterator[None]:
        """Inside, all rows whose logits are computed use this slot; -1 for no adapter."""
        self._foreign_to_all = self._slot_of_column.ne(slot).unsqueeze(0)
        try:
            yield
        finally:
            self._foreign_to_all = None

    def add_lora_linear(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: tuple[torch.Tensor, ...],
        lora_b_stacked: tuple[torch.Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        *,
        buffer: tuple[torch.Tensor, ...] | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Adds each row's delta, of all output slices, in four launches. y: [rows, out]"""
        read_as_floats(x, y)
        if self.no_lora:
            return y
        assert isinstance(lora_a_stacked, StackedSlices)
        assert isinstance(lora_b_stacked, StackedSlices)
        shrunk = torch.mm(x, lora_a_stacked.matrix.t())
        rows = x.shape[0]
        by_slice = shrunk.view(rows, len(lora_a_stacked), -1)
        by_slice.masked_fill_(self.foreign_to(slice(0, rows)).unsqueeze(1), 0)
        return _add_product(y, shrunk, lora_b_stacked.matrix)

    def add_lora_embedding(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_b_stacked: torch.Tensor,
        add_inputs: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        """y: [rows, hidden]; x: [rows, slots * rank], lookups in all adapters; overwritten"""
        if self.no_lora:
            return y
        x.masked_fill_(self.foreign_to(slice(0, x.shape[0])), 0)
        return _add_product(y, x, columns(lora_b_stacked))

    def add_lora_logits(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: torch.Tensor,
        lora_b_stacked: torch.Tensor,
        scale: float,
        *,
        buffer: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """y: [sampled rows, vocabulary]; x: [sampled rows, hidden]"""
        if self.no_lora:
            return y
        shrunk = torch.mm(x, lora_a_stacked.flatten(0, 2).t())
        foreign = self._foreign_to_all
        shrunk.masked_fill_(
            self._foreign_to_sample[: x.shape[0]] if foreign is None else foreign, 0
        )
        # Logits have rows of the padded vocabulary if the head is divided.
        _add_product(y[:, : lora_b_stacked.shape[2]], shrunk, columns(lora_b_stacked))
        return y

    # --- refused at start, see core.features.lora ---------------------------------------------

    def add_shrink(self, *args: Any, **kwargs: Any) -> torch.Tensor | None:
        raise UnsupportedFeatureError(f"--fully-sharded-loras is not supported in {RELEASE}")

    def add_expand(self, *args: Any, **kwargs: Any) -> torch.Tensor | None:
        raise UnsupportedFeatureError(f"--fully-sharded-loras is not supported in {RELEASE}")

    def apply_lora_full_linear(self, *args: Any, **kwargs: Any) -> torch.Tensor | None:
        raise UnsupportedFeatureError(
            f"adapters of classification heads are not supported in {RELEASE}"
        )


def _add_product(y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Adds x @ weight.T to y in place. weight: [out, in]

    Not addmm_: its inner sum may depend on the number of rows, so a row's bits would depend on the
    rest of its step.
    """
    return y.add_(torch.mm(x, weight.t()))
