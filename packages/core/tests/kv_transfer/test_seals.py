"""Checksums of prefixes are equal if and only if the tokens are equal."""

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_davinci.core.kv_transfer.seals import prefix_digests

TOKENS = [5, 300, 2, 1 << 17, 0, 0, 9]


def request(tokens: list[int], cache_salt: str | None = None) -> Any:
    return SimpleNamespace(prompt_token_ids=tokens, cache_salt=cache_salt)


def test_each_block_has_the_digest_of_all_tokens_up_to_its_end():
    digests = prefix_digests(request(TOKENS), block_size=3)
    assert len(digests) == len(set(digests)) == 3
    assert all(-(1 << 63) <= digest < 1 << 63 for digest in digests)
    assert prefix_digests(request(TOKENS[:6]), 3) == digests[:2]


@pytest.mark.parametrize("place", range(len(TOKENS)))
def test_another_token_changes_the_digests_of_its_block_and_those_after_it(place: int):
    digests = prefix_digests(request(TOKENS), 3)
    changed = [*TOKENS[:place], TOKENS[place] + 1, *TOKENS[place + 1 :]]
    of_changed = prefix_digests(request(changed), 3)
    assert [one == other for one, other in zip(digests, of_changed, strict=True)] == [
        block < place // 3 for block in range(3)
    ]


def test_tokens_of_a_longer_block_and_another_salt_differ():
    digests = prefix_digests(request(TOKENS), 3)
    assert prefix_digests(request([*TOKENS, 0]), 3)[2] != digests[2]
    assert not set(prefix_digests(request(TOKENS, "salt"), 3)) & set(digests)
