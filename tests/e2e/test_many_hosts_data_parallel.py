"""Data-parallel ranks on two hosts; tokens use experts of both."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from vllm_davinci_testing.engines.fixture_types import Prompts, Reference, Zoo
from vllm_davinci_testing.engines.host_servers import (
    HostClient,
    HostServer,
    ask,
    serve_on,
    wait_for,
)
from vllm_davinci_testing.engines.server_process import START_LIMIT_S
from vllm_davinci_testing.processes.hosts import Host, two_hosts
from vllm_davinci_testing.processes.waiting import becomes_true

pytestmark = pytest.mark.nightly("hosts")

THOROUGH = pytest.mark.thorough
EACH_END = pytest.mark.parametrize(
    ("dead", "end"), [(host, end) for host in (0, 1) for end in ("end", "cut_off")]
)
V3, TOP3 = "deepseek_v3_moe", "qwen3_moe_unnormalized_top3_of_16"
DENSE = "llama_head64_gqa4"
MAX_TOKENS = 16
# Time limits: until the other host names the ended host, and then until its own processes end,
# which takes long on a busy machine.
NAMED_S, ENDED_S = 30, 120
EXPERTS = ["--enable-expert-parallel", "--api-server-count=1"]
MEETING = ["--data-parallel-address=10.77.0.1", "--data-parallel-rpc-port=13345"]
# Options of both hosts, of the first host, of the second host.
INTERNAL = (
    ["--data-parallel-size=2", "--data-parallel-size-local=1", *MEETING],
    EXPERTS,
    ["--enable-expert-parallel", "--headless", "--data-parallel-start-rank=1"],
)
EXTERNAL = (
    ["--data-parallel-size=2", "--data-parallel-external-lb", *MEETING, *EXPERTS],
    ["--data-parallel-rank=0"],
    ["--data-parallel-rank=1"],
)
HYBRID = (
    [
        *("--data-parallel-size=4", "--data-parallel-size-local=2", "--data-parallel-hybrid-lb"),
        *(*MEETING, *EXPERTS),
    ],
    ["--data-parallel-start-rank=0"],
    ["--data-parallel-start-rank=2"],
)
# Several API servers, vLLM's default here, run outside the engine's process tree. A single API
# server is the engine's parent, and a fork shares the descriptor through which signals wake
# Python's loop: SIGTERM to one process would look like SIGTERM to the other.
APART = (INTERNAL[0], ["--enable-expert-parallel"], INTERNAL[2])
# The engines of a dense model share only their front end.
UNLINKED = (INTERNAL[0], [], ["--headless", "--data-parallel-start-rank=1"])
Layout = tuple[list[str], list[str], list[str]]


def serve_on_both(
    hosts: tuple[Host, Host],
    model: Path,
    folder: Path,
    layout: Layout,
    *options: str,
    **environment: str,
) -> list[HostServer]:
    common, *own = layout
    return [
        serve_on(host, model, folder, *common, *of_host, *options, **environment)
        for host, of_host in zip(hosts, own, strict=True)
    ]


def test_tokens_of_ranks_on_two_hosts_equal_those_of_transformers(
    hosts: tuple[Host, Host], zoo: Zoo, reference: Reference, prompts: Prompts, tmp_path: Path
) -> None:
    servers = serve_on_both(hosts, zoo(V3), tmp_path, INTERNAL)
    client = ask(servers[0], prompts[:12], 12)
    wait_for([client], servers)
    for prompt, answer in zip(prompts, client.answers(), strict=False):
        assert not answer["error"] and len(answer["tokens"]) == 12
        assert reference(V3).first_difference(prompt, answer["tokens"]) is None
    served = client.served()
    assert set(served) == {"0", "1"} and all(served.values()), served


@THOROUGH
@pytest.mark.parametrize("scheme", ["all_gather", "all_to_all"])
@pytest.mark.parametrize("model", [V3, TOP3])
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(INTERNAL, id="internal"),
        pytest.param(EXTERNAL, id="external"),
        pytest.param(HYBRID, id="hybrid"),
    ],
)
def test_bits_equal_those_of_the_same_ranks_on_one_host(
    layout, model, scheme, hosts, zoo, reference, prompts, tmp_path
):
    options = [f"--additional-config={json.dumps({'moe_communication': scheme})}"]
    servers = serve_on_both(hosts, zoo(model), tmp_path, layout, *options)
    # With one server per host, each gets half of the prompts.
    asked = [prompts[:16]] if layout is INTERNAL else [prompts[:8], prompts[8:16]]
    clients = [ask(server, part, MAX_TOKENS) for server, part in zip(servers, asked, strict=False)]
    wait_for(clients, servers)
    answers = [answer for client in clients for answer in client.answers()]
    served = [client.served() for client in clients]
    assert all(count for counts in served for count in counts.values()), served
    size = layout[0][0]
    assert sum(len(counts) for counts in served) == int(size.rpartition("=")[2])
    for host in hosts:
        host.end()
    for prompt, answer in zip(prompts, answers, strict=False):
        assert reference(model).first_difference(prompt, answer["tokens"]) is None
    assert answers == on_one_host(zoo(model), tmp_path, prompts[:16], size, *EXPERTS, *options)


def on_one_host(
    model: Path, folder: Path, prompts: list[list[int]], *options: str
) -> list[dict[str, Any]]:
    """Returns the answers of a server with all ranks on one host."""
    with two_hosts() as (host, _):
        server = serve_on(host, model, folder, *options)
        client = ask(server, prompts, MAX_TOKENS)
        wait_for([client], [server])
        return client.answers()


def ask_until_it_has_begun(
    server: HostServer, servers: Sequence[HostServer], prompts: list[list[int]], max_tokens: int
) -> HostClient:
    """Starts a client of one server; returns it when each request has a token."""
    client = ask(server, prompts, max_tokens)
    assert becomes_true(client.has_begun, START_LIMIT_S), "\n".join(s.tail() for s in servers)
    return client


def names_and_ends(left: HostServer, dead: int, ranks: str = "") -> re.Pattern[str]:
    """Checks that the log names the dead rank and that the server ends. Returns the pattern of the
    name.

    dead:  number of the dead host, and of its rank unless `ranks` is given
    ranks: pattern for the ranks of that host
    """
    named = re.compile(rf"rank {ranks or dead} \(pid \d+ on host host{dead + 1}\)")
    assert becomes_true(lambda: named.search(left.log_text()), NAMED_S), left.tail()
    assert becomes_true(lambda: left.process.poll() is not None, ENDED_S), left.tail()
    assert left.process.returncode != 0
    return named


@THOROUGH
@EACH_END
def test_a_host_that_dies_is_named_to_clients_of_the_other(
    dead: int, end: str, hosts: tuple[Host, Host], zoo: Zoo, prompts: Prompts, tmp_path: Path
) -> None:
    servers = serve_on_both(hosts, zoo(V3), tmp_path, APART)
    client = ask_until_it_has_begun(servers[0], servers, prompts[:4], 100)
    left = servers[1 - dead]
    getattr(hosts[dead], end)()
    named = names_and_ends(left, dead)
    if left is servers[0]:
        assert becomes_true(client.has_ended, ENDED_S)
        assert all(named.search(answer["error"]) for answer in client.answers())


@THOROUGH
@pytest.mark.parametrize("end", ["end", "cut_off"])
def test_a_host_that_dies_while_nothing_is_asked_is_named_once_something_is(
    end: str, hosts: tuple[Host, Host], zoo: Zoo, prompts: Prompts, tmp_path: Path
) -> None:
    servers = serve_on_both(hosts, zoo(V3), tmp_path, APART)
    client = ask(servers[0], prompts[:2], 4)
    wait_for([client], servers)
    getattr(hosts[1], end)()
    ask(servers[0], prompts[:2], 4)
    names_and_ends(servers[0], 1)


@THOROUGH
@EACH_END
def test_a_host_of_a_dense_model_is_named_though_its_engine_shares_nothing(
    dead: int, end: str, hosts: tuple[Host, Host], zoo: Zoo, prompts: Prompts, tmp_path: Path
) -> None:
    servers = serve_on_both(hosts, zoo(DENSE), tmp_path, UNLINKED)
    client = ask(servers[0], prompts[:4], 4)
    wait_for([client], servers)
    served = client.served()
    assert set(served) == {"0", "1"} and all(served.values()), served
    client = ask_until_it_has_begun(servers[0], servers, prompts[:4], 200)
    left = servers[1 - dead]
    getattr(hosts[dead], end)()
    named = names_and_ends(left, dead)
    # The ended host takes the link away, and with it the address at which client and server of the
    # other host were connected.
    if left is servers[0] and end == "cut_off":
        assert becomes_true(client.has_ended, ENDED_S)
        assert any(named.search(answer["error"]) for answer in client.answers())


@THOROUGH
@EACH_END
@pytest.mark.parametrize(
    ("layout", "ranks"),
    [
        pytest.param(EXTERNAL, ("0", "1"), id="external"),
        pytest.param(HYBRID, ("[01]", "[23]"), id="hybrid"),
    ],
)
def test_a_host_with_a_server_that_dies_is_named_to_clients_of_the_other(
    layout, ranks, dead, end, hosts, zoo, prompts, tmp_path
):
    # Here a server is its engines' parent; spawned engines share no signal descriptor with it.
    spawned = {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    servers = serve_on_both(hosts, zoo(V3), tmp_path, layout, **spawned)
    left = servers[1 - dead]
    client = ask_until_it_has_begun(left, servers, prompts[:4], 100)
    getattr(hosts[dead], end)()
    named = names_and_ends(left, dead, ranks[dead])
    if (dead, end) != (1, "end"):  # (1, "end") removes the first host's address, as above
        assert becomes_true(client.has_ended, ENDED_S)
        assert all(named.search(answer["error"]) for answer in client.answers())
