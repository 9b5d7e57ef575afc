"""Each operator that layers call equals its definition, at small models' sizes."""

import pytest

from vllm_davinci.operators.calls.call import OperatorCall, compare, generator_of, on_device
from vllm_davinci.operators.calls.families import calls_of
from vllm_davinci.operators.calls.sizes import LatentSizes, ModelSizes

DENSE = ModelSizes(
    "dense", hidden=256, heads=6, kv_heads=2, head_size=64, rotary_size=32, intermediate=144,
    epsilon=1e-6, has_common=True,
)  # fmt: skip
ROUTED = ModelSizes(
    "routed", hidden=128, heads=4, kv_heads=4, head_size=128, rotary_size=128, intermediate=64,
    epsilon=1e-5, all_experts=16, experts=4, top_k=3, expert_intermediate=32,
)  # fmt: skip
LATENT = ModelSizes(
    "latent", hidden=192, heads=4, kv_heads=4, head_size=64, rotary_size=64, intermediate=64,
    epsilon=1e-6, latent=LatentSizes(query_rank=96, rank=512, nope=128, rope=64, value=128),
    all_experts=32, experts=8, top_k=4, groups=4, chosen_groups=2, is_sigmoid=True,
    scaling_factor=2.5, expert_intermediate=32,
)  # fmt: skip
SPARSE = ModelSizes(
    "sparse", hidden=160, heads=4, kv_heads=4, head_size=64, rotary_size=64, intermediate=64,
    epsilon=1e-6, latent=LatentSizes(query_rank=96, rank=512, nope=128, rope=64, value=128),
    index_heads=8,
)  # fmt: skip
CALLS = [
    pytest.param(call, id=f"{call.operator}-{model.name}-{call.variant}")
    for model in (DENSE, ROUTED, LATENT, SPARSE)
    for call in calls_of(model)
]


@pytest.mark.parametrize("call", CALLS)
def test_a_call_equals_its_definition(call: OperatorCall, request: pytest.FixtureRequest) -> None:
    arguments = call.make(generator_of(request.node.name, seed=1))
    moved = {name: on_device(value) for name, value in arguments.items()}
    outcome = compare(call.call(**moved), call.definition(**arguments), call.exact)
    assert not outcome.wrong and outcome.error <= outcome.bound, outcome
