"""Methods that draft on the host change no token."""

from importlib.util import find_spec

import pytest

from vllm_davinci_testing.engines.speculating import generate, speculation, told

THOROUGH = pytest.mark.thorough
GRAPHS = {"enforce_eager": False}
TP2 = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
NEEDS_ARCTIC = pytest.mark.skipif(
    find_spec("arctic_inference") is None,
    reason="suffix trees need arctic-inference: docs/guides/speculative_decoding.md",
)


@NEEDS_ARCTIC
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(GRAPHS, id="graphs", marks=THOROUGH),
        pytest.param({"num_gpu_blocks_override": 8}, id="few_blocks", marks=THOROUGH),
    ],
)
def test_suffix_trees_change_no_token(options, drafting_engine, undrafted, tiny_llama):
    """Runs twice, so that the second run finds the first one's texts in its tree."""
    with drafting_engine(tiny_llama, {**speculation("suffix", 4), **options}) as engine:
        first = told(engine)
        assert generate(engine) == undrafted(tiny_llama)
        both = told(engine)
    assert first[1] > 0
    # Text that was generated once is drafted unchanged.
    assert (both[1] - first[1]) / (both[0] - first[0]) > 0.9


def test_without_its_package_the_method_says_what_to_install(start_engine, tiny_llama):
    if find_spec("arctic_inference") is not None:
        pytest.skip("arctic-inference is installed")
    with pytest.raises(Exception, match="pip install arctic-inference"):
        start_engine(tiny_llama, **speculation("suffix", 2))
