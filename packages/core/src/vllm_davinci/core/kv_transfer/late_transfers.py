"""Transfers that timed out, and the pages that they may still write."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any


class LateTransfers:
    """Reads that NIXL has not completed.

    After NIXL releases an active read, its bytes still arrive in host pages. The device's blocks do
    not change.

    agent: NIXL's agent that owns the transfers
    """

    def __init__(self, agent: Any) -> None:
        self._agent = agent
        self._blocks: dict[int, frozenset[int]] = {}  # handle -> numbers of its pages

    def add(self, handles: Sequence[int], blocks: Sequence[int]) -> None:
        """Records these handles, which together write the pages of these blocks."""
        self._blocks |= dict.fromkeys(handles, frozenset(blocks))

    def blocks(self) -> frozenset[int]:
        """Blocks whose pages must not receive other transfers."""
        return frozenset().union(*self._blocks.values())

    def drop_ended(self) -> None:
        """Removes the transfers that have completed or failed."""
        for handle in list(self._blocks):
            if not self._is_under_way(handle):
                self._release(handle)

    def release(self) -> None:
        """Releases all transfers; call it when the pages are freed."""
        for handle in list(self._blocks):
            self._release(handle)

    def _is_under_way(self, handle: int) -> bool:
        try:
            return bool(self._agent.check_xfer_state(handle) == "PROC")
        except Exception:  # NIXL's errors have no common class; each means that the peer has ended
            return False

    def _release(self, handle: int) -> None:
        with suppress(Exception):  # its peer has ended: nothing is left to release
            self._agent.release_xfer_handle(handle)
        del self._blocks[handle]
