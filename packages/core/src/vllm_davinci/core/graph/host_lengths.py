"""Launches in a captured graph whose lengths on the host change from step to step.

The fused attention operator takes lengths as host lists, which a capture fixes. Each such launch is
a task group of the graph, and before a replay all of them are launched again with the step's
lengths, on a stream for updates: that replaces the groups' tasks and computes nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch_npu
from torch_npu._C import _weak_ref_tensor as weak_ref_tensor

Lengths = Sequence[int]


@dataclass(frozen=True)
class _Launch:
    """A task group, and what launches its operator: with lengths of queries, and of keys."""

    group: Any
    launch: Callable[[Lengths, Lengths], Any]


@dataclass
class HostLengths:
    """Those launches of one graph that take their lengths from one attention metadata."""

    _launches: list[_Launch] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self._launches)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: list[torch.Tensor],
        lengths_q: Lengths,
        lengths_kv: Lengths,
        **options: Any,
    ) -> None:
        """Captures npu_fused_infer_attention_score into `out`, on the capturing current stream.

        Shapes and options are the operator's. The graph keeps the tensors' memory for its replays,
        so that they are only referred to here.
        """
        workspace = torch_npu._npu_fused_infer_attention_score_get_max_workspace(
            query,
            key,
            value,
            actual_seq_lengths=lengths_q,
            actual_seq_lengths_kv=lengths_kv,
            **options,
        )
        query, key, value, workspace = map(weak_ref_tensor, (query, key, value, workspace))
        out = [weak_ref_tensor(each) for each in out]
        options = {
            name: weak_ref_tensor(option) if isinstance(option, torch.Tensor) else option
            for name, option in options.items()
        }

        def launch(lengths_q: Lengths, lengths_kv: Lengths) -> None:
            torch_npu.npu_fused_infer_attention_score.out(
                query,
                key,
                value,
                actual_seq_lengths=lengths_q,
                actual_seq_lengths_kv=lengths_kv,
                workspace=workspace,
                out=out,
                **options,
            )

        stream = torch_npu.npu.current_stream()
        torch_npu.npu.graph_task_group_begin(stream)
        launch(lengths_q, lengths_kv)
        self._launches.append(_Launch(torch_npu.npu.graph_task_group_end(stream), launch))

    def update(self, lengths_q: Lengths, lengths_kv: Lengths, stream: Any) -> None:
        """Gives every launch these lengths, once `stream`, which must be current, gets there."""
        begin, end = torch_npu.npu.graph_task_update_begin, torch_npu.npu.graph_task_update_end
        for each in self._launches:
            begin(stream, each.group)
            each.launch(lengths_q, lengths_kv)
            end(stream)
