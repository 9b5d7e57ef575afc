"""Engines learn when another engine ends."""

import pytest
from vllm.config import ParallelConfig

from vllm_davinci.core.distributed.engine_ring import size_of_ring


@pytest.mark.parametrize(
    ("changed", "size"),
    [
        ({}, 4),
        ({"data_parallel_master_ip": ParallelConfig.data_parallel_master_ip}, 1),
        ({"data_parallel_size": 4}, 1),
        ({"data_parallel_external_lb": True}, 1),
        ({"data_parallel_hybrid_lb": True}, 1),
        ({"elastic_ep_max_dp_size": None}, 1),
    ],
    ids=["dense", "one_host", "experts", "external", "hybrid", "one_engine"],
)
def test_engines_of_a_dense_model_on_several_hosts_make_a_ring(changed, size):
    parallel = ParallelConfig()
    parallel.data_parallel_master_ip = "10.0.0.1"
    parallel.elastic_ep_max_dp_size = 4
    for name, value in changed.items():
        setattr(parallel, name, value)
    assert size_of_ring(parallel) == size
