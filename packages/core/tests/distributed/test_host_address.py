"""The address that HCCL gets if ranks may be on several hosts."""

import pytest
from vllm.config import ParallelConfig

from vllm_davinci.core.distributed.host_address import may_span_hosts, name_host_address


def parallel(**changes: object) -> ParallelConfig:
    config = ParallelConfig()
    for name, value in changes.items():
        setattr(config, name, value)
    return config


SPANNING = [
    {"nnodes": 2},
    {"data_parallel_size": 4, "data_parallel_size_local": 2},
    {"distributed_executor_backend": "ray"},
    {"data_parallel_backend": "ray"},
]


@pytest.mark.parametrize("changes", SPANNING)
def test_ranks_of_other_hosts_meet_at_vllms_address(changes, monkeypatch):
    monkeypatch.setenv("VLLM_HOST_IP", "10.77.0.1")
    config = parallel(**changes)
    assert may_span_hosts(config)
    environment: dict[str, str] = {}
    name_host_address(config, environment)
    assert environment == {"HCCL_IF_IP": "10.77.0.1"}


@pytest.mark.parametrize("chosen", [{"HCCL_IF_IP": "10.0.0.9"}, {"HCCL_SOCKET_IFNAME": "eth1"}])
def test_the_users_choice_stands(chosen, monkeypatch):
    monkeypatch.setenv("VLLM_HOST_IP", "10.77.0.1")
    environment = dict(chosen)
    name_host_address(parallel(nnodes=2), environment)
    assert environment == chosen


@pytest.mark.parametrize("changes", [{}, {"data_parallel_size": 2, "data_parallel_size_local": 2}])
def test_an_engine_on_one_host_needs_no_address(changes, monkeypatch):
    monkeypatch.setenv("VLLM_HOST_IP", "10.77.0.1")
    environment: dict[str, str] = {}
    name_host_address(parallel(**changes), environment)
    assert environment == {}


def test_no_address_is_none(monkeypatch):
    monkeypatch.setenv("VLLM_HOST_IP", "0.0.0.0")
    environment: dict[str, str] = {}
    name_host_address(parallel(nnodes=2), environment)
    assert environment == {}
