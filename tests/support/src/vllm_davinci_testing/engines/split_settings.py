"""Options of `dbo` that split every divisible step, including decodes."""

from typing import Any

# Options of a published command that enables `dbo`.
PUBLISHED: dict[str, Any] = {
    "expert_tensor_parallel_size": 1,
    "enable_inter_dp_scheduling": True,
    "init_torchair_graph_batch_sizes": True,
    "trace_recompiles": True,
    "ascend_scheduler_config": {},
    "enable_graph_mode": False,
}
SPLIT_ALWAYS: dict[str, Any] = {
    "enabled": True,
    "decode": True,
    "min_total_tokens_to_split": 2,
    "min_prefill_tokens_to_split": 1,
    "min_decode_tokens_to_split": 2,
    "imbalance_ratio": 0.5,
}
