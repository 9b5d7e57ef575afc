"""When ranks meet, missing ranks are named and unknown processes are rejected."""

import threading
import time

import pytest
from torch.distributed import PrefixStore

from vllm_davinci.vnpu.hosts import meeting


@pytest.fixture
def point(monkeypatch):
    monkeypatch.setenv("HCCL_IF_IP", "127.0.0.1")
    return meeting.open_point()


def test_every_rank_receives_all_messages(point):
    heard = {}

    def run(rank: int) -> None:
        heard[rank] = meeting.exchange(*point, 3, rank, b"of rank %d" % rank, 20)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(40)
    assert all(words == [b"of rank 0", b"of rank 1", b"of rank 2"] for words in heard.values())
    assert len(heard) == 3


def test_groups_of_one_process_have_one_store_and_secrets_of_their_own(point):
    other = meeting.open_point()
    assert other[:2] == point[:2]
    assert other[2] != point[2]


def test_missing_ranks_are_named_at_the_time_limit(point):
    begin = time.monotonic()
    with pytest.raises(TimeoutError, match=r"incomplete after 1 s: rank 0, rank 2 did not join"):
        meeting.exchange(*point, 3, 1, b"", 1)
    assert time.monotonic() - begin < 10


def test_a_stranger_that_writes_as_a_rank_is_detected(point):
    address, port, secret = point
    store = meeting._store(address, port, secret, 5)
    assert isinstance(store, PrefixStore)
    store.set("rank 0", b"\0" * 32 + b"let me in")
    with pytest.raises(ConnectionError, match="message from rank 0"):
        meeting.exchange(*point, 2, 1, b"", 5)


def test_a_point_without_a_server_is_named():
    with pytest.raises(TimeoutError, match=r"cannot be reached at 127\.0\.0\.1:9 within 1 s"):
        meeting.exchange("127.0.0.1", 9, b"s" * 32, 2, 1, b"", 1)
