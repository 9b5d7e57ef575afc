"""Connections to hosts that lose their power or their network, and so never end them.

The kernels of both hosts ask each other whether the other one is there, whatever the processes do:
one that is stopped, or computes without a pause, still has a host that answers.
"""

import errno
import os
import socket
import stat
from contextlib import suppress

# A connection fails when nothing has come for so long, less than the 30 s within which a failed
# host is to be named.
SILENT_S = 15
ASKS_EVERY_S = 5
_SETTINGS = (
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, ASKS_EVERY_S),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, ASKS_EVERY_S),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, SILENT_S // ASKS_EVERY_S - 1),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENT_S * 1000),
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
)
# What the kernel says then: of the connection, or of the way to the host.
_ERRORS = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)


def open_sockets() -> dict[int, int]:
    """This process's: number of the socket -> descriptor."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed meanwhile
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                found[status.st_ino] = int(name)
    return found


def notice_silence(before: dict[int, int]) -> None:
    """Lets connections fail whose other host is silent: those made since `open_sockets()` was."""
    now = open_sockets()
    for number in now.keys() - before.keys():
        with suppress(OSError), socket.socket(fileno=os.dup(now[number])) as connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6):
                for setting in _SETTINGS:
                    connection.setsockopt(*setting)


def is_silence(error: Exception) -> bool:
    """Whether a connection has failed because its other host was silent."""
    return any(os.strerror(number) in str(error) for number in _ERRORS)
