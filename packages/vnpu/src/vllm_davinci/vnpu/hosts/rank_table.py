"""Rank tables: the hosts of all ranks, in a file named by RANK_TABLE_FILE on every rank.

Source: HCCL's documentation, cluster information in a rank table (version 1.0).
"""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_davinci.vnpu.hosts.addresses import base_port

_BASE_PORT = 60000  # if HCCL_IF_BASE_PORT is not set


@dataclass(frozen=True)
class RankTable:
    """The used part of a rank table."""

    num_ranks: int
    address: str
    """The address of the host of rank 0."""
    port: int
    secret: bytes
    """Digest of the file. It serves as the secret, since only members have the file."""


def read_rank_table(path: str, environment: Mapping[str, str] = os.environ) -> RankTable:
    """Reads a rank table. Raises ValueError if it is not valid."""
    try:
        content = Path(path).read_bytes()
        table = json.loads(content)
    except (OSError, ValueError) as error:
        raise ValueError(f"RANK_TABLE_FILE={path!r} cannot be read: {error}.") from None
    hosts = _hosts_of_ranks(path, table)
    if sorted(hosts) != list(range(len(hosts))) or not hosts:
        raise ValueError(
            f"RANK_TABLE_FILE={path!r} names the ranks {sorted(hosts)}. Expected each of 0 to "
            "(number of ranks - 1) once, as rank_id of a device of a server."
        )
    port = base_port(environment) or _BASE_PORT
    return RankTable(len(hosts), hosts[0], port, hashlib.sha256(content).digest())


def _hosts_of_ranks(path: str, table: Any) -> dict[int, str]:
    """The address of each rank's host."""
    hosts = {}
    try:
        if table.get("status", "completed") != "completed":
            raise ValueError(f"its status is {table['status']!r}")
        for server in table["server_list"]:
            for device in server["device"]:
                # A server's id is its address unless the table has host_ip.
                hosts[int(device["rank_id"])] = str(server.get("host_ip") or server["server_id"])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"RANK_TABLE_FILE={path!r} is not a rank table of version 1.0 ({error!r}). Expected "
            'server_list, of servers with server_id or host_ip, each with a list "device" of '
            "devices with rank_id."
        ) from None
    return hosts
