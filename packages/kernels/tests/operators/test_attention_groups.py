"""Attention in captured graphs; lengths are replaced before each replay."""

import pytest
import torch
import torch_npu

from vllm_davinci.kernels import load

HEADS, SIZE, BLOCK = 4, 64, 128


class Step:
    """Queries of one token over a paged cache."""

    def __init__(self, num_requests: int, dtype: torch.dtype = torch.bfloat16) -> None:
        torch.manual_seed(3)
        self.query = torch.randn(num_requests, HEADS, SIZE).to(dtype).npu()
        self.cache = torch.randn(2 * num_requests, BLOCK, 2 * SIZE).to(dtype).npu()
        self.table = torch.arange(2 * num_requests, dtype=torch.int32).view(-1, 2).npu()
        self.lengths_q = list(range(1, num_requests + 1))
        self.options = {
            "block_table": self.table,
            "num_heads": HEADS,
            "num_key_value_heads": 2,
            "scale": SIZE**-0.5,
            "input_layout": "TND",
            "block_size": BLOCK,
        }

    def expected(self, lengths: list[int]) -> torch.Tensor:
        out, _ = torch_npu.npu_fused_infer_attention_score(
            self.query,
            self.cache,
            self.cache,
            actual_seq_lengths=self.lengths_q,
            actual_seq_lengths_kv=lengths,
            **self.options,
        )
        return out.cpu()

    def capture(self, groups: object, out: torch.Tensor, lengths: list[int]) -> None:
        lse = out.new_empty(0, dtype=torch.float32)
        workspace = torch_npu._npu_fused_infer_attention_score_get_max_workspace(
            self.query,
            self.cache,
            self.cache,
            actual_seq_lengths=self.lengths_q,
            actual_seq_lengths_kv=lengths,
            **self.options,
        )
        groups.attend(
            self.query, self.cache, self.cache, None, None, None, self.table, self.lengths_q,
            lengths, HEADS, 2, SIZE**-0.5, "TND", 0, 2**31 - 1, 2**31 - 1, BLOCK, out, lse,
            workspace,
        )  # fmt: skip


def test_an_update_gives_every_launch_of_the_graph_its_lengths():
    step = Step(3)
    groups = load("attention_groups")()
    outs = [torch.zeros_like(step.query) for _ in range(2)]
    torch.npu.synchronize()
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        for out in outs:
            step.capture(groups, out, [1, 1, 1])
    assert groups.size() == 2
    for lengths in ([5, 130, 200], [256, 1, 77]):
        groups.update(step.lengths_q, lengths)
        graph.replay()
        for out in outs:
            assert torch.equal(out.cpu(), step.expected(lengths))


def test_groups_without_a_launch_need_no_update():
    load("attention_groups")().update([1], [1])


def test_a_launch_outside_of_a_capture_is_refused():
    step = Step(1)
    with pytest.raises(RuntimeError, match="aclmdlRICaptureTaskGrpBegin returned"):
        step.capture(load("attention_groups")(), torch.zeros_like(step.query), [1])
        torch.npu.synchronize()


def test_an_unknown_layout_is_refused():
    step = Step(1)
    groups = load("attention_groups")()
    lse, workspace = step.query.new_empty(0, dtype=torch.float32), step.query.new_empty(0)
    with pytest.raises(ValueError, match="layout of BSH"):
        groups.attend(
            step.query, step.cache, step.cache, None, None, None, step.table, [1], [1], HEADS, 2,
            1.0, "BSH", 0, 0, 0, BLOCK, step.query, lse, workspace,
        )  # fmt: skip
