"""Expert tables follow weights that a thread sends while steps continue."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.config import VllmConfig
from vllm.distributed.eplb.rebalance_execute import AsyncEplbLayerResult, TransferMetadata

from vllm_davinci.core.expert_balance.state import NPUEplbState, imbalance
from vllm_davinci.core.fused_moe.replicas import ReplicaTable

LAYERS, EXPERTS = 2, 4
BEFORE, AFTER = [0, 1, 2, 3], [3, 1, 2, 0]


class Counts:
    """A step's loads. `when_cleared` runs inside the step that clears them."""

    def __init__(self, when_cleared: Callable[[], None]) -> None:
        self.zero_ = when_cleared


class Consumed:
    """The event of a moved result; the thread continues when the event is recorded."""

    def __init__(self, when_recorded: Callable[[], None]) -> None:
        self.record = when_recorded


def nothing() -> None:
    pass


def result(layer: int, when_consumed: Callable[[], None] = nothing) -> AsyncEplbLayerResult:
    """Makes new slots for a layer's experts that need no copy of weights."""
    none = np.zeros(EXPERTS, dtype=bool)
    metadata = TransferMetadata(~none, none, none, 0, np.array([]), np.array([]))
    return AsyncEplbLayerResult(layer, torch.tensor(AFTER), metadata, Consumed(when_consumed))


@pytest.fixture
def state(one_rank: None, vllm_config: VllmConfig, device: torch.device) -> NPUEplbState:
    state = NPUEplbState(vllm_config.parallel_config, device)
    state.is_async, state.expert_rearrangement_step_interval = True, 100
    places = torch.tensor([BEFORE] * LAYERS)
    model = SimpleNamespace(num_moe_layers=LAYERS, expert_weights=[[]] * LAYERS)
    state.model_states["model"] = SimpleNamespace(
        model=model,
        expert_buffer=[],
        expert_load_pass=Counts(nothing),
        last_expert_load=None,
        pending_result=None,
        rebalanced=True,
        physical_to_logical_map=places.clone(),
        logical_to_physical_map=places.unsqueeze(-1).clone(),
        logical_replica_count=torch.ones_like(places),
    )
    state._shown = places
    state._tables = [ReplicaTable(BEFORE, EXPERTS, device, 8) for _ in range(LAYERS)]
    return state


def tables(state: NPUEplbState) -> list[list[int]]:
    """Reads each expert's slot in each layer from the tables on the device."""
    return [table.numbers[:, 0].tolist() for table in state._tables]


def test_a_layer_whose_weights_arrive_during_a_step_uses_the_new_places(state: NPUEplbState):
    model: Any = state.model_states["model"]
    model.expert_load_pass = Counts(lambda: setattr(model, "pending_result", result(0)))
    state.step(is_dummy=True)
    assert model.physical_to_logical_map[0].tolist() == AFTER
    assert tables(state) == [AFTER, BEFORE]


def test_a_layers_table_is_updated_as_soon_as_it_has_moved(state: NPUEplbState):
    model: Any = state.model_states["model"]
    model.pending_result = result(0, lambda: setattr(model, "pending_result", result(1)))
    state.step(is_dummy=True)
    assert tables(state) == [AFTER, BEFORE]
    model.expert_load_pass = Counts(nothing)
    state.step(is_dummy=True)
    assert model.physical_to_logical_map.tolist() == [AFTER, AFTER]
    assert tables(state) == [AFTER, AFTER]


def test_a_step_without_a_result_changes_no_table(state: NPUEplbState):
    state.step(is_dummy=True)
    assert tables(state) == [BEFORE, BEFORE]


# The imbalance of ranks equals values computed by hand.


@pytest.mark.parametrize(
    ("loads", "placed", "expected"),
    [
        ([[4, 4, 4, 4]], [[0, 1, 2, 3]], 1.0),
        ([[8, 4, 2, 2]], [[0, 1, 2, 3]], 1.5),
        ([[8, 4, 2, 2]], [[0, 2, 1, 3]], 1.25),
        # 4 + 4 + 2 on one rank, 4 + 1 + 1 on the other.
        ([[8, 4, 2, 2]], [[0, 1, 2, 0, 3, 3]], 1.25),
        ([[8, 0, 0, 0], [0, 0, 0, 0]], [[0, 1, 2, 3], [0, 1, 2, 3]], 2.0),
        ([[0, 0, 0, 0]], [[0, 1, 2, 3]], 1.0),
    ],
)
def test_the_largest_load_of_a_rank_over_the_mean(loads, placed, expected):
    assert imbalance(torch.tensor(loads), torch.tensor(placed), 2) == pytest.approx(expected)
