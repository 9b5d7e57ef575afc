"""Abandoned transfers keep their pages until they end."""

from vllm_davinci.core.kv_transfer.late_transfers import LateTransfers


class Agent:
    """NIXL's agent with two calls, whose states a test sets."""

    def __init__(self) -> None:
        self.states: dict[int, str] = {}
        self.released: list[int] = []

    def check_xfer_state(self, handle: int) -> str:
        state = self.states[handle]
        if state == "gone":
            raise RuntimeError("NIXL_ERR_REMOTE_DISCONNECT")
        return state

    def release_xfer_handle(self, handle: int) -> None:
        self.released.append(handle)
        if self.states[handle] == "gone":
            raise RuntimeError("NIXL_ERR_REMOTE_DISCONNECT")


def test_pages_are_kept_until_the_last_of_a_requests_transfers_has_ended():
    agent = Agent()
    late = LateTransfers(agent)
    late.add([1, 2], [7, 8])
    late.add([3], [9])
    agent.states = {1: "PROC", 2: "PROC", 3: "PROC"}
    late.drop_ended()
    assert (late.blocks(), agent.released) == ({7, 8, 9}, [])
    agent.states = {1: "DONE", 2: "PROC", 3: "gone"}
    late.drop_ended()
    assert (late.blocks(), agent.released) == ({7, 8}, [1, 3])
    late.release()
    assert (late.blocks(), agent.released) == (set(), [1, 3, 2])
