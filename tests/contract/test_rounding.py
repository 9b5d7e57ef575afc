"""A token may differ from the reference only where rounding decides between two tokens."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import transformers

from vllm_davinci_testing.engines.deepseek_zoo import small_deepseek
from vllm_davinci_testing.engines.model_zoo import fill_with_normal_weights
from vllm_davinci_testing.engines.transformers_reference import TransformersReference

PROMPT, NUM_TOKENS = list(range(10, 30)), 24


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> TransformersReference:
    directory = tmp_path_factory.mktemp("reference")
    torch.manual_seed(0)
    config = small_deepseek(hidden_size=128, n_group=1, num_experts_per_tok=1)
    network = transformers.AutoModelForCausalLM.from_config(config)
    fill_with_normal_weights(network)
    network.model.layers[1].mlp.gate.e_score_correction_bias.zero_()
    network.save_pretrained(directory)
    return TransformersReference(directory)


def rows_of(reference: TransformersReference, tokens: list[int]) -> torch.Tensor:
    return reference.logits([*PROMPT, *tokens])[len(PROMPT) - 1 : -1]


@contextmanager
def two_outputs_apart(
    reference: TransformersReference, name: str, first: int, second: int, gap: float
) -> Iterator[None]:
    """In this context, a weight's row `second` is its row `first`, scaled so that its outputs are
    lower by the factor `gap`.
    """
    weight = reference.network.get_parameter(name)
    before = weight.detach().clone()
    with torch.no_grad():
        weight[second] = weight[first] * (1 - gap)
    try:
        yield
    finally:
        with torch.no_grad():
            weight.copy_(before)


def test_greedy_tokens_are_right_and_any_with_a_clear_margin_is_wrong(reference):
    tokens = reference.greedy(PROMPT, NUM_TOKENS)
    assert reference.first_difference(PROMPT, tokens) is None
    for position in (0, 7, NUM_TOKENS - 1):
        best, second = rows_of(reference, tokens)[position].topk(2).indices.tolist()
        assert best == tokens[position]
        wrong = [*tokens[:position], second, *tokens[position + 1 :]]
        found = reference.first_difference(PROMPT, wrong)
        assert (
            found is not None and f"token {position} is {second}, transformers has {best}" in found
        )


def test_logits_are_adjusted_before_they_are_compared(reference: TransformersReference):
    token = reference.greedy(PROMPT, 1)[0]

    def adjust(logits: torch.Tensor, generated: list[int]) -> torch.Tensor:
        logits[token] = -torch.inf
        logits[generated] -= 1.0
        return logits

    second = int(rows_of(reference, [token])[0].topk(2).indices[1])
    assert reference.first_difference(PROMPT, [second], adjust) is None
    assert reference.first_difference(PROMPT, [token], adjust) is not None


@pytest.mark.parametrize(("gap", "is_right"), [(1e-7, True), (1e-4, False)])
def test_either_of_two_tokens_that_rounding_decides_between_is_right(gap, is_right, reference):
    token = reference.greedy(PROMPT, 1)[0]
    other = (token + 1) % 64
    with two_outputs_apart(reference, "lm_head.weight", token, other, gap):
        assert reference.greedy(PROMPT, 1) == [token]
        # The reference compares from this token on.
        tokens = [other, *reference.greedy([*PROMPT, other], NUM_TOKENS - 1)]
        assert (reference.first_difference(PROMPT, tokens) is None) == is_right
        last = int(rows_of(reference, tokens)[-1].argmin())
        found = reference.first_difference(PROMPT, [*tokens[:-1], last])
    assert found is not None
    assert f"token {NUM_TOKENS - 1 if is_right else 0} is" in found


def continuations(
    reference: TransformersReference, second: int, gap: float
) -> tuple[list[int], list[int]]:
    """Returns two greedy texts: expert `second` of the last prompt token has a logit below, then
        above, the best expert's by the factor `gap`.

    The first text's weights remain in the model.
    """
    router = reference.network.model.layers[1].mlp.gate
    inputs: list[torch.Tensor] = []
    with router.register_forward_pre_hook(lambda _, args: inputs.append(args[0].flatten(0, -2))):
        reference.logits(PROMPT)
    state = inputs[0][-1].double()
    logits = router.weight.double() @ state
    best = int(logits.argmax())
    texts = []
    for share in (1 + gap, 1 - gap):
        with torch.no_grad():
            missing = logits[best] * share - router.weight[second].double() @ state
            router.weight[second] += (missing / state.square().sum() * state).float()
        texts.append(reference.greedy(PROMPT, NUM_TOKENS))
    return texts[1], texts[0]


# 2e-7 is two units in a logit's last place: on some processors both texts choose the same expert.
@pytest.mark.parametrize(("gap", "is_right"), [(1e-6, True), (1e-3, False)])
def test_either_of_two_experts_that_rounding_decides_between_is_right(gap, is_right, reference):
    weight = reference.network.model.layers[1].mlp.gate.weight
    before = weight.detach().clone()
    num_different = 0
    for second in range(len(weight)):
        expected, tokens = continuations(reference, second, gap)
        if tokens[0] != expected[0]:  # otherwise both experts give the same token
            num_different += 1
            assert reference.first_difference(PROMPT, expected) is None
            assert (reference.first_difference(PROMPT, tokens) is None) == is_right
        with torch.no_grad():
            weight.copy_(before)
    assert num_different
