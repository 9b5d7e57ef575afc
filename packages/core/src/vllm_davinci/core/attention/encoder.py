"""Attention of multimodal encoders: packed sequences without cache or mask, lengths on the host."""

import numpy as np
import torch
import torch_npu
from torch.nn.functional import pad
from torch.utils.weak import WeakIdKeyDictionary
from vllm.model_executor.layers.attention.mm_encoder_attention import MMEncoderAttention
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from vllm_davinci.core.attention.head_sizes import dense_head_size
from vllm_davinci.core.attention.masks import SPARSE_MODE_NONE

# Sequences per call in layout TND. Source: the operator's documentation, constraints of
# actual_seq_lengths.
MAX_SEQUENCES = 4096


class SequenceEnds:
    """Host copies of the sequence ends in `cu_seqlens` tensors.

    Stored per tensor, for its lifetime, because an encoder may alternate between windows and whole
    images, and a process may hold two encoders.
    """

    def __init__(self) -> None:
        self._known: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def remember(self, tensor: torch.Tensor, ends: list[int]) -> None:
        """Records `ends` for `tensor`, valid until the tensor is written to.

        Tensors made under inference_mode do not report writes, but encoders make new ones in each
        forward.
        """
        self._known[tensor] = _version(tensor), ends

    def of_lengths(self, lengths: torch.Tensor) -> list[int]:
        """Ends of the sequences. lengths: result of NPUMMEncoderAttention.maybe_compute_seq_lens"""
        return self._of(lengths, lengths)

    def of_cu_seqlens(self, cu_seqlens: torch.Tensor) -> list[int]:
        """Ends of the sequences, from [num_sequences + 1] starts, the first of which is 0.

        Copies an unknown tensor from the device once: some models make it there.
        """
        return self._of(cu_seqlens, cu_seqlens[1:])

    def _of(self, tensor: torch.Tensor, ends: torch.Tensor) -> list[int]:
        version, known = self._known.get(tensor, (None, None))
        if known is None or version != _version(tensor):
            known = ends.tolist()
            self.remember(tensor, known)
        return known


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


_ends = SequenceEnds()


def remember_starts(cu_seqlens: torch.Tensor, starts: np.ndarray) -> None:
    """Records the values of `cu_seqlens`, so that no layer copies them from the device.

    cu_seqlens: [num_sequences + 1], on the device, not to be written to
    starts:     the same values; the first is 0
    """
    _ends.remember(cu_seqlens, starts[1:].tolist())


class NPUMMEncoderAttention(MMEncoderAttention):
    """One layer of an encoder, on npu_fused_infer_attention_score.

    Head sizes that the operator does not support are zero-padded to the next supported size, with
    the scale of the model's head size. Key-value heads are not repeated.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float | None = None,
        num_kv_heads: int | None = None,
        prefix: str = "",
    ) -> None:
        super().__init__(num_heads, head_size, scale, num_kv_heads, prefix)
        self.operator_head_size = dense_head_size(
            self.num_heads, self.num_kv_heads, head_size, self.dtype, SPARSE_MODE_NONE
        )

    @classmethod
    def maybe_compute_seq_lens(
        cls, attn_backend: AttentionBackendEnum, cu_seqlens: np.ndarray, device: torch.device
    ) -> torch.Tensor:
        """Sequence ends in the operator's form: int32 on the host, cumulative."""
        ends = torch.from_numpy(np.ascontiguousarray(cu_seqlens[1:], dtype=np.int32))
        _ends.remember(ends, cu_seqlens[1:].tolist())
        return ends

    @classmethod
    def maybe_recompute_cu_seqlens(
        cls,
        attn_backend: AttentionBackendEnum,
        cu_seqlens: np.ndarray,
        hidden_size: int,
        tp_size: int,
        device: torch.device,
        fp8_padded_hidden_size: int | None = None,
    ) -> torch.Tensor:
        """vLLM's result. Also records the ends on the host, for models that do not pass lengths."""
        on_device = super().maybe_recompute_cu_seqlens(
            attn_backend, cu_seqlens, hidden_size, tp_size, device, fp8_padded_hidden_size
        )
        remember_starts(on_device, cu_seqlens)
        return on_device

    def forward_oot(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cu_seqlens: torch.Tensor | None = None,
        max_seqlen: torch.Tensor | None = None,
        sequence_lengths: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Lets every query attend to the keys of its own sequence.

        query:            [batch, query tokens, num_heads * head_size], or with the last two
                          dimensions split
        key, value:       like query, with num_kv_heads and their own number of tokens
        cu_seqlens:       [num_sequences + 1]; without it each row of the batch is a sequence
        sequence_lengths: result of maybe_compute_seq_lens for the same sequences
        Returns a new tensor of query's shape. Runs on the current stream.
        """
        batch, query_tokens = query.shape[:2]
        key_tokens = key.shape[1]
        if cu_seqlens is None:
            ends = range(query_tokens, batch * query_tokens + 1, query_tokens)
            actual_seq_lengths_q = list(ends)
            actual_seq_lengths_kv = list(range(key_tokens, batch * key_tokens + 1, key_tokens))
        else:
            known = (
                _ends.of_cu_seqlens(cu_seqlens)
                if sequence_lengths is None
                else _ends.of_lengths(sequence_lengths)
            )
            actual_seq_lengths_q = actual_seq_lengths_kv = _filling(known, batch * query_tokens)
        out = self._attend(
            self._rows(query, self.num_heads),
            self._rows(key, self.num_kv_heads),
            self._rows(value, self.num_kv_heads),
            actual_seq_lengths_q,
            actual_seq_lengths_kv,
        )
        return out[..., : self.head_size].contiguous().view(query.shape)

    def _rows(self, tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
        """[all tokens, num_heads, operator_head_size], contiguous."""
        rows = tensor.reshape(-1, num_heads, self.head_size)
        if filling := self.operator_head_size - self.head_size:
            return pad(rows, (0, filling))
        return rows.contiguous()

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        actual_seq_lengths_q: list[int],
        actual_seq_lengths_kv: list[int],
    ) -> torch.Tensor:
        outputs = []
        query_begin = key_begin = 0
        for first in range(0, len(actual_seq_lengths_q), MAX_SEQUENCES):
            some_queries = actual_seq_lengths_q[first : first + MAX_SEQUENCES]
            some_keys = actual_seq_lengths_kv[first : first + MAX_SEQUENCES]
            query_end, key_end = some_queries[-1], some_keys[-1]
            out, _ = torch_npu.npu_fused_infer_attention_score(
                query[query_begin:query_end],
                key[key_begin:key_end],
                value[key_begin:key_end],
                actual_seq_lengths=[end - query_begin for end in some_queries],
                actual_seq_lengths_kv=[end - key_begin for end in some_keys],
                num_heads=self.num_heads,
                num_key_value_heads=self.num_kv_heads,
                scale=self.scale,
                input_layout="TND",
                sparse_mode=SPARSE_MODE_NONE,
            )
            outputs.append(out)
            query_begin, key_begin = query_end, key_end
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _filling(ends: list[int], num_tokens: int) -> list[int]:
    """Changes `ends` so that the last is `num_tokens`, as the operator requires.

    Oversized buffers repeat the last end after the last sequence: the repeats are dropped, and the
    last sequence is extended over the padding tokens, whose results are unused.
    """
    if ends[-1] == num_tokens and (len(ends) == 1 or ends[-2] != num_tokens):
        return ends
    kept = len(ends)
    while kept > 1 and ends[kept - 2] == ends[-1]:
        kept -= 1
    return [*ends[: kept - 1], num_tokens]
