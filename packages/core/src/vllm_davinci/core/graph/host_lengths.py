"""Updates the host lengths of attention launches in a captured graph.

The fused attention operator takes lengths as host lists, which a capture fixes, so each launch is
captured as a task group. Before a replay, every launch is repeated on an update stream with the
step's lengths: this replaces the group's tasks and computes nothing.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch_npu
from torch_npu._C import _weak_ref_tensor as weak_ref_tensor

from vllm_davinci.core.components.fused_ops import attention_groups
from vllm_davinci.core.device import fused_attention

Lengths = Sequence[int]


# Further arguments of a compiled launch, with their defaults.
OPTIONS: dict[str, Any] = {
    "sparse_mode": 0,
    "pre_tokens": 2**31 - 1,
    "next_tokens": 2**31 - 1,
    "block_size": 0,
}


class HostLengths:
    """The launches of one graph that share one attention metadata and its lengths.

    One call updates all of them if an installed package provides `attention_groups`. Otherwise, and
    with sinks, torch_npu's operator updates them one by one.
    """

    def __init__(self) -> None:
        make = attention_groups()
        self._compiled: Any = None if make is None else make()
        # Launches without `_compiled`: task groups, and the functions that launch their operators.
        self._groups: list[Any] = []
        self._launches: list[Callable[[Lengths, Lengths], Any]] = []

    def __len__(self) -> int:
        return len(self._groups) + (0 if self._compiled is None else int(self._compiled.size()))

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
        """Captures fused_attention.attend into `out`, on the capturing current stream.

        Shapes and options are the operator's. The graph holds the tensors' memory for its replays;
        this class only references them.
        """
        workspace = fused_attention.max_workspace(
            query, key, value, lengths_q, lengths_kv, **options
        )
        if self._compiled is not None and _is_compiled(options):
            self._compiled.attend(
                query,
                key,
                value,
                options.get("query_rope"),
                options.get("key_rope"),
                options["atten_mask"],
                options["block_table"],
                lengths_q,
                lengths_kv,
                options["num_heads"],
                options["num_key_value_heads"],
                options["scale"],
                options["input_layout"],
                *(options.get(name, default) for name, default in OPTIONS.items()),
                *out,
                workspace,
            )
            return
        launch = _launch_of(query, key, value, workspace, out, options)
        stream = torch_npu.npu.current_stream()
        torch_npu.npu.graph_task_group_begin(stream)
        launch(lengths_q, lengths_kv)
        self._groups.append(torch_npu.npu.graph_task_group_end(stream))
        self._launches.append(launch)

    def update(self, lengths_q: Lengths, lengths_kv: Lengths, stream: Any) -> None:
        """Sets the lengths of every launch, in `stream`'s order. `stream` must be current."""
        if self._compiled is not None:
            self._compiled.update(lengths_q, lengths_kv)
        begin, end = torch_npu.npu.graph_task_update_begin, torch_npu.npu.graph_task_update_end
        for group, launch in zip(self._groups, self._launches, strict=True):
            begin(stream, group)
            launch(lengths_q, lengths_kv)
            end(stream)


def attend(
    host_lengths: HostLengths | None,
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    out: list[torch.Tensor],
    lengths: tuple[Lengths, Lengths],
    **options: Any,
) -> None:
    """Launches fused_attention.attend into `out`, or captures it during a capture.

    host_lengths: records the launch in a capture; None otherwise
    tensors:      query, key and value
    lengths:      of queries, cumulative, and of keys
    """
    if host_lengths is None:
        fused_attention.attend(*tensors, *lengths, out, **options)
    else:
        host_lengths.attend(*tensors, out, *lengths, **options)


def _is_compiled(options: dict[str, Any]) -> bool:
    """True if a compiled launch supports these options: no sinks and no log-sum-exp."""
    return options.get("learnable_sink") is None and not options.get("softmax_lse_flag")


def _launch_of(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    workspace: torch.Tensor,
    out: list[torch.Tensor],
    options: dict[str, Any],
) -> Callable[[Lengths, Lengths], Any]:
    """Returns a function that launches the operator with given lengths and holds no memory."""
    query, key, value, workspace = map(weak_ref_tensor, (query, key, value, workspace))
    out = [weak_ref_tensor(each) for each in out]
    options = {
        name: weak_ref_tensor(option) if isinstance(option, torch.Tensor) else option
        for name, option in options.items()
    }

    def launch(lengths_q: Lengths, lengths_kv: Lengths) -> None:
        fused_attention.attend(
            query, key, value, lengths_q, lengths_kv, out, workspace=workspace, **options
        )

    return launch
