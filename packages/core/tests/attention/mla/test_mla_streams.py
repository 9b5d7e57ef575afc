"""MLA on two streams: identical bits, the planned launches, and when steps use one stream."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.config import VllmConfig

from vllm_davinci_testing.layers.mla_layer import DECODES, MIXED, Block, Step, with_streams

pytestmark = pytest.mark.usefixtures("registered")


class StreamTrace(TorchDispatchMode):
    """Records the stream of each launched operator, not of views."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[tuple[str, bool]] = []
        self._main = torch.accelerator.current_stream()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().split(".")[0].split("::")[1]
        if not func.is_view and "empty" not in name:
            is_side = torch.accelerator.current_stream() != self._main
            self.launches.append((name, is_side))
        return func(*args, **(kwargs or {}))

    @property
    def on_side(self) -> list[str]:
        return [name for name, is_side in self.launches if is_side]


@pytest.mark.parametrize("q_lora_rank", [48, None], ids=["q_lora", "no_q_lora"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_two_streams_give_the_same_bits(dtype, q_lora_rank, vllm_config, device):
    alone = Block(vllm_config, device, dtype, q_lora_rank=q_lora_rank)
    vllm_config.compilation_config.static_forward_context.clear()
    beside = with_streams(vllm_config, device, dtype=dtype, q_lora_rank=q_lora_rank)
    for step in [*DECODES, [("c", 1), ("b", 1)]]:
        for one, two in zip(alone.run(step), beside.run(step), strict=True):
            assert torch.equal(one, two)
    for one, two in zip(alone.cache[:2], beside.cache[:2], strict=True):
        assert torch.equal(one.cpu(), two.cpu())


def trace(block: Block, step: Step, others_prefill: bool = False) -> StreamTrace:
    metadata = block.metadata(step)
    metadata.others_prefill = others_prefill
    with StreamTrace() as launches:
        block.forward(metadata)
    return launches


def test_launches_go_to_the_planned_streams(vllm_config: VllmConfig, device: torch.device):
    block = with_streams(vllm_config, device)
    block.run(DECODES[0])
    launches = trace(block, DECODES[1])
    assert launches.on_side == ["mm", "npu_kv_rmsnorm_rope_cache", "npu_interleave_rope"]
    names = [name for name, _ in launches.launches]
    first, last = names.index("npu_prefetch"), len(names) - 1 - names[::-1].index("mm")
    planned = [
        ("npu_prefetch", False),  # of W_DQ
        ("mm", False),  # W_DQ
        ("mm", True),  # W_DKV
        ("npu_rms_norm", False),
        ("npu_kv_rmsnorm_rope_cache", True),
        ("mm", False),  # W_UQ
        ("npu_interleave_rope", True),
        ("npu_transpose_batchmatmul", False),  # W_UK
        ("npu_fused_infer_attention_score", False),
        ("npu_transpose_batchmatmul", False),  # W_UV
        ("npu_prefetch", False),  # of W_O
        ("mm", False),  # W_O
    ]
    launched = [each for each in launches.launches[first : last + 1] if each in planned]
    assert launched == planned


@pytest.mark.parametrize("step", [MIXED[0], [("a", 1), ("e", 30)]], ids=["prefill", "mixed"])
def test_steps_with_prefills_stay_on_one_stream(step, vllm_config, device):
    block = with_streams(vllm_config, device)
    block.run([("a", 3)])
    assert not trace(block, step).on_side


def test_prefills_of_another_dp_rank_keep_decodes_on_one_stream(vllm_config, device):
    block = with_streams(vllm_config, device)
    block.run(DECODES[0])
    assert not trace(block, DECODES[1], others_prefill=True).on_side
