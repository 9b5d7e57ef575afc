"""Transfers that were given up, and the pages that they may still write into."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any


class LateTransfers:
    """Reads that NIXL has not ended.

    NIXL releases one that is under way, and its bytes come all the same. They come into pages on
    the host; the blocks of the device with the same numbers are not touched.

    agent: NIXL's, which the transfers belong to
    """

    def __init__(self, agent: Any) -> None:
        self._agent = agent
        self._blocks: dict[int, frozenset[int]] = {}  # handle -> numbers of its pages

    def add(self, handles: Sequence[int], blocks: Sequence[int]) -> None:
        """Keeps these handles, which together write into the pages of these blocks."""
        self._blocks |= dict.fromkeys(handles, frozenset(blocks))

    def blocks(self) -> frozenset[int]:
        """Blocks whose pages nothing else may be received into."""
        return frozenset().union(*self._blocks.values())

    def drop_ended(self) -> None:
        """Forgets the transfers that have ended by now, well or not."""
        for handle in list(self._blocks):
            if not self._is_under_way(handle):
                self._release(handle)

    def release(self) -> None:
        """Releases all: to be called when the pages are freed."""
        for handle in list(self._blocks):
            self._release(handle)

    def _is_under_way(self, handle: int) -> bool:
        try:
            return bool(self._agent.check_xfer_state(handle) == "PROC")
        except Exception:  # NIXL's errors have no common class; each says that the peer is gone
            return False

    def _release(self, handle: int) -> None:
        with suppress(Exception):  # of a peer that is gone: nothing is left to release
            self._agent.release_xfer_handle(handle)
        del self._blocks[handle]
