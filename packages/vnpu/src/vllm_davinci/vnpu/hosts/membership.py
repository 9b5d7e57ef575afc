"""Members of a group prove that they know its secret, without sending it."""

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
_TAG = 7  # not the tag of any device message


def signed(secret: bytes, label: str, content: bytes) -> bytes:
    """Signs `content` as a member of the group; returns signature and content."""
    return _signature(secret, label, content) + content


def content_of(secret: bytes, label: str, message: bytes) -> bytes:
    """Verifies a member's signature and returns the content. Raises ConnectionError if it is
    invalid.
    """
    size = hashlib.sha256().digest_size
    content = message[size:]
    if not hmac.compare_digest(message[:size], _signature(secret, label, content)):
        raise ConnectionError(
            f"The message from {label} was not written by a member of this group, as its "
            "signature lacks rank 0's secret. Are two programs using one address and port, or "
            "different rank tables?"
        )
    return content


def prove(
    group: ProcessGroupGloo, secret: bytes, rank: int, peers: Sequence[int], limit_s: float
) -> None:
    """Exchanges proofs of the secret with each of `peers` over its connection.

    Raises ConnectionError with the rank that fails.
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
                f"The process connected as rank {peer} is no member of this group: it does not "
                "know rank 0's secret."
            )


def _signature(secret: bytes, label: str, content: bytes) -> bytes:
    return hmac.digest(secret, label.encode() + b"\0" + content, "sha256")


def _swap(
    group: ProcessGroupGloo, messages: dict[int, bytes], size: int, limit_s: float
) -> dict[int, bytes]:
    """Sends a message to each peer and returns theirs, of `size` bytes."""
    sent = {peer: _tensor(message) for peer, message in messages.items()}
    received = {peer: torch.empty(size, dtype=torch.uint8) for peer in messages}
    carrier: Any = group  # torch's stubs lack send
    works = [carrier.send([sent[peer]], peer, _TAG) for peer in messages]
    works += [carrier.recv([received[peer]], peer, _TAG) for peer in messages]
    for work in works:
        work.wait(timedelta(seconds=limit_s))
    return {peer: bytes(tensor.tolist()) for peer, tensor in received.items()}


def _tensor(message: bytes) -> torch.Tensor:
    return torch.tensor(list(message), dtype=torch.uint8)
