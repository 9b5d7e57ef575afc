"""Describes a small checkpoint of random weights by the fields of its configuration."""

import copy
from dataclasses import dataclass, field
from typing import Any

import transformers

BOS, EOS = "<s>", "</s>"
# One token per byte, then two special tokens. Not a multiple of 64, so that vLLM pads the LM head.
NUM_BYTES = 256
VOCAB_SIZE = NUM_BYTES + 2
BOS_ID, EOS_ID = NUM_BYTES, NUM_BYTES + 1


@dataclass(frozen=True)
class ZooModel:
    """One checkpoint. `options` are fields of its transformers configuration."""

    name: str
    model_type: str
    num_heads: int
    num_kv_heads: int
    head_size: int
    hidden_size: int = 256
    tied: bool = False
    seed: int = 0
    num_layers: int = 2
    options: dict[str, Any] = field(default_factory=dict)

    def config(self) -> transformers.PretrainedConfig:
        return transformers.AutoConfig.for_model(
            self.model_type,
            vocab_size=VOCAB_SIZE,
            hidden_size=self.hidden_size,
            intermediate_size=self.hidden_size * 3 // 2,
            num_hidden_layers=self.num_layers,
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_kv_heads,
            head_dim=self.head_size,
            max_position_embeddings=512,
            tie_word_embeddings=self.tied,
            bos_token_id=BOS_ID,
            eos_token_id=EOS_ID,
            pad_token_id=EOS_ID,
            **copy.deepcopy(self.options),  # transformers modifies it
        )
