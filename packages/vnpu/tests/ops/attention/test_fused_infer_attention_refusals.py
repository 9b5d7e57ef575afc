"""Arguments that the fused attention operator refuses."""

import pytest
import torch
import torch_npu


def refusal(match: str, **changes: object) -> None:
    arguments: dict[str, object] = {
        "actual_seq_lengths": [2],
        "actual_seq_lengths_kv": [20],
        "block_table": torch.zeros(1, 2, dtype=torch.int32).npu(),
        "num_heads": 4,
        "num_key_value_heads": 2,
        "input_layout": "TND",
        "block_size": 16,
    } | changes
    cache = torch.zeros(3, 16, 64).npu()
    with pytest.raises(RuntimeError, match=match):
        torch_npu.npu_fused_infer_attention_score(
            torch.zeros(2, 4, 32).npu(), cache, cache, **arguments
        )
        torch.npu.synchronize()


@pytest.mark.refused_calls
def test_wrong_arguments_are_refused_with_the_value_seen() -> None:
    refusal("beside block_size value 24", block_size=24)
    refusal(
        r"blockTable\[0\]\[1\] is 7", block_table=torch.tensor([[0, 7]], dtype=torch.int32).npu()
    )
    refusal(r"beside key_lengths \[50\], block_size value 16", actual_seq_lengths_kv=[50])
    refusal(r"has \[3\] beside query sizes \[2, 4, 32\]", actual_seq_lengths=[3])
    refusal("mask .* must be given when sparse_mode is 2, 3 or 4", sparse_mode=3)
    refusal("2048 x 2048", sparse_mode=3, atten_mask=torch.zeros(64, 64, dtype=torch.bool).npu())
