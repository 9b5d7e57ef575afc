"""Drafts in disaggregated engines: the drafter's cache blocks are transferred too."""

import json
import re

import pytest
from vllm import SamplingParams

from vllm_davinci_testing.engines.disaggregated import MooncakePair, Pair, metric
from vllm_davinci_testing.engines.server_process import SMALL
from vllm_davinci_testing.engines.speculating import RACES, told

NUM_TOKENS = 30
# Prompts shorter than a block, of one whole block, and chunked inside blocks.
LENGTHS = (5, 128, 389)
MTP = {"method": "mtp", "num_speculative_tokens": 3}


def prompt_of(length: int) -> list[int]:
    return [3 + (i * 7 + length) % 97 for i in range(length)]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("of_kind", "package"),
    [
        pytest.param(Pair, "nixl", id="nixl"),
        pytest.param(MooncakePair, "mooncake.engine", id="mooncake"),
    ],
)
def test_two_engines_give_the_tokens_and_the_acceptance_of_one(
    of_kind, package, start_engine, tiny_deepseek, tmp_path
):
    pytest.importorskip(package, exc_type=ImportError)
    sampling = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    sizes = {"max_model_len": 768, "max_num_batched_tokens": 200, "disable_log_stats": False}
    expected, alone = [], (0, 0)
    with start_engine(tiny_deepseek, speculative_config=MTP, **sizes) as engine:
        for length in LENGTHS:
            (output,) = engine.generate([{"prompt_token_ids": prompt_of(length)}], sampling)
            expected.append(list(output.outputs[0].token_ids))
        alone = told(engine)
    options = [f"--{name.replace('_', '-')}={value}" for name, value in list(sizes.items())[:2]]
    options.append(f"--speculative-config={json.dumps(MTP)}")
    pair = of_kind(tiny_deepseek, tmp_path, *SMALL, *options, environment=RACES)
    try:
        pair.wait_until_ready()
        answers = [pair.complete(prompt_of(length), NUM_TOKENS).tokens for length in LENGTHS]
        assert answers == expected
        drafted = metric(pair.decodes, "vllm:spec_decode_num_draft_tokens_total")
        accepted = metric(pair.decodes, "vllm:spec_decode_num_accepted_tokens_total")
        assert not re.search("failed:|checksum", pair.decodes.log_text()), pair.decodes.tail()
    finally:
        pair.close()
    print(f"{accepted} of {drafted} drafts accepted, {alone[1]} of {alone[0]} in one engine")
    # The drafter reads the prompt's keys and values; without them its drafts would be random.
    assert accepted / drafted > alone[1] / alone[0] - 0.1
