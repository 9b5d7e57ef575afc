"""The execution plan of a step: whole or as ubatches, and the inputs of each ubatch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from vllm.v1.worker.ubatch_utils import UBatchSlice

from vllm_davinci.core.attention.mla.metadata import NPUMLAMetadata
from vllm_davinci.core.components.protocols import Split

T = TypeVar("T")
P = TypeVar("P")


@dataclass(frozen=True)
class SplitStep:
    """A cut of a step into ubatches.

    split:                the cut
    num_tokens_across_dp: per ubatch, every data-parallel rank's tokens, on the host
    """

    split: Split
    num_tokens_across_dp: list[torch.Tensor] | None = None

    def slices(self) -> list[UBatchSlice]:
        """The ubatches in the form from which vLLM builds their attention metadata."""
        return [UBatchSlice(part.requests, part.tokens) for part in self.split.ubatches]

    def padded_slices(self, num_tokens: int) -> list[UBatchSlice]:
        """Like `slices`; padding rows up to num_tokens belong to the last ubatch."""
        *slices, last = self.slices()
        end = max(last.token_slice.stop, num_tokens)
        return [*slices, UBatchSlice(last.request_slice, slice(last.token_slice.start, end))]


@dataclass(frozen=True)
class PlannedStep:
    """The execution plan of a step on all DP ranks.

    split:             how this rank's step is cut; None: it stays whole
    any_rank_prefills: whether a DP rank has a prefill; False if no layer needs to know
    """

    split: SplitStep | None = None
    any_rank_prefills: bool = False

    def slots(self, by_layer: dict[str, torch.Tensor] | None, num_tokens: int) -> Any:
        """The slots [num_tokens] by layer; in a split step one dict per ubatch."""
        if self.split is None or by_layer is None:
            return by_layer
        slices = [each.token_slice for each in self.split.padded_slices(num_tokens)]
        # Layers of a group share a tensor, which is cut once.
        return _cut_once(by_layer, slices, lambda slots, part: slots[part])

    def metadata(self, built: Any, decodes: bool) -> Any:
        """Each layer's metadata; in a split step one dict per ubatch.

        built:   by vLLM; of each ubatch if the step is split and has prefills
        decodes: the step has no prefill. Requests are then whole, and a graph's padding consists of
                 requests, too, which vLLM cannot cut
        """
        if self.split is not None and decodes:
            parts = self.split.split.ubatches
            built = _cut_once(built, parts, lambda all_, p: all_.of_decodes(p.requests, p.tokens))
        if self.any_rank_prefills:
            by_layer = built if isinstance(built, list) else [built]
            for metadata in (each for part in by_layer for each in part.values()):
                if isinstance(metadata, NPUMLAMetadata):
                    metadata.others_prefill = True
        return built


WHOLE = PlannedStep()


def _cut_once(
    by_layer: dict[str, T], parts: Sequence[P], cut: Callable[[T, P], T]
) -> list[dict[str, T]]:
    """Each layer's part, per ubatch; layers that share a value share its parts."""
    layers_of: dict[int, list[str]] = {}
    for name, whole in by_layer.items():
        layers_of.setdefault(id(whole), []).append(name)
    cuts: list[dict[str, Any]] = [dict.fromkeys(by_layer) for _ in parts]  # by ubatch
    for names in layers_of.values():
        whole = by_layer[names[0]]
        for each, part in zip(cuts, parts, strict=True):
            each.update(dict.fromkeys(names, cut(whole, part)))
    return cuts
