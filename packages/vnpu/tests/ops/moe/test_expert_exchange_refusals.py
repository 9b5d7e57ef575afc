"""Expert exchanges that the chip refuses, or that a rank does not finish."""

import pytest

from vllm_davinci.vnpu import VirtualDeviceConfig
from vllm_davinci_testing.operators.expert_exchange import CHIP, DEFINITION
from vllm_davinci_testing.processes.forked import run_to_exit
from vllm_davinci_testing.processes.ranks import run_ranks


@pytest.mark.refused_calls
@pytest.mark.parametrize(
    ("program", "named"),
    [
        ("x = x[:, :512]", "a hidden size of 512: Ascend910_9391 takes 1024 to 8192"),
        ("x, ids = x.repeat(200, 1), ids.repeat(200, 1)", "800 tokens: at most 512"),
        ("given |= {'group_ep': 'nobody'}", "takes part in no group 'nobody'"),
        ("given |= {'ep_rank_id': 1 - rank}", "epRankId 1 of epWorldSize 2, but group"),
        ("given |= {'moe_expert_num': 5}", "moeExpertNum 5 does not divide among 2 ranks"),
        ("given |= {'moe_expert_num': 1026}", "makes 1026 experts: at most 1024 on Ascend910_9391"),
        ("given |= {'global_bs': 4}", "globalBs 4 is not the largest number of tokens, 4 here"),
        ("given |= {'quant_mode': 1}", "value 1, but must be 0 or 2"),
        ("given |= {'tp_world_size': 2, 'group_tp': 'x'}", "tpWorldSize 2 is not supported"),
        ("ids = ids + 4", "chose expert 4 of 4. Look at expertIds"),
        ("ids = ids * 0; given |= {'moe_expert_num': 2 + 6 * rank}", "mismatched collectives"),
    ],
)
def test_unsupported_sizes_are_an_error(program: str, named: str):
    ended = run_ranks(
        DEFINITION
        + f"""
x, _, _ = tokens_of(rank, 4, 2, torch.bfloat16, 4)
ids = torch.tensor([[0, 3]] * 4, dtype=torch.int32)
given = options((4, 0, 0))
{program}
torch_npu.npu_moe_distribute_dispatch_v2(x.npu(), ids.npu(), **given)
torch.npu.synchronize()
""",
        2,
        **CHIP,
    )
    assert all(rank.status != 0 for rank in ended)
    assert named in ended[0].output


DISPATCH_OF_FOUR = """
x, _, _ = tokens_of(rank, 4, 2, torch.bfloat16, 4)
ids = torch.tensor([[0, 3]] * 4, dtype=torch.int32)
given = options((4, 0, 0))
torch_npu.npu_moe_distribute_dispatch_v2(x.npu(), ids.npu(), **given)
torch.npu.synchronize()
"""


@pytest.mark.refused_calls
def test_launches_of_one_group_state_one_number_of_tokens():
    again = """
given |= {"global_bs": 2 * given["global_bs"]}
torch_npu.npu_moe_distribute_dispatch_v2(x.npu(), ids.npu(), **given)
"""
    ended = run_ranks(DEFINITION + DISPATCH_OF_FOUR + again, 2, **CHIP)
    assert all(rank.status != 0 for rank in ended)
    assert "globalBs is 28, and was 14 in an earlier launch" in ended[0].output


@pytest.mark.refused_calls
def test_a_launch_has_to_fit_the_hccl_buffer_of_its_group():
    more = DEFINITION.replace("MOST_TOKENS = 1024, 7", "MOST_TOKENS = 1024, 256")
    ended = run_ranks(more + DISPATCH_OF_FOUR, 2, HCCL_BUFFSIZE="1", **CHIP)
    assert all(rank.status != 0 for rank in ended)
    assert "561002" in ended[0].output
    assert "HCCL buffer, which has 1048576" in ended[0].output


@pytest.mark.refused_calls
@pytest.mark.parametrize(
    ("cann", "ranks", "experts", "named"),
    [
        ("8.5", 2, 8, "epWorldSize 2 is not among those of Ascend910B3: 16, 32, 64"),
        ("8.5", 64, 576, "makes 576 experts: at most 512 on Ascend910B3"),
        ("8.5", 16, 512, "makes 32 experts of a rank: at most 24 on Ascend910B3"),
        ("9.0", 16, 512, "takes part in no group 'group'"),
        ("9.0", 64, 1088, "makes 1088 experts: at most 1024 on Ascend910B3"),
    ],
)
def test_a_chip_with_other_limits_names_them(cann: str, ranks: int, experts: int, named: str):
    done = run_to_exit(
        f"""
        import torch, torch_npu
        torch_npu.npu_moe_distribute_dispatch_v2(
            torch.ones(4, 64, dtype=torch.bfloat16).npu(),
            torch.zeros(4, 2, dtype=torch.int32).npu(), "group", {ranks}, 0, {experts})
        """,
        VirtualDeviceConfig(soc="Ascend910B3", cann=cann),
    )
    assert done.status != 0
    assert named in done.stderr


def test_a_rank_that_ends_during_a_dispatch_is_named():
    ended = run_ranks(
        DEFINITION
        + """
x, ids, _ = tokens_of(rank, 4, 2, torch.bfloat16, 4)
torch.npu.synchronize()
dist.barrier()
if rank == 1:
    os._exit(3)
torch_npu.npu_moe_distribute_dispatch_v2(x.npu(), ids.npu(), **options((4, 0, 0)))
torch.npu.synchronize()
""",
        2,
        **CHIP,
    )
    assert ended[0].status != 0
    assert "rank 1" in ended[0].output and "expert_dispatch" in ended[0].output
