"""Dispatchers without other ranks: slices, launches, and the order of a layer's forward."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from vllm.distributed.parallel_state import GroupCoordinator

from vllm_davinci.core.device.soc import soc_of
from vllm_davinci.core.fused_moe.dispatcher.all_gather import AllGatherDispatcher
from vllm_davinci.core.fused_moe.dispatcher.all_to_all import AllToAllDispatcher
from vllm_davinci.core.fused_moe.dispatcher.base import SelectedTokens, TokenDispatcher
from vllm_davinci.core.fused_moe.dispatcher.fused import FusedDispatcher, FusedGroup
from vllm_davinci.core.fused_moe.dispatcher.local import LocalDispatcher
from vllm_davinci.core.fused_moe.dispatcher.pieces import ExpertPieces
from vllm_davinci.core.fused_moe.dispatcher.row_counts import CountsWait
from vllm_davinci.core.fused_moe.dispatcher.tp_slice import TPSlice
from vllm_davinci.core.fused_moe.dispatcher_selector import DispatcherSelector
from vllm_davinci.core.fused_moe.forward import FusedMoEForward, SumsOfParts
from vllm_davinci.core.fused_moe.local_experts import FloatExperts
from vllm_davinci.core.fused_moe.router import RoutingRule
from vllm_davinci.core.fused_moe.shared_experts import OverlapHooks

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
