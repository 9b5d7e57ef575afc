"""The training text as tokens, and sequences drawn from it."""

from dataclasses import dataclass

import torch
from corpus import TOP_LEVEL, conversations, training_files
from tokenizer import ASSISTANT, END, USER
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

# Shares of sequences that start at top-level statements, at any line, and at a conversation.
SHARES = (0.5, 0.38, 0.12)
CONVERSATION_TOKENS = 480  # longer conversations are left out


@dataclass(frozen=True)
class TokenStream:
    """A text as tokens, with the positions at which a sequence may start."""

    tokens: Tensor
    starts: Tensor

    def windows(self, count: int, length: int, generator: torch.Generator) -> Tensor:
        """Draws `count` sequences from random starts: int64 [count, 1 + length], `<s>` first."""
        fitting = self.starts[self.starts + length <= len(self.tokens)]
        choice = torch.randint(len(fitting), (count,), generator=generator)
        positions = fitting[choice, None] + torch.arange(-1, length)
        windows = self.tokens[positions]
        windows[:, 0] = self.tokens[0]
        return windows


def code_streams(tokenizer: PreTrainedTokenizerFast) -> tuple[TokenStream, TokenStream]:
    """Returns two streams of the training files: sequences start at top-level statements, or at any
    line.
    """
    tokens: list[int] = []
    top_level: list[int] = []
    lines: list[int] = []
    for file in tqdm(training_files(), "tokens", unit="file"):
        encoding = tokenizer(
            file.text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        statements = {0, *(match.start() for match in TOP_LEVEL.finditer(file.text))}
        tokens.append(tokenizer.bos_token_id)
        for token, (begin, _) in zip(
            encoding["input_ids"], encoding["offset_mapping"], strict=True
        ):
            if begin in statements:
                top_level.append(len(tokens))
            elif file.text[begin - 1] == "\n":
                lines.append(len(tokens))
            tokens.append(token)
        tokens.append(tokenizer.eos_token_id)
    stream = torch.tensor(tokens)
    return TokenStream(stream, torch.tensor(top_level)), TokenStream(stream, torch.tensor(lines))


def conversation_stream(tokenizer: PreTrainedTokenizerFast) -> TokenStream:
    """Returns the conversations in the chat template's form."""
    tokens: list[int] = []
    starts: list[int] = []
    for conversation in conversations(training_files()):
        text = f"{USER}{conversation.request}{END}{ASSISTANT}{conversation.answer}{END}"
        encoded = tokenizer(text, verbose=False)["input_ids"]
        if len(encoded) <= CONVERSATION_TOKENS:
            starts.append(len(tokens) + 1)
            tokens += encoded
    return TokenStream(torch.tensor(tokens), torch.tensor(starts))


class TrainingText:
    """Training files and conversations, each with possible starts of sequences."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._streams = (*code_streams(tokenizer), conversation_stream(tokenizer))
        self.code, _, self.conversations = (stream.tokens for stream in self._streams)

    def batch(self, rows: int, length: int, generator: torch.Generator) -> Tensor:
        """Draws `rows` sequences of all kinds by their shares: int64 [rows, 1 + length]."""
        kinds = torch.multinomial(torch.tensor(SHARES), rows, replacement=True, generator=generator)
        return torch.cat(
            [
                stream.windows(int((kinds == kind).sum()), length, generator)
                for kind, stream in enumerate(self._streams)
            ]
        )
