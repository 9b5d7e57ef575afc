"""Dispatchers without other ranks: slices, launches, and the order of a layer's forward."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from vllm.distributed.parallel_state import GroupCoordinator

from vllm_davinci.core.device.soc import soc_of
from vllm_davinci.core.fused_moe.dispatcher.all_to_all import AllToAllDispatcher
from vllm_davinci.core.fused_moe.dispatcher.base import SelectedTokens, TokenDispatcher
from vllm_davinci.core.fused_moe.dispatcher.fused import FusedDispatcher, FusedGroup
from vllm_davinci.core.fused_moe.dispatcher.gathered import AllGatherDispatcher
from vllm_davinci.core.fused_moe.dispatcher.local import LocalDispatcher
from vllm_davinci.core.fused_moe.dispatcher.pieces import ExpertPieces
from vllm_davinci.core.fused_moe.dispatcher.row_counts import CountsWait
from vllm_davinci.core.fused_moe.dispatcher.tp_slice import TPSlice
from vllm_davinci.core.fused_moe.dispatcher_selector import DispatcherSelector
from vllm_davinci.core.fused_moe.forward import FusedMoEForward, SumsOfParts
from vllm_davinci.core.fused_moe.local_experts import FloatExperts
from vllm_davinci.core.fused_moe.router import RoutingRule
from vllm_davinci.core.fused_moe.shared_experts import OverlapHooks
from vllm_davinci.vnpu import timeline
from vllm_davinci_testing.processes.ranks import check_ranks, run_ranks

NO_GROUP = cast("GroupCoordinator", None)


def tokens(num_tokens: int) -> SelectedTokens:
    x = torch.arange(num_tokens * 4, dtype=torch.float32).view(num_tokens, 4)
    return SelectedTokens(x, torch.ones(num_tokens, 2), torch.zeros(num_tokens, 2))


@pytest.mark.parametrize("num_tokens", [1, 3, 4, 8])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_slices_of_a_dp_rank_hold_each_token_once(num_tokens: int, count: int):
    x = tokens(num_tokens).x
    parts = []
    for index in range(count):
        dispatcher = AllToAllDispatcher(TPSlice(index, count), NO_GROUP, CountsWait("layer"), 8)
        own, logits = dispatcher.prepare(x, x[:, :2])
        assert torch.equal(own[:, :2], logits)
        parts.append(dispatcher.finalize(own, num_tokens))
    assert torch.equal(sum(parts), x)


def test_own_rows_follow_the_rows_of_lower_ranks():
    group = cast(GroupCoordinator, SimpleNamespace(rank_in_group=1))
    assert AllGatherDispatcher(group, [3, 5, 2]).own_rows(5) == slice(3, 8)


@pytest.mark.parametrize(
    ("most_tokens", "sizes"), [(512, [512]), (513, [257, 256]), (1200, [400, 400, 400])]
)
def test_every_rank_makes_as_many_launches_as_the_one_with_most_tokens(most_tokens, sizes):
    limits = soc_of("Ascend910_9391").fused_experts
    assert limits is not None
    group = FusedGroup(NO_GROUP, "name", limits, 512)
    dispatcher = FusedDispatcher(TPSlice(0, 1), group, most_tokens)
    parts = dispatcher.split(tokens(most_tokens), ExpertPieces())
    assert [len(part.x) for part in parts] == sizes
    assert [len(part.topk_ids) for part in parts] == sizes
    fewer = dispatcher.split(tokens(3), ExpertPieces())
    assert [len(part.x) for part in fewer] == [3] + [0] * (len(sizes) - 1)


@pytest.mark.parametrize(
    ("own", "most", "pieces", "sizes"),
    [
        (8, 8, None, [8]),
        (8, 8, 8, [8]),
        (8, 8, 7, [4, 4]),
        (8, 8, 3, [3, 3, 2]),
        (3, 8, 3, [3, 1, 1]),  # repeats the last token
        (1, 8, 4, [1, 1]),
    ],
)
def test_every_rank_sends_as_many_chunks_as_the_one_with_most_tokens(own, most, pieces, sizes):
    dispatcher = AllToAllDispatcher(TPSlice(0, 1), NO_GROUP, CountsWait("layer"), most)
    parts = dispatcher.split(tokens(own), ExpertPieces(pieces))
    assert [len(part.x) for part in parts] == sizes
    sums = SumsOfParts(tokens(own).x)
    for part in parts:
        sums.add(part.x)
    assert torch.equal(sums.whole, tokens(own).x)


class Noted(LocalDispatcher):
    """A dispatcher that runs each half separately and records the order of all calls."""

    def __init__(self, gathers: bool, called: list[str]) -> None:
        self.gathers = gathers  # type: ignore[misc]  # of the class elsewhere
        self.called = called

    def prepare(self, *arguments: Any) -> Any:
        self.called.append("prepare")
        return super().prepare(*arguments)

    def split(self, tokens: SelectedTokens, pieces: ExpertPieces) -> list[SelectedTokens]:
        self.called.append("split")
        half = len(tokens.x) - len(tokens.x) // 2
        return [tokens.part(slice(half)), tokens.part(slice(half, None))]

    def dispatch(self, *arguments: Any) -> Any:
        self.called.append("dispatch")
        return super().dispatch(*arguments)

    def combine(self, *arguments: Any) -> torch.Tensor:
        self.called.append("combine")
        return super().combine(*arguments)

    def finalize(self, *arguments: Any) -> torch.Tensor:
        self.called.append("finalize")
        return super().finalize(*arguments)


@pytest.mark.parametrize("gathers", [False, True])
def test_hooks_of_overlap_stand_between_the_lines_once_each(gathers: bool):
    called: list[str] = []

    class Hooks(OverlapHooks):
        def pre_dispatch(self) -> None:
            called.append("pre_dispatch")

        def post_dispatch(self) -> None:
            called.append("post_dispatch")

        def pre_combine(self) -> None:
            called.append("pre_combine")

    class Selector(DispatcherSelector):
        def __init__(self) -> None:
            """A selector without dispatchers."""

        def of_step(self, num_tokens: int) -> TokenDispatcher[Any]:
            return Noted(gathers, called)

    generator = torch.Generator().manual_seed(0)
    gate_up, down, x, logits = (
        torch.randn(*shape, generator=generator).npu()
        for shape in ((4, 16, 32), (4, 16, 16), (5, 16), (5, 4))
    )
    experts = FloatExperts(gate_up=gate_up, down=down, first=0, num_local=4, num_experts=4)
    noted = FusedMoEForward(RoutingRule(2), experts, dispatchers=Selector())
    halved = noted._routed(x, logits, Hooks())
    begin = ["pre_dispatch", "prepare"] if gathers else ["prepare", "pre_dispatch"]
    assert called == [
        *begin,
        "split",
        *("dispatch", "post_dispatch", "combine"),
        *("dispatch", "pre_combine", "combine"),
        "finalize",
    ]
    whole = FusedMoEForward(RoutingRule(2), experts)(x, logits)
    torch.testing.assert_close(halved.cpu(), whole.cpu(), atol=1e-5, rtol=1e-5)


# A layer over several ranks: each method gives each DP rank the sums of its own tokens.

RANK_PROGRAM = Path(__file__).with_name("moe_rank.py")

# Numbers of tokens per DP rank, step by step (up to eight tokens: a decode): uneven; uneven, with a
# single token; one DP rank idle with a dummy row; equal.
TWO_DP_RANKS = [[5, 13], [7, 1], [1, 1], [8, 8]]
ONE_DP_RANK = [[13], [3], [1]]
OF_GRAPHS = [[8, 8], [1, 1]]  # all ranks have the same size


Launched = Callable[..., list[list[dict[str, int]]]]


@pytest.fixture
def launched() -> Launched:
    """Runs ranks that check their outputs; returns rank 0's launches between ranks, by variant and
    step.
    """

    def run(
        tensor: int,
        data: int,
        variants: list[dict[str, Any]],
        soc: str = "reference",
        **variables: str,
    ) -> list[list[dict[str, int]]]:
        setting = json.dumps({"tensor": tensor, "data": data, "variants": variants})
        printed = check_ranks(RANK_PROGRAM, tensor * data, setting, VNPU_SOC=soc, **variables)
        for output in printed:
            assert "equal" in output.splitlines(), output[-4000:]
        prefix = "launched "
        lines = [line for line in printed[0].splitlines() if line.startswith(prefix)]
        return [json.loads(line.removeprefix(prefix)) for line in lines]

    return run


def sent_each_to_its_rank(group: str) -> dict[str, int]:
    """Launches of all-to-all in a group, the only method that copies counts to the host."""
    return {f"{group} all_to_all": 3, "synchronizations": 1, "copies_to_host": 1}


def in_equal_parts(group: str) -> dict[str, int]:
    """Launches of all-to-all in a graph, where no rank waits for counts."""
    return {f"{group} all_to_all": 3}


def test_on_one_dp_rank_routed_and_shared_sums_are_reduced_once(launched: Launched):
    once = {"tp all_reduce": 1}
    assert launched(
        4,
        1,
        [
            {"steps": ONE_DP_RANK},
            {"steps": ONE_DP_RANK, "options": {"expert_tensor_parallel_size": 1}},
            {"steps": ONE_DP_RANK, "options": {"expert_tensor_parallel_size": 2}},
            {
                "steps": ONE_DP_RANK,
                "options": {"expert_tensor_parallel_size": 1, "moe_communication": "all_to_all"},
            },
            {
                "steps": ONE_DP_RANK,
                "options": {"expert_tensor_parallel_size": 2, "moe_communication": "all_to_all"},
            },
            {
                "steps": ONE_DP_RANK,
                "options": {"expert_tensor_parallel_size": 2, "moe_communication": "all_to_all"},
                "for_graph": True,
            },
        ],
    ) == [
        *[[once] * 3] * 3,
        *([{**sent_each_to_its_rank(group), **once}] * 3 for group in ("ep", "experts")),
        [{**in_equal_parts("experts"), **once}] * 3,
    ]


def test_two_dp_ranks_of_one_rank_exchange_tokens(launched: Launched):
    multicast = {"dp broadcast": 4, "dp all_reduce": 1}
    gather = {"dp all_gatherv": 2, "dp reduce_scatterv": 1}
    even_gather = {"dp all_gather": 2, "dp reduce_scatter": 1}
    gathers = [gather, gather, even_gather, even_gather]
    to_experts = sent_each_to_its_rank("ep")
    assert launched(
        1,
        2,
        [
            {"steps": TWO_DP_RANKS},
            {"steps": TWO_DP_RANKS, "options": {"moe_communication": "all_to_all"}},
            {"steps": TWO_DP_RANKS, "options": {"moe_communication": "all_to_all"}, "skewed": True},
            *(
                {
                    "steps": OF_GRAPHS,
                    "options": {"moe_communication": "all_to_all"},
                    "for_graph": True,
                    "skewed": skewed,
                }
                for skewed in (False, True)
            ),
            {"steps": TWO_DP_RANKS, "options": {"moe_communication": "all_gather"}},
            {"steps": TWO_DP_RANKS, "options": {"moe_communication": "multicast"}},
            {"steps": TWO_DP_RANKS, "options": {"expert_tensor_parallel_size": 2}},
        ],
    ) == [
        # Fused launches do not support fp32, and in decodes the host must not wait.
        [to_experts, *gathers[1:]],
        [to_experts] * 4,
        [to_experts] * 4,
        [in_equal_parts("ep")] * 2,
        [in_equal_parts("ep")] * 2,
        gathers,
        [multicast] * 4,
        [multicast, *gathers[1:]],
    ]


@pytest.mark.nightly("layouts")
def test_two_dp_ranks_of_two_ranks_exchange_tokens(launched: Launched):
    reduced = {"tp all_reduce": 1}
    whole = {"expert_tensor_parallel_size": 1}
    to_ranks = {"moe_communication": "all_to_all"}
    results = launched(
        2,
        2,
        [
            {"steps": TWO_DP_RANKS, "options": to_ranks},
            {"steps": TWO_DP_RANKS, "options": {**whole, **to_ranks}},
            {"steps": TWO_DP_RANKS, "options": {"expert_tensor_parallel_size": 4}},
            {"steps": TWO_DP_RANKS, "options": {**whole, "moe_communication": "all_gather"}},
            {"steps": TWO_DP_RANKS, "options": {**whole, **to_ranks}, "sequence_parallel": True},
            {
                "steps": TWO_DP_RANKS,
                "options": {**whole, "moe_communication": "all_gather"},
                "sequence_parallel": True,
            },
        ],
    )
    assert results[0] == [{**sent_each_to_its_rank("experts"), **reduced}] * 4
    assert results[1] == [{**sent_each_to_its_rank("ep"), **reduced}] * 4
    assert results[2][0] == {"dp broadcast": 4, "dp all_reduce": 1, **reduced}
    assert results[2][1] == {"dp all_gatherv": 2, "dp reduce_scatterv": 1, **reduced}
    assert results[3][0] == {"dp all_gatherv": 2, "dp reduce_scatterv": 1, **reduced}
    # Each rank gets complete sums of its own tokens, so no reduction remains.
    assert results[4] == [sent_each_to_its_rank("ep")] * 4
    assert results[5][0] == {"ep all_gatherv": 2, "ep reduce_scatterv": 1}


# One launch for dispatch and one for combine; the host does not wait.
FUSED = {"fused_experts launch": 2}
IN_BF16 = {"dtype": "bfloat16", "fused": True}


@pytest.mark.parametrize(
    ("tensor", "data", "steps"),
    [pytest.param(2, 1, ONE_DP_RANK, marks=pytest.mark.thorough), (2, 2, TWO_DP_RANKS)],
)
def test_fused_launches_leave_the_host_nothing_to_wait_for(tensor, data, steps, launched):
    reduced = {"tp all_reduce": 1}
    asked = {"moe_communication": "fused"}
    whole = {"expert_tensor_parallel_size": 1, **asked}
    variants = [
        {"steps": steps, "options": whole, **IN_BF16},
        {"steps": steps, "options": whole, "skewed": True, **IN_BF16},
        {"steps": steps, "options": whole, "sequence_parallel": True, **IN_BF16},
    ]
    expected = [[{**FUSED, **reduced}] * len(steps)] * 2 + [[FUSED] * len(steps)]
    if data > 1:
        variants.append({"steps": steps, "options": asked, **IN_BF16})
        expected.append([{**FUSED, **reduced}] * len(steps))
    assert launched(tensor, data, variants, soc="Ascend910_9391") == expected


def test_decodes_of_dp_ranks_use_fused_launches_where_the_chip_has_them(launched: Launched):
    (steps,) = launched(1, 2, [{"steps": TWO_DP_RANKS, **IN_BF16}], soc="Ascend910_9391")
    assert steps == [sent_each_to_its_rank("ep"), FUSED, FUSED, FUSED]


@pytest.mark.thorough
def test_the_group_of_fused_launches_has_a_buffer_for_the_largest(launched: Launched):
    """HCCL_BUFFSIZE is 1 MiB here, but a fused launch needs 26 MiB."""
    options = {"moe_communication": "fused"}
    variant = {"steps": [[512, 3]], "options": options, **IN_BF16}
    (steps,) = launched(1, 2, [variant], soc="Ascend910_9391", HCCL_BUFFSIZE="1")
    assert steps == [FUSED]


def test_a_group_of_fused_launches_that_does_not_fit_names_tokens_and_other_methods():
    setting = {"tensor": 1, "data": 2, "variants": [{"steps": [[1, 1]], **IN_BF16}]}
    variables = {"VNPU_SOC": "Ascend910_9391", "VNPU_MEMORY": "40MiB", "HCCL_BUFFSIZE": "1"}
    for ended in run_ranks(RANK_PROGRAM, 2, json.dumps(setting), **variables):
        assert ended.status != 0
        (said,) = (line for line in ended.output.splitlines() if "DeviceError:" in line)
        assert (
            "of fused launches of experts, of up to 512 tokens, does not fit: it takes 52" in said
        )
        assert "twice its buffer of 26 MiB, and 40.00 MiB of 40.00 MiB are free" in said
        assert (
            "lower --max-num-seqs and --max-num-batched-tokens; or choose another dispatch method"
            in said
        )
        assert "'moe_communication' = 'all_to_all'" in said
        assert "HCCL_BUFFSIZE" not in said  # a smaller value would have no effect


@pytest.mark.thorough
def test_more_tokens_than_a_launch_takes_go_in_several(launched: Launched):
    sizes = [[600, 2]]
    options = {"moe_communication": "fused"}
    (steps,) = launched(
        1, 2, [{"steps": sizes, "options": options, **IN_BF16}], soc="Ascend910_9391"
    )
    assert steps == [{"fused_experts launch": 4}]


QUANTIZED = {"quantized": "W8A8_DYNAMIC", **IN_BF16}


@pytest.mark.parametrize(
    ("tensor", "data", "steps"),
    [
        (1, 2, TWO_DP_RANKS),
        pytest.param(2, 1, ONE_DP_RANK, marks=pytest.mark.thorough),
        pytest.param(2, 2, TWO_DP_RANKS, marks=pytest.mark.thorough),
    ],
)
def test_rows_of_int8_experts_give_the_integer_definition(tensor, data, steps, launched):
    whole = {"expert_tensor_parallel_size": 1}
    variants: list[dict[str, Any]] = [
        {"steps": steps, "options": {**whole, "moe_communication": method}, **QUANTIZED}
        for method in ("fused", "all_to_all")
    ]
    variants.append({**variants[1], "skewed": True})
    variants.append({**variants[1], "steps": [[8] * data, [1] * data], "for_graph": True})
    variants.append({**variants[0], "skewed": True})
    results = launched(tensor, data, variants, soc="Ascend910_9391")
    reduced = {"tp all_reduce": 1} if tensor > 1 else {}
    assert results[0] == results[-1] == [{**FUSED, **reduced}] * len(steps)
    # int8 rows, and their scales.
    sent = {**sent_each_to_its_rank("ep"), "ep all_to_all": 4}
    assert results[1] == results[2] == [{**sent, **reduced}] * len(steps)
    assert results[3] == [{**in_equal_parts("ep"), "ep all_to_all": 4, **reduced}] * len(OF_GRAPHS)


# Ranks wait only for rows sent to their experts.


def test_a_wait_for_row_counts_times_out_and_names_the_layer():
    options = {"expert_tensor_parallel_size": 1, "moe_communication": "all_to_all"}
    variant = {"last_is_absent": True, "options": options}
    setting = {"tensor": 2, "data": 1, "variants": [variant]}
    # A long limit, so that the collective itself does not time out first.
    limits = {"VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "3", "HCCL_EXEC_TIMEOUT": "60"}
    waiting, _ = check_ranks(RANK_PROGRAM, 2, json.dumps(setting), **limits)
    (said,) = (line for line in waiting.splitlines() if line.startswith("after "))
    assert 2 <= float(said.split()[1]) < 30
    assert said.partition(": ")[2] == (
        "model.layers.0.mlp.experts: rank 0 of group 'ep' timed out after 2.1 s waiting for the "
        "row counts of the 2 ranks of the group. One of them has failed or is late: look for its "
        "error in the log above. A longer wait: VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS=SECONDS."
    )


PACE = "aclnnMatmul=300000,all_to_all=300000/MiB"


def test_rows_travel_while_the_other_ubatch_computes(tmp_path: Path):
    options = {
        "expert_tensor_parallel_size": 1,
        "moe_communication": "all_to_all",
        "dbo": {"enabled": True},
    }
    # Each of a rank's 100 tokens has 3 experts: about 150 rows of 4 KiB go to each rank.
    variant = {"ubatches": [200, 200], "options": options}
    setting = {"tensor": 2, "data": 1, "options": options, "variants": [variant]}
    environment = {"VNPU_SCHEDULE": "threads", "VNPU_PACE": PACE, "VNPU_TRACE": str(tmp_path)}
    check_ranks(RANK_PROGRAM, 2, json.dumps(setting), **environment)
    traced = timeline.read([tmp_path])
    assert len(traced.processes) == 2
    for process in traced.processes:
        tasks = [task for task in traced.tasks if task.process == process]
        # Counts, rows and results of two steps; the first step allocates.
        *_, counts, rows, _ = (
            task
            for task in tasks
            if task.name.startswith("all_to_all") and task.label == "ubatch 0"
        )
        assert (counts.bytes_written, rows.bytes_written > 500_000) == (64, True)
        products = [
            task.busy for task in tasks if task.name == "aclnnMatmul" and task.label == "ubatch 1"
        ]
        begin, end = rows.busy
        beside = sum(
            max(0, min(end, product_end) - max(begin, product_begin))
            for product_begin, product_end in products
        )
        # The counts reached the host before the device finished these products, and the rows waited
        # neither for the products nor for the other ubatch's counts.
        assert beside > 0.8 * (end - begin) > 100_000
