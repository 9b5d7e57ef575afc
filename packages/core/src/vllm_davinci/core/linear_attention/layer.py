"""Base of layers with a short convolution and a recurrent state."""

from abc import abstractmethod
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad, silu
from vllm.forward_context import get_forward_context
from vllm.v1.attention.backend import AttentionBackend

from vllm_davinci.core.errors import RELEASE, UnsupportedFeatureError
from vllm_davinci.core.linear_attention.chunk_plan import ChunkPlan, plan_chunks
from vllm_davinci.core.linear_attention.metadata import (
    LinearAttentionBackend,
    LinearAttentionMetadata,
)
from vllm_davinci.core.linear_attention.state_pages import StatePages
from vllm_davinci.core.linear_attention.verification import Verification

# A short causal convolution over the tokens of each request, per channel.


class Conv(NamedTuple):
    """A layer's convolution.

    weight: [width, channels], fp32, oldest token first
    bias:   [channels], fp32
    ends_in_silu: whether SiLU is applied to the result
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    ends_in_silu: bool = True

    def finished(self, sums: torch.Tensor) -> torch.Tensor:
        """Adds the bias to the sums over the taps and applies SiLU, in place if possible."""
        if self.bias is not None:
            sums += self.bias
        return silu(sums) if self.ends_in_silu else sums


def conv_of_decodes(
    x: torch.Tensor, kept: torch.Tensor, conv: Conv
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes one token of each of n requests.

    x:    [n, channels], in the model's dtype
    kept: [n, width - 1, channels], inputs of the previous tokens, oldest first, dtype of x
    Returns [n, channels] in fp32, and the inputs kept for the next token, like `kept`.
    """
    seen = torch.cat([kept, x.unsqueeze(1)], dim=1)
    return conv.finished((seen.float() * conv.weight).sum(dim=1)), seen[:, 1:]


