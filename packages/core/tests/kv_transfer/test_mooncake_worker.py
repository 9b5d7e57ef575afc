"""Another engine's worker counts as ended if nothing listens on its port."""

import asyncio

from vllm_davinci.core.kv_transfer.mooncake_worker import _end_of

SOON_S, LIMIT_S = 0.3, 10


def test_a_closed_connection_is_not_an_ended_worker_but_a_missing_process_is() -> None:
    asyncio.run(_worker_that_closes_connections_and_then_ends())


async def _worker_that_closes_connections_and_then_ends() -> None:
    connected = asyncio.Event()

    async def close(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connected.set()
        await asyncio.sleep(0.05)
        writer.close()

    server = await asyncio.start_server(close, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    ends = asyncio.create_task(_end_of(f"tcp://127.0.0.1:{port}"))
    await asyncio.wait_for(connected.wait(), LIMIT_S)
    await asyncio.sleep(SOON_S)
    assert not ends.done()
    server.close()
    await asyncio.wait_for(ends, LIMIT_S)
