"""Embeddings in place of a prompt's tokens."""

import pytest
import torch
from vllm import SamplingParams

from vllm_davinci_testing.engines.generating import tokens_of

MODEL = "llama_head64_gqa4"
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"max_num_batched_tokens": 64}, id="chunks", marks=pytest.mark.thorough),
        pytest.param({"enforce_eager": False, "max_num_seqs": 8}, id="graphs"),
    ],
)
def test_embeddings_of_tokens_give_the_results_of_the_tokens(
    options, zoo, reference, prompts, start_engine
):
    engine = start_engine(
        zoo(MODEL), enable_prompt_embeds=True, environment={"VNPU_RACES": "raise"}, **options
    )
    prompts = prompts[:6]
    given = [{"prompt_token_ids": prompt} for prompt in prompts]
    expected = tokens_of(engine.generate(given, GREEDY))
    table = reference(MODEL).network.get_input_embeddings().weight.detach()
    embeds = [{"prompt_embeds": table[torch.tensor(prompt)].clone()} for prompt in prompts]
    assert tokens_of(engine.generate(embeds, GREEDY)) == expected
    mixed = [embeds[number] if number % 2 else given[number] for number in range(len(prompts))]
    assert tokens_of(engine.generate(mixed, GREEDY)) == expected
