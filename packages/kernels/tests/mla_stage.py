"""The stage before MLA: weights, and tokens that go into its cache."""

import torch

HIDDEN, HEADS, NOPE, ROPE, KV_LORA, VALUE, BLOCK = 96, 4, 32, 64, 512, 32, 128
EPSILON = 1e-6


class Block:
    """Weights of one block and a cache, with tokens that go into it."""

    def __init__(self, dtype: torch.dtype, q_lora_rank: int | None, num_tokens: int) -> None:
        generator = torch.Generator().manual_seed(num_tokens)

        def normal(*sizes: int) -> torch.Tensor:
            return (torch.randn(sizes, generator=generator) / sizes[0] ** 0.5).to(dtype).npu()

        self.q_lora_rank = q_lora_rank
        self.x = normal(num_tokens, HIDDEN) * num_tokens**0.5
        # Stored as [out, in] and used transposed, as a linear layer does.
        self.a_weight = normal((q_lora_rank or 0) + KV_LORA + ROPE, HIDDEN).t()
        self.q_a_norm = None if q_lora_rank is None else normal(q_lora_rank)
        self.q_b_weight = normal(HEADS * (NOPE + ROPE), q_lora_rank or HIDDEN).t()
        self.kv_a_norm = normal(KV_LORA)
        self.W_UK, self.W_UV = normal(HEADS, NOPE, KV_LORA), normal(HEADS, KV_LORA, VALUE)
        angles = torch.rand(num_tokens, 1, 1, ROPE // 2, generator=generator) * 6
        self.cos, self.sin = (
            f.repeat(1, 1, 1, 2).to(dtype).npu() for f in (angles.cos(), angles.sin())
        )
        slots = torch.randperm(4 * BLOCK, generator=generator)[:num_tokens]
        slots[num_tokens // 2] = -1
        self.slots = slots.npu()
        self.caches = [torch.zeros(4, BLOCK, 1, n).to(dtype).npu() for n in (KV_LORA, ROPE)]

    def arguments(self) -> list[object]:
        return [
            self.x,
            self.a_weight,
            self.q_a_norm,
            self.q_b_weight,
            self.kv_a_norm,
            self.W_UK,
            self.cos,
            self.sin,
            self.slots,
            *self.caches,
            EPSILON,
            EPSILON,
        ]


def near(npu: torch.Tensor, expected: torch.Tensor) -> None:
    # Products over up to 512 entries of order one, summed in another order.
    limit = 512 * torch.finfo(torch.float32).eps
    if expected.dtype != torch.float32:
        limit = 32 * torch.finfo(expected.dtype).eps
    torch.testing.assert_close(npu.cpu(), expected, rtol=limit, atol=limit)
