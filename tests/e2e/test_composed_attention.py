"""Attention that the fused operator does not support: transformers' tokens.

`nox -s zoo` serves models with ALiBi and wide heads: vLLM's definitions of them call operators that
have no rules.
"""

from typing import Any

import pytest

from vllm_davinci_testing.engines.family_zoo import write_family
from vllm_davinci_testing.engines.generating import assert_generates
from vllm_davinci_testing.engines.transformers_reference import TransformersReference

MAX_TOKENS = 16
THOROUGH = pytest.mark.thorough
RACES = {"environment": {"VNPU_RACES": "raise", "VNPU_SCHEDULE": "fuzz:5"}}
CHUNKS = {"max_num_batched_tokens": 48, "max_num_seqs": 16}
TP2 = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
GRAPHS: dict[str, Any] = {
    "enforce_eager": False,
    "compilation_config": {"cudagraph_mode": "FULL_DECODE_ONLY"},
}


@pytest.mark.parametrize(
    ("family", "options"),
    [
        # Graphs are requested; vLLM turns them off, because this attention cannot be captured.
        pytest.param("gemma2", {**GRAPHS, **CHUNKS, **RACES}, id="capped_graphs_chunks_races"),
        pytest.param("gemma2", TP2, id="capped_tensor2", marks=THOROUGH),
    ],
)
def test_every_path_gives_the_tokens_of_transformers(
    family, options, start_engine, prompts, tmp_path
):
    checkpoint, prompts = write_family(family, tmp_path / "model"), prompts[:12]
    with start_engine(checkpoint, **options) as engine:
        assert_generates(engine, TransformersReference(checkpoint), prompts, MAX_TOKENS)
