"""Only processes that know a group's secret are accepted as members."""

import threading

import pytest
from torch.distributed import HashStore, ProcessGroupGloo

from vllm_davinci.vnpu.hosts.membership import content_of, prove, signed

LIMIT_S = 20.0


def outcomes(secrets: list[bytes]) -> list[str]:
    """Lets ranks with these secrets authenticate each other; returns each rank's outcome."""
    store, found = HashStore(), ["nothing"] * len(secrets)

    def run(rank: int) -> None:
        options = ProcessGroupGloo._Options()
        options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        group = ProcessGroupGloo(store, rank, len(secrets), options)
        others = [peer for peer in range(len(secrets)) if peer != rank]
        try:
            prove(group, secrets[rank], rank, others, LIMIT_S)
            found[rank] = "proved"
        except ConnectionError as error:
            found[rank] = str(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(secrets))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * LIMIT_S)
    return found


def test_members_know_each_other():
    assert outcomes([b"s" * 32] * 3) == ["proved"] * 3


def test_a_process_without_the_secret_is_refused_by_rank():
    first, second = outcomes([b"s" * 32, b"t" * 32])
    assert "The process connected as rank 1 is no member of this group" in first
    assert "The process connected as rank 0 is no member of this group" in second


def test_an_unsigned_message_is_refused():
    secret = b"s" * 32
    message = signed(secret, "rank 1", b"content")
    assert content_of(secret, "rank 1", message) == b"content"
    for wrong in (
        message[:-1] + b"x",
        b"\0" * 32 + b"content",
        b"",
        signed(b"t" * 32, "rank 1", b"content"),
        signed(secret, "rank 0", b"content"),
    ):
        with pytest.raises(ConnectionError, match="message from rank 1"):
            content_of(secret, "rank 1", wrong)
