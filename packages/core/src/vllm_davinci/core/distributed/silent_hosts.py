"""Detects hosts that lose power or network and so never close their connections.

With TCP keepalive the kernels of both hosts check each other, so a host answers even if its process
is stopped or busy.
"""

import errno
import os
import socket
import stat
from contextlib import suppress

# A connection fails after this time without an answer: less than the 30 s within which a failed
# host is named.
SILENT_S = 15
ASKS_EVERY_S = 5
_SETTINGS = (
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, ASKS_EVERY_S),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, ASKS_EVERY_S),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, SILENT_S // ASKS_EVERY_S - 1),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENT_S * 1000),
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
)
# The kernel's errors for a silent host: of the connection, or of the route.
_ERRORS = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)


def open_sockets() -> dict[int, int]:
    """This process's sockets: inode -> descriptor."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed in the meantime
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                found[status.st_ino] = int(name)
    return found


def notice_silence(before: dict[int, int]) -> None:
    """Enables keepalive on connections made since `open_sockets()` returned `before`."""
    now = open_sockets()
    for number in now.keys() - before.keys():
        with suppress(OSError), socket.socket(fileno=os.dup(now[number])) as connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6):
                for setting in _SETTINGS:
                    connection.setsockopt(*setting)


def is_silence(error: Exception) -> bool:
    """True if a connection failed because the other host was silent."""
    return any(os.strerror(number) in str(error) for number in _ERRORS)
