"""Encoder attention equals a softmax in plain torch, wherever its lengths come from."""

from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from vllm_davinci.core.attention import encoder
from vllm_davinci.core.attention.encoder import NPUMMEncoderAttention
from vllm_davinci.vnpu import _C

BACKEND = AttentionBackendEnum.TORCH_SDPA


@pytest.fixture(autouse=True)
def current_config(vllm_config: object) -> None:
    """Sets the configuration that layers read when they are created."""


def reference(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float,
    query_lengths: list[int], key_lengths: list[int],
) -> torch.Tensor:  # fmt: skip
    """query [q, heads, d], key and value [k, kv_heads, d] -> [q, heads, d]"""
    group = query.shape[1] // key.shape[1]
    key, value = (
        key.repeat_interleave(group, 1).double(),
        value.repeat_interleave(group, 1).double(),
    )
    outputs = []
    for q, k, v in zip(
        query.double().split(query_lengths), key.split(key_lengths), value.split(key_lengths),
        strict=True,
    ):  # fmt: skip
        scores = torch.einsum("qhd,khd->hqk", q, k) * scale
        outputs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v))
    return torch.cat(outputs).to(query.dtype)


def cumulative(lengths: list[int]) -> np.ndarray:
    return np.cumsum([0, *lengths]).astype(np.int32)


def random_heads(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def make(num_heads: int, head_size: int, num_kv_heads: int | None = None, **options: float):
    return NPUMMEncoderAttention(num_heads, head_size, num_kv_heads=num_kv_heads, **options)


def metadata(lengths: list[int], device: torch.device) -> dict[str, torch.Tensor | None]:
    """Makes the arguments that models pass to every block."""
    ends = cumulative(lengths)
    return {
        "cu_seqlens": NPUMMEncoderAttention.maybe_recompute_cu_seqlens(
            BACKEND, ends, 64, 1, device
        ),
        "sequence_lengths": NPUMMEncoderAttention.maybe_compute_seq_lens(BACKEND, ends, device),
    }


@pytest.mark.parametrize("is_flat", [False, True], ids=["heads_apart", "heads_flat"])
@pytest.mark.parametrize("filling", [0, 48], ids=["own_size", "filled"])
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(2, 2, 80), (4, 2, 72), (4, 1, 64)])
def test_every_sequence_attends_to_itself(heads, kv_heads, size, filling, is_flat, device):
    lengths = [7, 1, 33, 16]
    layer = make(heads, size, kv_heads)
    layer.operator_head_size = size + filling
    query = random_heads(57, heads, size)
    key, value = random_heads(57, kv_heads, size, seed=1), random_heads(57, kv_heads, size, seed=2)
    expected = reference(query, key, value, size**-0.5, lengths, lengths)
    inputs = [x.to(device).unsqueeze(0) for x in (query, key, value)]
    if is_flat:
        inputs = [x.flatten(2) for x in inputs]
    out = layer(*inputs, **metadata(lengths, device))
    assert out.shape == inputs[0].shape and out.is_contiguous()
    torch.testing.assert_close(out.cpu().reshape(expected.shape), expected)


def test_the_scale_is_the_given_one(device: torch.device):
    layer = make(2, 80, scale=0.3)
    query = random_heads(5, 2, 80)
    [out] = layer(*[query.to(device).unsqueeze(0)] * 3)
    torch.testing.assert_close(out.cpu(), reference(query, query, query, 0.3, [5], [5]))


def test_without_cu_seqlens_each_row_of_the_batch_is_a_sequence(device: torch.device):
    layer = make(2, 64)
    query, key, value = (
        random_heads(3, tokens, 2, 64, seed=seed) for seed, tokens in enumerate((4, 6, 6))
    )
    out = layer(*[x.to(device) for x in (query, key, value)])
    expected = reference(
        query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1), 0.125, [4] * 3, [6] * 3
    )
    assert out.shape == query.shape
    torch.testing.assert_close(out.cpu().flatten(0, 1), expected)


class Encoder:
    """An encoder of serial blocks, each using one of several sets of sequences."""

    def __init__(self, sets: list[str]) -> None:
        self.blocks = [(make(2, 64), name) for name in sets]

    def forward(self, x: torch.Tensor, given: dict[str, Any]) -> torch.Tensor:
        x = x.unsqueeze(0)
        for layer, name in self.blocks:
            x = layer(x, x, x, **given[name])
        return x[0].cpu()

    def expected(self, x: torch.Tensor, sets: dict[str, list[int]]) -> torch.Tensor:
        for _, name in self.blocks:
            x = reference(x, x, x, 0.125, sets[name], sets[name])
        return x


