"""The step time of all layers follows from a few first layers: which ones, and the times."""

import pytest
import torch

from vllm_davinci.planner.dry_run.stack import (
    LayerStack,
    Repetition,
    StepTime,
    repetition,
    stack_of,
)

CACHE = 100


def step_of(layers: int) -> StepTime:
    return StepTime(requests=8, total_ps=1000 + 37 * layers, busy_ps=200 + 3 * layers)


def test_later_layers_all_add_the_same_time():
    sample = Repetition(fewer=4, more=7, total=94)
    assert sample.of_all(step_of(4), step_of(7)) == step_of(94)


def test_python_hides_behind_all_layers_though_not_behind_few():
    """With few layers, a large decode step ends before vLLM's own Python."""
    python_ps = 4000
    few = [step_of(4), step_of(7)]
    assert [step.with_python(python_ps, hides_host=True) for step in few] == [4212, 4221]
    found = Repetition(4, 7, 94).of_all(*few)
    assert found.with_python(python_ps, hides_host=True) == max(1000 + 37 * 94, 200 + 282 + 4000)
    assert found.with_python(1000, hides_host=True) == 1000 + 37 * 94
    assert found.with_python(1000, hides_host=False) == 2000 + 37 * 94


def test_first_layers_fill_the_cache():
    sample = repetition(["layer"] * 94, [30] * 94, CACHE, is_replayed=True)
    assert sample == Repetition(4, 7, 94)


def test_layers_that_never_fill_the_cache_run_all():
    assert repetition(["layer"] * 94, [1] * 94, CACHE, is_replayed=True) is None


def test_first_layers_of_another_kind_are_among_the_fewer_ones():
    kinds = ["dense"] * 3 + ["experts"] * 58
    sample = repetition(kinds, [CACHE] * 61, CACHE, is_replayed=True)
    assert sample is not None and sample.fewer >= 3
    assert not repetition(kinds[::-1], [CACHE] * 61, CACHE, is_replayed=True)


@pytest.mark.parametrize("is_replayed", [True, False])
def test_extrapolation_adds_whole_patterns_of_layers(is_replayed: bool):
    kinds = ["state", "state", "state", "attention"] * 24 + ["state"]
    sample = repetition(kinds, [CACHE] * len(kinds), CACHE, is_replayed)
    assert sample is not None
    assert (sample.more - sample.fewer) % 4 == 0 and (sample.total - sample.more) % 4 == 0


def test_eager_steps_take_more_layers_than_replayed_ones():
    eager, replayed = (repetition(["layer"] * 94, [30] * 94, CACHE, each) for each in (False, True))
    assert eager is not None and replayed is not None
    assert eager.fewer > replayed.fewer and eager.more - eager.fewer > 3


def test_few_layers_run_all_of_them():
    assert repetition(["layer"] * 11, [CACHE] * 11, CACHE, is_replayed=False) is None


class Layered(torch.nn.Module):
    """A model of layers with four experts each, and a part that every step reads."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(5, 5, bias=False) for _ in range(layers))
        for layer in self.layers:
            layer.experts = torch.nn.Parameter(torch.zeros(4, 5, 5))
        self.start_layer, self.end_layer = 0, layers

    def duration(self) -> StepTime:
        return step_of(self.end_layer - self.start_layer)


def test_a_stack_measures_few_layers_and_then_runs_all_again():
    model = Layered(94)
    stack = stack_of(torch.nn.Sequential(model))
    assert isinstance(stack, LayerStack)
    # A step may choose only one of the four experts.
    assert stack.repetition(4 * 200, is_replayed=True) == Repetition(4, 7, 94)
    ran: list[int] = []

    def measured() -> dict[int, StepTime]:
        ran.append(model.end_layer)
        return {8: model.duration()}

    assert stack.of_all(Repetition(4, 7, 94), measured) == {8: model.duration()}
    assert ran == [4, 7] and model.end_layer == 94
    assert stack.of_all(None, measured) == {8: model.duration()} and ran[-1] == 94


class Ends:
    """Replaces a model's prefetches, which end with the last layer that runs."""

    def __init__(self) -> None:
        self.with_layers: list[int | None] = []

    def end_with(self, num_layers: int | None) -> None:
        self.with_layers.append(num_layers)


def test_prefetches_end_with_the_last_layer_that_runs():
    ends = Ends()
    stack = stack_of(Layered(94), ends)
    assert stack is not None
    with stack.only(7):
        assert ends.with_layers == [7]
    assert ends.with_layers == [7, None]


def test_a_model_that_does_not_say_which_layers_it_runs_has_no_stack():
    assert stack_of(torch.nn.Sequential(torch.nn.Linear(5, 5))) is None
