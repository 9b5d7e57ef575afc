"""An attention block captured once and replayed: the bits of eager steps."""

import pytest
import torch
from vllm.compilation.monitor import set_cudagraph_capturing_enabled
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.forward_context import BatchDescriptor, set_forward_context

from vllm_davinci.core.errors import DeviceError
from vllm_davinci.core.graph.wrapper import NPUGraphWrapper
from vllm_davinci.core.out_of_tree import register
from vllm_davinci_testing.layers.mla_layer import HIDDEN, Block, Step

SIDE_STREAM = {"torchair_graph_config": {"enable_multistream_mla": True}}


@pytest.fixture(autouse=True)
def registered(one_rank: None) -> None:
    register()


class GraphBlock:
    """A block with a runner's fixed buffers, and steps padded to one size."""

    def __init__(self, block: Block, num_requests: int, query_len: int) -> None:
        self.block, self.num_requests, self.query_len = block, num_requests, query_len
        block.builder.reorder_batch_threshold = query_len
        self.num_tokens = num_requests * query_len

        def buffer(*sizes: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(sizes, dtype=dtype, device=block.device)

        self.positions, self.slots = buffer(self.num_tokens), buffer(self.num_tokens)
        self.hidden = buffer(self.num_tokens, HIDDEN, dtype=block.dtype)
        self.table = buffer(num_requests, 8, dtype=torch.int32)
        self.wrapper = NPUGraphWrapper(self.forward, block.vllm_config)

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.block.module(positions, hidden_states, None)

    def run(
        self, step: Step | None, mode: CUDAGraphMode = CUDAGraphMode.FULL, **changes: torch.Tensor
    ) -> torch.Tensor:
        """Output of the step's own rows. step: None for padding only"""
        step = step or []
        common = self.block.common(step or [("nobody", 0)])
        rows = int(common.query_start_loc_cpu[-1])
        self.slots.fill_(-1)
        self.table.zero_()
        if rows:
            self.slots[:rows] = common.slot_mapping
            self.table[: len(step)] = common.block_table_tensor
            self.positions[:rows] = self.block.positions
            self.hidden[:rows] = torch.cat(self.block.new).to(self.block.device)
        padding = self.num_requests - len(step)
        ends = common.query_start_loc_cpu[: len(step) + 1]
        lengths = common.seq_lens_cpu_upper_bound[: len(step)]
        common.query_start_loc_cpu = torch.cat([ends, ends[-1:].expand(padding)])
        common.query_start_loc = common.query_start_loc_cpu.to(self.block.device)
        common.seq_lens_cpu_upper_bound = torch.cat([lengths, lengths.new_zeros(padding)])
        common.num_reqs, common.num_actual_tokens = self.num_requests, self.num_tokens
        common.max_query_len = self.query_len
        common.block_table_tensor, common.slot_mapping = self.table, self.slots
        metadata = self.block.builder.build(0, common)
        inputs = {"positions": self.positions, "hidden_states": self.hidden, **changes}
        with (
            torch.inference_mode(),
            set_forward_context(
                {self.block.wrapper.mla_attn.layer_name: metadata},
                self.block.vllm_config,
                cudagraph_runtime_mode=mode,
                batch_descriptor=BatchDescriptor(self.num_tokens, self.num_requests, True),
            ),
        ):
            output = self.wrapper(**inputs)
        return output[:rows].cpu()


@pytest.mark.parametrize("query_len", [1, 3])
@pytest.mark.parametrize("options", [{}, SIDE_STREAM], ids=["one_stream", "side_stream"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_replayed_steps_give_the_bits_of_eager_ones(
    query_len: int,
    options: dict[str, object],
    dtype: torch.dtype,
    vllm_config: VllmConfig,
    device: torch.device,
):
    vllm_config.additional_config = options
    eager = Block(vllm_config, device, dtype)
    vllm_config.compilation_config.static_forward_context.clear()
    captured = Block(vllm_config, device, dtype)
    for block in (eager, captured):
        block.run([("a", 40), ("b", 127), ("c", 20)])
    replayed = GraphBlock(captured, num_requests=4, query_len=query_len)
    replayed.run(None, CUDAGraphMode.NONE)  # shared tensors are created outside the capture
    set_cudagraph_capturing_enabled(True)
    replayed.run(None)
    set_cudagraph_capturing_enabled(False)
    eager.builder.reorder_batch_threshold = query_len
    for names in ("abc", "ab", "c", "cab"):
        step = [(name, query_len) for name in names]
        assert torch.equal(replayed.run(step), torch.cat(eager.run(step)))
    assert replayed.wrapper.replays == {4 * query_len: 4}
    for one, two in zip(eager.cache[:2], captured.cache[:2], strict=True):
        assert torch.equal(one.cpu(), two.cpu())  # padding has written nothing


def test_inputs_that_have_moved_are_an_error_that_names_them(
    vllm_config: VllmConfig, device: torch.device
):
    replayed = GraphBlock(Block(vllm_config, device), num_requests=2, query_len=1)
    replayed.run(None, CUDAGraphMode.NONE)
    set_cudagraph_capturing_enabled(True)
    replayed.run(None)
    set_cudagraph_capturing_enabled(False)
    with pytest.raises(DeviceError, match=r"reads hidden_states of \(2, 64\) and is given"):
        replayed.run(None, hidden_states=replayed.hidden.clone())


def test_a_size_that_was_not_captured_is_not_captured_later(
    vllm_config: VllmConfig, device: torch.device
):
    replayed = GraphBlock(Block(vllm_config, device), num_requests=2, query_len=1)
    set_cudagraph_capturing_enabled(False)
    with pytest.raises(RuntimeError, match="capturing detected at an inappropriate time"):
        replayed.run(None)
