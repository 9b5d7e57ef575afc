"""The ranges of every linear layer's input, observed while transformers runs a model on CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from vllm_davinci.core.errors import CheckpointError
from vllm_davinci.core.quantization.rounding import InputRange

WINDOW_TOKENS = 512


def text_windows(directory: Path, text: Path, max_tokens: int) -> list[torch.Tensor]:
    """The front of a text file in the model's tokens, int64 [1, at most WINDOW_TOKENS] each.

    Raises CheckpointError when the file does not read or holds no token.
    """
    try:
        content = text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"{text} does not read: {error}. Name a UTF-8 text file like what the model will see."
        ) from error
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokens = tokenizer(content, add_special_tokens=False, verbose=False)["input_ids"]
    if not tokens:
        raise CheckpointError(f"{text} holds no token: name a text of some pages.")
    first = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    return [
        torch.tensor([first + piece.tolist()])
        for piece in torch.tensor(tokens[:max_tokens]).split(WINDOW_TOKENS)
    ]


@torch.no_grad()
def input_ranges(
    directory: Path, windows: list[torch.Tensor], advance: Callable[[int], None]
) -> dict[str, InputRange]:
    """Name of each nn.Linear that ran -> the range of its input.

    advance: called after each window with its number of tokens
    """
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    ranges: dict[str, InputRange] = {}

    def observer(name: str) -> Callable[[nn.Module, tuple[torch.Tensor, ...]], None]:
        def observe(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            if inputs[0].numel() == 0:
                return
            low, high = torch.aminmax(inputs[0])
            seen = InputRange(low.item(), high.item())
            ranges[name] = ranges[name].joined(seen) if name in ranges else seen

        return observe

    for name, module in _linears(model):
        module.register_forward_pre_hook(observer(name))
    for window in windows:
        model(input_ids=window, use_cache=False)
        advance(window.numel())
    return ranges


def _linears(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            yield name, module
