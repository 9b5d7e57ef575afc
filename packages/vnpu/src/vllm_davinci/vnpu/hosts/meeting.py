"""The meeting point of ranks on several hosts, and the gloo group that connects them.

Rank 0 of a group opens a point: address and port of a TCPStore in its process, and a secret. The
other ranks get them from HCCL's root information, or from a rank table.
"""

import hashlib
import secrets
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore, TCPStore, _register_process_group
from torch.distributed import DistError, ProcessGroup, ProcessGroupGloo
from torch.distributed.distributed_c10d import GroupName

from vllm_davinci.vnpu.hosts.addresses import listen, own_address, ports_of_groups
from vllm_davinci.vnpu.hosts.membership import SECRET_BYTES, content_of, prove, signed
from vllm_davinci.vnpu.hosts.rank_table import read_rank_table

Point = tuple[str, int, bytes]
"""Address, port and secret."""

# Each store serves the groups of which this process has rank 0, until the process ends.
_stores: list[TCPStore] = []


def open_point() -> Point:
    """Opens a point for a new group, at this process's store."""
    if not _stores:
        _stores.append(_serve(own_address(), ports_of_groups()))
    return _stores[0].host, _stores[0].port, secrets.token_bytes(SECRET_BYTES)


def open_table(path: str, rank: int) -> tuple[int, Point]:
    """A rank table's number of ranks, and their meeting point."""
    table = read_rank_table(path)
    address, port = table.address, table.port
    if rank == 0:
        _stores.append(_serve(address, [port]))
    return table.num_ranks, (address, port, table.secret)


def exchange(
    address: str, port: int, secret: bytes, num_ranks: int, rank: int, own: bytes, limit_s: int
) -> list[bytes]:
    """Sends `own` to the other ranks, and returns every rank's message.

    Raises TimeoutError with the missing ranks after `limit_s`, ConnectionError if rank 0's store is
    gone or a message is not from a member.
    """
    end = time.monotonic() + limit_s
    store = _store(address, port, secret, limit_s)
    try:
        value: Any = signed(secret, _key(rank), own)
        store.set(_key(rank), value)
        _await_all(store, num_ranks, end, limit_s)
        return [content_of(secret, _key(r), store.get(_key(r))) for r in range(num_ranks)]
    except DistError as error:
        raise ConnectionError(
            f"Rank 0, at {address}:{port}, ended before all {num_ranks} ranks of its group had "
            f"joined ({_first_line(error)}). Its own output says why."
        ) from error


def connect(
    address: str,
    port: int,
    secret: bytes,
    num_ranks: int,
    rank: int,
    peers: Sequence[int],
    limit_s: int,
) -> tuple[str, ProcessGroup]:
    """Connects all ranks of a group. Returns torch's process group and its name in the registry.

    The registry holds a weak reference to it.

    peers: ranks on other hosts, each of which proves its membership
    """
    here = own_address(towards=address)
    # torch's stubs lack ProcessGroupGloo's options and a store's values of type bytes.
    options: Any = getattr(ProcessGroupGloo, "_Options")()  # noqa: B009
    options._devices = [ProcessGroupGloo.create_device(hostname=here)]
    options._timeout = timedelta(seconds=limit_s)
    options._threads = 1
    store = PrefixStore("gloo", _store(address, port, secret, limit_s))
    try:
        backend = ProcessGroupGloo(store, rank, num_ranks, options)
        prove(backend, secret, rank, peers, limit_s)
    except (DistError, RuntimeError) as error:
        raise ConnectionError(
            f"Rank {rank}, at {here}, could not be connected with the {num_ranks} ranks of its "
            f"group: {_first_line(error)}. Set HCCL_IF_IP or HCCL_SOCKET_IFNAME on each host to "
            "an address that the other hosts reach."
        ) from error
    group = ProcessGroup(store, rank, num_ranks)
    group._set_default_backend(ProcessGroup.BackendType.GLOO)
    group._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, backend)
    name = GroupName(f"vnpu_{_prefix(secret)}_{rank}")
    _register_process_group(name, group)
    return name, group


def _serve(address: str, ports: Sequence[int]) -> TCPStore:
    listener = listen(address, ports)
    return TCPStore(
        address,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def _store(address: str, port: int, secret: bytes, limit_s: int) -> PrefixStore:
    """Opens a client of rank 0's store, with the group's own keys."""
    try:
        store = TCPStore(
            address,
            port,
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=limit_s),
        )
    except DistError as error:
        raise TimeoutError(
            f"Rank 0 of this group cannot be reached at {address}:{port} within {limit_s} s "
            f"({_first_line(error)}). Set its HCCL_IF_IP or HCCL_SOCKET_IFNAME to an address "
            "that all hosts reach, or wait longer with HCCL_CONNECT_TIMEOUT=SECONDS."
        ) from error
    return PrefixStore(_prefix(secret), store)


def _await_all(store: PrefixStore, num_ranks: int, end: float, limit_s: int) -> None:
    missing = list(range(num_ranks))
    while missing := [rank for rank in missing if not store.check([_key(rank)])]:
        if time.monotonic() >= end:
            raise TimeoutError(
                f"a group of {num_ranks} ranks is incomplete after {limit_s} s: "
                f"{', '.join(f'rank {rank}' for rank in missing)} did not join. See the output "
                "of those processes, or wait longer with HCCL_CONNECT_TIMEOUT=SECONDS."
            )
        time.sleep(0.01)


def _key(rank: int) -> str:
    return f"rank {rank}"


def _prefix(secret: bytes) -> str:
    return hashlib.sha256(secret).hexdigest()[:16]


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0].rstrip(".") if str(error).strip() else repr(error)
