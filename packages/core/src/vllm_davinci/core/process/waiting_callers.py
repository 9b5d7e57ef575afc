"""Wakes what waits for an engine whose process has died."""

import gc


def tell_waiting_callers() -> None:
    """Raises EngineDeadError in the calls of this process that wait for dead engines.

    vLLM's client of an offline engine sets a flag when the engine's process has gone, for later
    calls. A call that waits already is only woken by the engine's own last message, which a process
    that was killed, or that aborted, has not sent.

    An engine also ends when its program does, and then a thread that still runs here is stopped
    for good where it stands, with all that it holds: never more than the clients, so that the rest
    of the heap goes in order.
    """
    from vllm.v1.engine.core_client import SyncMPClient  # imports this package's platform
    from vllm.v1.engine.exceptions import EngineDeadError

    for kind in (SyncMPClient, *SyncMPClient.__subclasses__()):
        # By its type: isinstance asks proxies too, of which one may be of what has gone.
        clients = [each for each in gc.get_referrers(kind) if type(each) is kind]
        for client in clients:
            if not client.resources.engine_dead:
                continue
            client.outputs_queue.put_nowait(EngineDeadError())
            for result in list(client.utility_results.values()):
                if not result.done():
                    result.set_exception(EngineDeadError())
