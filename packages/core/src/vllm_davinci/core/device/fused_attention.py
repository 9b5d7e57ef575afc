"""The fused attention operator behind one signature, with or without attention sinks.

torch_npu has two functions for it: the newer one accepts sinks and renames some arguments. Compiled
operators launch the older one.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch_npu

# Names of the older function -> those of the newer one.
_NEWER_NAMES = {
    "num_heads": "num_query_heads",
    "scale": "softmax_scale",
    "actual_seq_lengths": "actual_seq_qlen",
    "actual_seq_lengths_kv": "actual_seq_kvlen",
}


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    actual_seq_lengths: Sequence[int],
    actual_seq_lengths_kv: Sequence[int],
    out: list[torch.Tensor],
    learnable_sink: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    **options: Any,
) -> None:
    """Launches npu_fused_infer_attention_score into `out`, on the current stream.

    learnable_sink: [heads of query], per head, a score that enters the softmax without a value;
                    bf16, or the dtype of query if the device has no limits
    options:        the operator's options, under the names of the function without sinks
    """
    options["actual_seq_lengths"] = actual_seq_lengths
    options["actual_seq_lengths_kv"] = actual_seq_lengths_kv
    if learnable_sink is None:
        torch_npu.npu_fused_infer_attention_score.out(
            query, key, value, workspace=workspace, out=out, **options
        )
        return
    torch_npu.npu_fused_infer_attention_score_v2.out(
        query,
        key,
        value,
        learnable_sink=learnable_sink,
        workspace=workspace,
        out=out,
        **_newer(options),
    )


def max_workspace(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    actual_seq_lengths: Sequence[int],
    actual_seq_lengths_kv: Sequence[int],
    learnable_sink: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor:
    """A workspace for `attend` with the same arguments and any lengths."""
    options["actual_seq_lengths"] = actual_seq_lengths
    options["actual_seq_lengths_kv"] = actual_seq_lengths_kv
    workspace: torch.Tensor
    if learnable_sink is None:
        workspace = torch_npu._npu_fused_infer_attention_score_get_max_workspace(
            query, key, value, **options
        )
    else:
        workspace = torch_npu._npu_fused_infer_attention_score_v2_get_max_workspace(
            query, key, value, learnable_sink=learnable_sink, **_newer(options)
        )
    return workspace


def _newer(options: dict[str, Any]) -> dict[str, Any]:
    return {_NEWER_NAMES.get(name, name): option for name, option in options.items()}
