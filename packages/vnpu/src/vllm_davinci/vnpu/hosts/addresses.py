"""This host's address for other hosts, chosen by HCCL's variables."""

import fcntl
import os
import socket
import struct
from collections.abc import Iterable, Mapping, Sequence

from vllm_davinci.vnpu import environment_variables as env

_SIOCGIFADDR = 0x8915  # <linux/sockios.h>
_NUM_PORTS = 32  # of HCCL_IF_BASE_PORT. Source: HCCL's documentation, environment variables
_BACKLOG = 512


def own_address(towards: str = "", environment: Mapping[str, str] = os.environ) -> str:
    """The address at which other hosts reach this one.

    In order: HCCL_IF_IP, the interface of HCCL_SOCKET_IFNAME, the address from which this host
    reaches `towards`. Raises ValueError for an address or interface that this host lacks.
    """
    if address := environment.get(env.HCCL_IF_IP, "").strip():
        _check_own(address)
        return address
    if names := environment.get(env.HCCL_SOCKET_IFNAME, "").strip():
        return _address_of_interface(names)
    with socket.socket(_family(towards), socket.SOCK_DGRAM) as probe:
        probe.connect((towards, 9))  # sends nothing
        return str(probe.getsockname()[0])


def chosen_interfaces(text: str, present: Iterable[str]) -> list[str]:
    """The present interfaces that match HCCL_SOCKET_IFNAME.

    text: prefixes of names, separated by commas; `=` before them for whole names, `^` or `^=` to
          exclude. Source: HCCL's documentation, environment variables.
    """
    is_exclusive = text.startswith("^")
    body = text.removeprefix("^")
    is_exact = body.startswith("=")
    names = [name for name in body.removeprefix("=").split(",") if name]
    found = []
    for interface in present:
        matches = interface in names if is_exact else interface.startswith(tuple(names))
        if matches != is_exclusive:
            found.append(interface)
    return found


def base_port(environment: Mapping[str, str] = os.environ) -> int | None:
    """HCCL_IF_BASE_PORT; None if it is not set. Raises ValueError if it is not a valid port."""
    text = environment.get(env.HCCL_IF_BASE_PORT, "").strip()
    if not text:
        return None
    if not (text.isdecimal() and 1024 <= int(text) <= 65520):
        raise ValueError(
            f"HCCL_IF_BASE_PORT={text!r} is not valid. Expected a port from 1024 to 65520."
        )
    return int(text)


def ports_of_groups(environment: Mapping[str, str] = os.environ) -> Sequence[int]:
    """Candidate ports for a process's groups; 0: any free port."""
    first = base_port(environment)
    return [0] if first is None else range(first, min(first + _NUM_PORTS, 65536))


def listen(address: str, ports: Sequence[int]) -> socket.socket:
    """Opens a socket that listens at `address`, on the first free one of these ports."""
    for port in ports:
        listener = socket.socket(_family(address), socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((address, port))
            listener.listen(_BACKLOG)
        except OSError as error:
            listener.close()
            reason = error
        else:
            return listener
    where = f"port {ports[0]}" + (f" to {ports[-1]}" if len(ports) > 1 else "")
    raise ValueError(
        f"This process cannot listen at {address} on {where}: {reason}. Set "
        f"{env.HCCL_IF_BASE_PORT} to the first of 32 ports with a free one."
    )


def _check_own(address: str) -> None:
    try:
        with socket.socket(_family(address), socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
    except (OSError, UnicodeError) as error:
        raise ValueError(
            f"HCCL_IF_IP={address!r} is not an address of this host ({error}). Set it on every "
            "host to that host's own address, or name its interface with HCCL_SOCKET_IFNAME."
        ) from None


def _address_of_interface(names: str) -> str:
    present = [name for _, name in socket.if_nameindex()]
    # The loopback interface is used only if it is requested by name.
    candidates = [name for name in chosen_interfaces(names, present) if name != "lo"]
    if names.removeprefix("=") == "lo":
        candidates = ["lo"]
    for interface in candidates:
        if address := _ipv4_of(interface):
            return address
    raise ValueError(
        f"HCCL_SOCKET_IFNAME={names!r} names no interface of this host that has an IPv4 address; "
        f"the host has {', '.join(present)}."
    )


def _ipv4_of(interface: str) -> str | None:
    request = struct.pack("256s", interface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