def conv_of_prefills(
    x: torch.Tensor, kept: torch.Tensor, conv: Conv, plan: ChunkPlan
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes all new tokens of a plan's requests.

    x:    [tokens, channels], in vLLM's order
    kept: [n, width - 1, channels] in the plan's order, zero for a request without a state
    Returns [slots in the chunks, channels] in fp32 (in padding: the result for zeros), and the new
    `kept`.
    """
    rows = torch.cat([kept.flatten(0, 1), x, x.new_zeros(1, x.shape[1])])
    sum_ = rows.index_select(0, plan.taps[0]).float() * conv.weight[0]
    for tap, of_tap in zip(plan.taps[1:], conv.weight[1:], strict=True):
        sum_.addcmul_(rows.index_select(0, tap).float(), of_tap)
    return conv.finished(sum_), rows.index_select(0, plan.kept).view_as(kept)


class StatefulLayer:
    """Mix-in ahead of one of vLLM's layers: its states, decodes and prefills.

    Never reads from the device. pages: None until the runner has allocated the cache
    Gates are fp32, one row per token; rows of zeros are padding and must leave a state unchanged.
    """

    prefix: str
    activation: str | None
    conv_kernel_size: int
    conv1d: Any
    pages: StatePages | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.activation not in ("silu", "swish", None):
            raise UnsupportedFeatureError(
                f"The convolution of {self.prefix} uses activation {self.activation!r}, and "
                f"{RELEASE} supports SiLU. Choose another model."
            )

    @abstractmethod
    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the convolution's kept inputs, [width - 1, channels], and of any state."""

    @abstractmethod
    def _decoded(self, x: torch.Tensor, gates: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """Computes one token of each of n requests. state: [n, *shape], fp32, updated in place.

        x: [n, channels], fp32, after the convolution. Returns [n, heads, size], fp32.
        """

    @abstractmethod
    def _prefilled(
        self, x: torch.Tensor, gates: torch.Tensor, state: torch.Tensor, plan: ChunkPlan
    ) -> torch.Tensor:
        """Computes all tokens of a plan, in the plan's slots; otherwise like `_decoded`."""

    def get_attn_backend(self) -> type[AttentionBackend]:
        return LinearAttentionBackend

    def bind_kv_cache(self, kv_cache: StatePages) -> None:
        self.pages = kv_cache

    def run_step(self, mixed: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        """Runs a step's convolution and recurrence, and updates their states.

        mixed: [num_tokens, channels], as projected
        gates: [num_tokens, ...]
        Returns [num_tokens, heads, size], fp32; zero in rows of padding.
        """
        by_layer: Any = get_forward_context().attn_metadata
        metadata = by_layer.get(self.prefix) if isinstance(by_layer, dict) else None
        if metadata is None:  # a profile run: uses the most memory of a step, without states
            return self._profile(mixed, gates)
        assert isinstance(metadata, LinearAttentionMetadata)
        parts, num_tokens = [], mixed.shape[0]
        num_decodes, num_decoded = metadata.num_decodes, metadata.num_decode_tokens
        end = num_decoded + metadata.num_prefill_tokens
        if num_decodes:
            own, blocks = slice(num_decoded), metadata.blocks[:num_decodes]
            if metadata.verification is None:
                parts.append(self._decode(mixed[own], gates[own], blocks[:, 0]))
            else:
                parts.append(self._verify(mixed[own], gates[own], blocks, metadata.verification))
        if metadata.prefill is not None:
            plan = metadata.prefill
            blocks = metadata.blocks[num_decodes:, 0].index_select(0, plan.order)
            tokens = slice(num_decoded, end)
            parts.append(self._prefill(mixed[tokens], gates[tokens], blocks, plan))
        outputs = parts[0] if len(parts) == 1 else torch.cat(parts)
        return pad(outputs, (0, 0, 0, 0, 0, num_tokens - end)) if end < num_tokens else outputs

    def _decode(
        self, mixed: torch.Tensor, gates: torch.Tensor, blocks: torch.Tensor
    ) -> torch.Tensor:
        assert self.pages is not None
        pages = self.pages.gather(blocks)
        kept, state = self._states(pages)
        # A graph's padding writes zeros to the null block, which holds zeros.
        is_request = blocks.ne(0).unsqueeze(1)
        x, newly_kept = conv_of_decodes(mixed * is_request, kept, self._conv())
        own = state.float()  # the tensor itself if it is fp32
        outputs = self._decoded(x, gates * is_request, own)
        self._keep(pages, kept, newly_kept, state, own)
        self.pages.scatter(blocks, pages)
        return outputs

    def _verify(
        self, mixed: torch.Tensor, gates: torch.Tensor, blocks: torch.Tensor, plan: Verification
    ) -> torch.Tensor:
        """Computes up to `plan.width` tokens of each request. blocks: [n, pages]"""
        assert self.pages is not None
        if plan.tokens is not None:  # rows of zeros in padding, which leave states unchanged
            mixed, gates = (
                pad(rows, (0, 0, 0, 1)).index_select(0, plan.tokens) for rows in (mixed, gates)
            )
        source = blocks.gather(1, (plan.accepted.long() - 1).unsqueeze(1)).squeeze(1)
        is_request = source.ne(0).view(-1, 1, 1)
        mixed, gates = (rows.unflatten(0, (-1, plan.width)) * is_request for rows in (mixed, gates))
        pages = self.pages.gather(source)
        kept, state = self._states(pages)
        own, outputs = state.float(), []
        targets = blocks.gather(1, plan.columns)
        for token in range(plan.width):
            x, newly_kept = conv_of_decodes(mixed[:, token], kept, self._conv())
            outputs.append(self._decoded(x, gates[:, token], own))
            self._keep(pages, kept, newly_kept, state, own)
            if own.data_ptr() != state.data_ptr():
                own = state.float()  # the value that the next step reads
            self.pages.scatter(targets[:, token], pages)
        rows = torch.stack(outputs, dim=1).flatten(0, 1)
        return rows if plan.places is None else rows.index_select(0, plan.places)

    def _prefill(
        self, mixed: torch.Tensor, gates: torch.Tensor, blocks: torch.Tensor, plan: ChunkPlan
    ) -> torch.Tensor:
        """Computes the prefills. blocks: in the plan's order"""
        assert self.pages is not None
        pages = self.pages.gather(blocks).masked_fill_(plan.is_fresh.bool().unsqueeze(1), 0)
        kept, state = self._states(pages)
        own = state.float()
        outputs, newly_kept = self._compute_prefill(mixed, gates, kept, own, plan)
        self._keep(pages, kept, newly_kept, state, own)
        # Steps without requests use the null block, which must stay zero.
        self.pages.scatter(blocks, pages.masked_fill_(blocks.eq(0).unsqueeze(1), 0))
        return outputs

    def _states(self, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of the convolution's kept inputs and of the state, which may be empty."""
        assert self.pages is not None
        kept, *state = self.pages.states(pages)
        return kept, state[0] if state else pages.new_empty(len(pages), 0)

    @staticmethod
    def _keep(
        pages: torch.Tensor,
        kept: torch.Tensor,
        newly_kept: torch.Tensor,
        state: torch.Tensor,
        new_state: torch.Tensor,
    ) -> None:
        """Writes new values into copies of pages, of which kept and state are views."""
        kept.copy_(newly_kept)
        if new_state.data_ptr() != state.data_ptr():
            state.copy_(new_state)

    def _compute_prefill(
        self,
        mixed: torch.Tensor,
        gates: torch.Tensor,
        kept: torch.Tensor,
        state: torch.Tensor,
        plan: ChunkPlan,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns [tokens, heads, size] in vLLM's order, and the kept rows."""
        x, newly_kept = conv_of_prefills(mixed, kept, self._conv(), plan)
        gates = pad(gates, (0, 0, 0, 1)).index_select(0, plan.tokens)
        outputs = self._prefilled(x, gates, state, plan)
        return outputs.index_select(0, plan.places), newly_kept

    def _profile(self, mixed: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        """Profile run: computes a prefill of one request with all tokens."""
        plan = plan_chunks([mixed.shape[0]], [True], self.conv_kernel_size, mixed.device)
        kept, *state = self.get_state_shape()
        zeros = mixed.new_zeros(1, *kept), gates.new_zeros(1, *(state[0] if state else (0,)))
        return self._compute_prefill(mixed, gates, *zeros, plan)[0]

    def _conv(self) -> Conv:
        weight, bias = self.conv1d.weight, self.conv1d.bias
        plain = weight.detach().as_subclass(torch.Tensor).squeeze(1).t().float()
        own_bias = None if bias is None else bias.detach().float()
        return Conv(plain, own_bias, self.activation is not None)
