"""Members of a group show that they know its secret, and do not send it."""

import hashlib
import hmac
import secrets
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import ProcessGroupGloo

SECRET_BYTES = 32
_NONCE_BYTES = 32
_TAG = 7  # of no message of the device


def signed(secret: bytes, label: str, content: bytes) -> bytes:
    """`content` behind the signature of a member of the group."""
    return _signature(secret, label, content) + content


def content_of(secret: bytes, label: str, message: bytes) -> bytes:
    """The content that a member has signed. Raises ConnectionError where no member has."""
    size = hashlib.sha256().digest_size
    content = message[size:]
    if not hmac.compare_digest(message[:size], _signature(secret, label, content)):
        raise ConnectionError(
            f"What is said to come from {label} was not written by a member of this group: it does "
            "not know the secret that rank 0 gives its ranks. Are two programs using one address "
            "and port, or rank tables that differ?"
        )
    return content


def prove(
    group: ProcessGroupGloo, secret: bytes, rank: int, peers: Sequence[int], limit_s: float
) -> None:
    """Lets each of `peers` show over its connection that it knows the secret, and shows it too.

    Raises ConnectionError naming a rank that does not.
    """
    nonce = secrets.token_bytes(_NONCE_BYTES)
    challenges = _swap(group, dict.fromkeys(peers, nonce), _NONCE_BYTES, limit_s)
    answers = {
        peer: _signature(secret, f"{rank} to {peer}", challenge + nonce)
        for peer, challenge in challenges.items()
    }
    size = hashlib.sha256().digest_size
    for peer, answer in _swap(group, answers, size, limit_s).items():
        right = _signature(secret, f"{peer} to {rank}", nonce + challenges[peer])
        if not hmac.compare_digest(answer, right):
            raise ConnectionError(
                f"Who connected as rank {peer} is no member of this group: it does not know the "
                "secret that rank 0 gives its ranks."
            )


def _signature(secret: bytes, label: str, content: bytes) -> bytes:
    return hmac.digest(secret, label.encode() + b"\0" + content, "sha256")


def _swap(
    group: ProcessGroupGloo, messages: dict[int, bytes], size: int, limit_s: float
) -> dict[int, bytes]:
    """Sends a message to each peer and returns theirs, of `size` bytes."""
    sent = {peer: _tensor(message) for peer, message in messages.items()}
    received = {peer: torch.empty(size, dtype=torch.uint8) for peer in messages}
    carrier: Any = group  # torch's stubs do not know that it sends
    works = [carrier.send([sent[peer]], peer, _TAG) for peer in messages]
    works += [carrier.recv([received[peer]], peer, _TAG) for peer in messages]
    for work in works:
        work.wait(timedelta(seconds=limit_s))
    return {peer: bytes(tensor.tolist()) for peer, tensor in received.items()}


def _tensor(message: bytes) -> torch.Tensor:
    return torch.tensor(list(message), dtype=torch.uint8)
