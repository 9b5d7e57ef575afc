"""MLA sizes that the attention operator supports."""

from vllm_davinci.core.errors import UnsupportedFeatureError

# Supported kv_lora_rank and qk_rope_head_dim; a cache row consists of both. Source: the operator's
# documentation, constraints of query_rope and key_rope.
KV_LORA_RANK = 512
QK_ROPE_HEAD_DIM = 64
# Attention over expanded keys and values supports head sizes that are multiples of this.
HEAD_SIZE_MULTIPLE = 16


def check_sizes(
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    qk_nope_head_dim: int,
    v_head_dim: int,
    layer_name: str,
) -> None:
    """Raises UnsupportedFeatureError, naming the layer, for unsupported sizes."""
    wrong = {
        f"kv_lora_rank {kv_lora_rank} (must be {KV_LORA_RANK})": kv_lora_rank != KV_LORA_RANK,
        f"qk_rope_head_dim {qk_rope_head_dim} (must be {QK_ROPE_HEAD_DIM})": (
            qk_rope_head_dim != QK_ROPE_HEAD_DIM
        ),
        f"qk_nope_head_dim {qk_nope_head_dim} (must be a multiple of {HEAD_SIZE_MULTIPLE})": (
            qk_nope_head_dim % HEAD_SIZE_MULTIPLE
        ),
        f"v_head_dim {v_head_dim} (must be a multiple of {HEAD_SIZE_MULTIPLE})": (
            v_head_dim % HEAD_SIZE_MULTIPLE
        ),
    }
    if named := [what for what, is_wrong in wrong.items() if is_wrong]:
        raise UnsupportedFeatureError(
            f"{layer_name} has {', '.join(named)}, which the NPU's attention operator does not "
            "take. Choose another model."
        )