class LayerZeroCache(Encoder):
    """Regression: block 0 of a process kept its first lengths for all other blocks."""

    kept: ClassVar[dict[str, Any] | None] = None

    def forward(self, x: torch.Tensor, given: dict[str, Any]) -> torch.Tensor:
        if LayerZeroCache.kept is None:
            LayerZeroCache.kept = given[self.blocks[0][1]]
        return super().forward(x, dict.fromkeys(given, LayerZeroCache.kept))


@pytest.mark.parametrize("is_trap", [False, True], ids=["ours", "cache_of_layer_0"])
@pytest.mark.parametrize("is_second", [False, True], ids=["windows_and_images", "second_encoder"])
def test_lengths_belong_to_their_tensors_and_not_to_layers(is_second, is_trap, device, monkeypatch):
    """Blocks alternate between windows and whole images; another encoder may run first."""
    monkeypatch.setattr(LayerZeroCache, "kept", None)
    kind = LayerZeroCache if is_trap else Encoder
    sets = {"window": [4, 4, 2, 4], "full": [14], "other encoder": [5, 9]}
    given = {name: metadata(lengths, device) for name, lengths in sets.items()}
    x = random_heads(14, 2, 64)
    encoder, other = kind(["window", "full", "window", "full"]), kind(["window", "window"])
    if is_second:
        other.forward(x.to(device), given)
        encoder = kind(["other encoder", "other encoder"])
    for _ in range(2):  # both encoders alternate
        found = encoder.forward(x.to(device), given)
        error = (found - encoder.expected(x, sets)).abs().max()
        assert error > 0.1 if is_trap else error < 1e-5
        other.forward(x.to(device), given)


def test_a_forward_reads_nothing_from_the_device(device: torch.device):
    layers = [make(2, 64) for _ in range(6)]
    inputs = [random_heads(14, 2, 64).to(device).unsqueeze(0)] * 3
    before = _C.host_counts()
    given = [metadata([4, 4, 6], device), metadata([14], device)]
    for i, layer in enumerate(layers):
        layer(*inputs, **given[i % 2])
        layer(*inputs, cu_seqlens=given[i % 2]["cu_seqlens"])  # without lengths on the host
    after = _C.host_counts()
    assert after["copies_to_host"] == before["copies_to_host"]
    assert after["synchronizations"] == before["synchronizations"]


def test_lengths_known_only_to_the_device_are_read_once(device: torch.device):
    layers = [make(2, 64) for _ in range(6)]
    inputs = [random_heads(14, 2, 64).to(device).unsqueeze(0)] * 3
    sets = [torch.tensor(cumulative(lengths), device=device) for lengths in ([4, 10], [14])]
    before = _C.host_counts()["copies_to_host"]
    for i, layer in enumerate(layers):
        layer(*inputs, cu_seqlens=sets[i % 2])
    assert _C.host_counts()["copies_to_host"] - before == 2
    # A refilled buffer is read again.
    sets[0].copy_(torch.tensor(cumulative([7, 7])))
    x = inputs[0].cpu()[0]
    [out] = layers[0](*inputs, cu_seqlens=sets[0])
    torch.testing.assert_close(out.cpu(), reference(x, x, x, 0.125, [7, 7], [7, 7]))


def test_buffers_may_be_larger_than_their_content(device: torch.device):
    """After the last sequence its end is repeated; later tokens belong to no sequence."""
    x = random_heads(12, 2, 64)
    cu_seqlens = torch.tensor([0, 3, 8, 8, 8], device=device)
    [out] = make(2, 64)(*[x.to(device).unsqueeze(0)] * 3, cu_seqlens=cu_seqlens)
    expected = reference(x, x, x, 0.125, [3, 9], [3, 9])
    torch.testing.assert_close(out.cpu(), expected)


def test_more_sequences_than_one_call_supports(device: torch.device, monkeypatch):
    monkeypatch.setattr(encoder, "MAX_SEQUENCES", 2)
    lengths = [3, 1, 4, 2, 5]
    x = random_heads(15, 2, 64)
    [out] = make(2, 64)(*[x.to(device).unsqueeze(0)] * 3, **metadata(lengths, device))
    torch.testing.assert_close(out.cpu(), reference(x, x, x, 0.125, lengths, lengths))
