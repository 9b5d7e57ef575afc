"""transformers' results on the CPU in fp32, compared with vLLM's tokens."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from vllm_davinci_testing.engines.hy_v4_checkpoint import HY_V4, rotate_halves
from vllm_davinci_testing.engines.rounding import first_wrong_token

# Distance of two logits whose order 16 bits can change, in standard deviations of all logits.
CLOSE = 0.25


class TransformersReference:
    """Runs a checkpoint in transformers, with some fields of its configuration replaced."""

    def __init__(self, checkpoint: Path, dtype: torch.dtype = torch.float32, **fields: Any) -> None:
        config = transformers.AutoConfig.from_pretrained(checkpoint)
        has_images = type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
        auto: Any = (
            transformers.AutoModelForImageTextToText
            if has_images
            else transformers.AutoModelForCausalLM
        )
        self.network = auto.from_pretrained(
            checkpoint, dtype=dtype, attn_implementation="eager", **fields
        ).eval()
        if config.model_type == HY_V4.model_type:
            rotate_halves(self.network)
        self.network.generation_config.eos_token_id = None  # the tests also generate after it

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int], **inputs: torch.Tensor) -> torch.Tensor:
        """Returns [len(token_ids), vocabulary]: row i predicts token i + 1."""
        return self.network(torch.tensor([list(token_ids)]), **inputs).logits[0].float()

    def continuation_logits(self, prompt: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
        """Returns [len(tokens), vocabulary]: row i predicts tokens[i]."""
        kinds = {}
        # Attention is bidirectional in the prompt.
        if getattr(self.network.config, "prefix_lm", False):
            kinds["token_type_ids"] = torch.tensor([[1] * len(prompt) + [0] * len(tokens)])
        return self.logits([*prompt, *tokens], **kinds)[len(prompt) - 1 : -1]

    def logprobs(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Returns [len(token_ids), vocabulary]: row i is for token i + 1."""
        return self.logits(token_ids).log_softmax(dim=-1)

    @torch.inference_mode()
    def greedy(self, prompt: Sequence[int], max_tokens: int) -> list[int]:
        """Generates greedily with transformers' own cache."""
        output = self.network.generate(
            torch.tensor([list(prompt)]),
            max_new_tokens=max_tokens,
            do_sample=False,
        )
        return output[0, len(prompt) :].tolist()

    def first_difference(
        self,
        prompt: Sequence[int],
        tokens: Sequence[int],
        adjust: Callable[[torch.Tensor, list[int]], torch.Tensor] | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> str | None:
        """Describes where `tokens` differs from the greedy continuation of `prompt`, or returns
        None.

        adjust: changes the logits of one position, given the tokens generated before it
        dtype:  dtype of the engine that generated the tokens
        """

        def logits() -> torch.Tensor:
            rows = self.continuation_logits(prompt, tokens)
            if adjust is None:
                return rows
            return torch.stack(
                [adjust(row.clone(), list(tokens[:i])) for i, row in enumerate(rows)]
            )

        wrong = first_wrong_token(self.network, logits, tokens, dtype)
        return wrong and f"prompt of {len(prompt)} tokens {list(prompt)[:8]}...: {wrong}"

    def differing_tokens(
        self, prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]
    ) -> tuple[int, int]:
        """Counts tokens that are not the greedy choice: with close logits, and others."""
        close = wrong = 0
        for prompt, tokens in zip(prompts, outputs, strict=True):
            rows = self.continuation_logits(prompt, tokens)
            for row, token in zip(rows, tokens, strict=True):
                gap = float((row.max() - row[token]) / row.std())
                close += 0 < gap <= CLOSE
                wrong += gap > CLOSE
        return close, wrong


def assert_greedy(
    reference: TransformersReference,
    prompts: Sequence[Sequence[int]],
    outputs: Sequence[Any],
    max_tokens: int,
) -> None:
    """Asserts that all outputs are the greedy continuations of their prompts."""
    generated = [list(output.outputs[0].token_ids) for output in outputs]
    assert [len(tokens) for tokens in generated] == [max_tokens] * len(prompts)
    differences = [
        difference
        for prompt, tokens in zip(prompts, generated, strict=True)
        if (difference := reference.first_difference(prompt, tokens)) is not None
    ]
    assert not differences, f"{len(differences)} of {len(prompts)} differ:\n" + "\n".join(
        differences
    )
