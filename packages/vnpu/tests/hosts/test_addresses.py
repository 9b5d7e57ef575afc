"""A host's own address and ports, from HCCL's variables."""

import pytest

from vllm_davinci.vnpu.hosts.addresses import (
    chosen_interfaces,
    listen,
    own_address,
    ports_of_groups,
)

PRESENT = ["lo", "docker0", "eth0", "eth1", "enp3s0"]


@pytest.mark.parametrize(
    ("text", "chosen"),
    [
        ("eth", ["eth0", "eth1"]),
        ("eth1", ["eth1"]),
        ("=eth", []),
        ("=eth1,enp3s0", ["eth1", "enp3s0"]),
        ("^docker,lo", ["eth0", "eth1", "enp3s0"]),
        ("^=eth0,lo", ["docker0", "eth1", "enp3s0"]),
    ],
)
def test_interfaces_are_chosen_as_hccl_documents_it(text, chosen):
    assert chosen_interfaces(text, PRESENT) == chosen


def test_the_address_comes_before_the_interface():
    assert own_address(environment={"HCCL_IF_IP": "127.0.0.1"}) == "127.0.0.1"
    both = {"HCCL_IF_IP": "127.0.0.2", "HCCL_SOCKET_IFNAME": "lo"}
    assert own_address(environment=both) == "127.0.0.2"
    assert own_address(environment={"HCCL_SOCKET_IFNAME": "lo"}) == "127.0.0.1"
    assert own_address(towards="127.0.0.1", environment={}) == "127.0.0.1"


@pytest.mark.parametrize("address", ["192.0.2.7", "nonsense", "1.2.3.4.5"])
def test_an_address_of_another_host_is_refused(address):
    with pytest.raises(ValueError, match=r"HCCL_IF_IP=.* is not an address of this host"):
        own_address(environment={"HCCL_IF_IP": address})


def test_an_unknown_interface_is_refused_with_the_names_of_the_hosts_interfaces():
    with pytest.raises(ValueError, match=r"HCCL_SOCKET_IFNAME='nowhere' .* the host has .*lo"):
        own_address(environment={"HCCL_SOCKET_IFNAME": "nowhere"})


def test_processes_take_ports_from_the_base_on():
    ports = ports_of_groups({"HCCL_IF_BASE_PORT": "23456"})
    with listen("127.0.0.1", ports) as one, listen("127.0.0.1", ports) as other:
        taken = {one.getsockname()[1], other.getsockname()[1]}
    assert len(taken) == 2
    assert taken <= set(range(23456, 23456 + 32))


def test_a_used_port_is_reported():
    with listen("127.0.0.1", [0]) as one:
        port = one.getsockname()[1]
        with pytest.raises(ValueError, match=f"cannot listen at 127.0.0.1 on port {port}: "):
            listen("127.0.0.1", [port])


@pytest.mark.parametrize("port", ["x", "80", "70000", "-1"])
def test_an_invalid_base_port_is_refused(port):
    with pytest.raises(ValueError, match=r"HCCL_IF_BASE_PORT=.* from 1024 to 65520"):
        ports_of_groups({"HCCL_IF_BASE_PORT": port})
