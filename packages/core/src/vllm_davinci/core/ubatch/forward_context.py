"""vLLM's forward context: one per ubatch, all accessed through one object."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from vllm.config import VllmConfig
from vllm.forward_context import DPMetadata, ForwardContext
from vllm.platforms import current_platform

from vllm_davinci.core.components.protocols import Split
from vllm_davinci.core.inputs.ubatch_tokens import set_first_token


class SwitchingContext(ForwardContext):
    """A forward context that reads and writes the attributes of the running ubatch.

    It is entered once for the whole step, so that switching replaces nothing of vLLM's.
    """

    @classmethod
    def showing(cls, part: ForwardContext) -> "SwitchingContext":
        """Creates one that first shows the attributes of `part`."""
        context = cls.__new__(cls)
        context.__dict__ = part.__dict__
        return context

    def shower(self, parts: Sequence[ForwardContext]) -> Callable[[int], None]:
        """A function that shows a part by its index; called at every switch."""
        attributes = [part.__dict__ for part in parts]

        def show(index: int) -> None:
            self.__dict__ = attributes[index]

        return show


def part_contexts(
    whole: ForwardContext,
    split: Split,
    vllm_config: VllmConfig,
    num_tokens_across_dp: Sequence[torch.Tensor] | None,
) -> list[ForwardContext]:
    """Each ubatch's context.

    whole: of the step; its attention metadata and slot mappings are lists, one per ubatch
    num_tokens_across_dp: per ubatch, every data-parallel rank's tokens; None without them
    """
    paddings = split.slice(whole.is_padding)
    parts = []
    for index, part in enumerate(split.ubatches):
        num_tokens = part.tokens.stop - part.tokens.start
        counts = None if num_tokens_across_dp is None else num_tokens_across_dp[index]
        if counts is None and whole.dp_metadata is not None:  # one DP rank, sequence parallel
            counts = torch.tensor([num_tokens], dtype=torch.int32)
        context = replace(
            whole,
            attn_metadata=whole.attn_metadata[index],
            slot_mapping=whole.slot_mapping[index],
            dp_metadata=None if whole.dp_metadata is None else DPMetadata(counts),
            batch_descriptor=None,
            is_padding=paddings[index],
            moe_layer_index=0,
        )
        context.additional_kwargs = current_platform.set_additional_forward_context(
            attn_metadata=context.attn_metadata,
            vllm_config=vllm_config,
            dp_metadata=context.dp_metadata,
            num_tokens=num_tokens,
            num_tokens_across_dp=counts,
            cudagraph_runtime_mode=context.cudagraph_runtime_mode,
            batch_descriptor=None,
            ubatch_slices=None,
        )
        set_first_token(context, part.tokens.start)
        parts.append(context)
    return parts
