"""The draft models: small networks that predict the target's next tokens from its hidden states.

`MTPLayer` is DeepSeek-V3's multi-token prediction layer (DeepSeek-V3 report, 2.2),
`StreamsMTPLayer` DeepSeek-V4's, `Eagle3Head` is EAGLE-3's (arXiv 2503.01840). All compute as in
vLLM: a draft for position t reads the embedding of token t + 1 and a hidden state of position t.
For further drafts its own output replaces the hidden state that the target has not computed.
"""

import copy
import tempfile
from pathlib import Path
from typing import Protocol

import torch
from released import rename
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3DecoderLayer,
    DeepseekV3RMSNorm,
)
from transformers.models.deepseek_v4.modeling_deepseek_v4 import (
    DeepseekV4DecoderLayer,
    DeepseekV4HyperHead,
    DeepseekV4RMSNorm,
)
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaMLP,
    LlamaRMSNorm,
)

EAGLE3_LAYERS = (1, 3, 5)  # target layers whose inputs the head reads
EAGLE3_VOCAB_SIZE = 2048  # the most frequent tokens, the only ones that the head drafts


class Draft(Protocol):
    """A draft model's interface for training."""

    def first_hidden(self, states: tuple[Tensor, ...], last: Tensor) -> Tensor:
        """Returns hidden states for the first draft token, [rows, tokens, hidden]."""

    def __call__(self, tokens: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Returns logits over the target's vocabulary, and hidden states for the next draft."""


def _causal_mask(tokens: int) -> Tensor:
    """Returns an additive causal mask: float32 [1, 1, tokens, tokens]."""
    return torch.full((tokens, tokens), float("-inf")).triu(1)[None, None]


class MTPLayer(nn.Module):
    """One multi-token prediction layer, initialized from the target's last layer and norm."""

    def __init__(self, target: PreTrainedModel) -> None:
        super().__init__()
        config = target.config
        size = config.hidden_size
        self.enorm = DeepseekV3RMSNorm(size, config.rms_norm_eps)
        self.hnorm = DeepseekV3RMSNorm(size, config.rms_norm_eps)
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        self.layer = DeepseekV3DecoderLayer(config, config.num_hidden_layers)
        self.layer.load_state_dict(target.model.layers[-1].state_dict())
        self.norm = DeepseekV3RMSNorm(size, config.rms_norm_eps)
        self.norm.load_state_dict(target.model.norm.state_dict())
        # Shared with the target, which is not trained here, so not parameters of this module.
        self._shared = (target.model.embed_tokens, target.lm_head, target.model.rotary_emb)
        self.layer_index = config.num_hidden_layers

    def first_hidden(self, states: tuple[Tensor, ...], last: Tensor) -> Tensor:
        return last  # after the target's final norm

    def forward(self, tokens: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        embed_tokens, head, rotary = self._shared
        positions = torch.arange(tokens.shape[1])[None]
        embedded = torch.where(positions[..., None] == 0, 0, embed_tokens(tokens))
        joined = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(hidden)], dim=-1))
        output = self.layer(
            joined,
            attention_mask=_causal_mask(tokens.shape[1]),
            position_embeddings=rotary(joined, positions),
        )
        normed = self.norm(output)
        return head(normed), normed

    def save(self, directory: Path) -> None:
        """Writes `directory`/mtp.safetensors with the names in released checkpoints.

        transformers reads only model.safetensors; vLLM reads every file of the directory.
        """
        embed_tokens, head, _ = self._shared
        prefix = f"model.layers.{self.layer_index}"
        tensors = {
            f"{prefix}.embed_tokens.weight": embed_tokens.weight,
            f"{prefix}.enorm.weight": self.enorm.weight,
            f"{prefix}.hnorm.weight": self.hnorm.weight,
            f"{prefix}.eh_proj.weight": self.eh_proj.weight,
            f"{prefix}.shared_head.norm.weight": self.norm.weight,
            f"{prefix}.shared_head.head.weight": head.weight,
        }
        for name, tensor in self.layer.state_dict().items():
            if name == "mlp.experts.gate_up_proj":
                for expert, weight in enumerate(tensor):
                    gate, up = weight.chunk(2)
                    tensors[f"{prefix}.mlp.experts.{expert}.gate_proj.weight"] = gate
                    tensors[f"{prefix}.mlp.experts.{expert}.up_proj.weight"] = up
            elif name == "mlp.experts.down_proj":
                for expert, weight in enumerate(tensor):
                    tensors[f"{prefix}.mlp.experts.{expert}.down_proj.weight"] = weight
            else:
                tensors[f"{prefix}.{name}"] = tensor
        save_file(
            {name: _stored(name, tensor) for name, tensor in tensors.items()},
            directory / "mtp.safetensors",
            metadata={"format": "pt"},
        )

    def load(self, directory: Path) -> None:
        """Reads the files that `save` wrote."""
        prefix = f"model.layers.{self.layer_index}."
        stored = {
            name.removeprefix(prefix): tensor.float()
            for name, tensor in load_file(directory / "mtp.safetensors").items()
        }
        for name in ("enorm", "hnorm", "eh_proj"):
            getattr(self, name).weight.data.copy_(stored.pop(f"{name}.weight"))
        self.norm.weight.data.copy_(stored.pop("shared_head.norm.weight"))
        del stored["embed_tokens.weight"], stored["shared_head.head.weight"]
        experts = range(len(self.layer.mlp.experts.gate_up_proj))
        gate, up, down = (
            [stored.pop(f"mlp.experts.{expert}.{part}_proj.weight") for expert in experts]
            for part in ("gate", "up", "down")
        )
        stored["mlp.experts.down_proj"] = torch.stack(down)
        stored["mlp.experts.gate_up_proj"] = torch.cat([torch.stack(gate), torch.stack(up)], 1)
        self.layer.load_state_dict(stored)


class StreamsMTPLayer(nn.Module):
    """DeepSeek-V4's MTP layer, which reads the target's residual streams; initialized from its last
    layer.

    Hidden states are streams, [rows, tokens, streams, hidden].
    """

    def __init__(self, target: PreTrainedModel) -> None:
        super().__init__()
        config = copy.deepcopy(target.config)
        config.num_hidden_layers += 1
        config.layer_types.append("sliding_attention")
        config.mlp_layer_types.append("moe")
        self.config, size = config, config.hidden_size
        self.enorm = DeepseekV4RMSNorm(size, config.rms_norm_eps)
        self.hnorm = DeepseekV4RMSNorm(size, config.rms_norm_eps)
        self.e_proj = nn.Linear(size, size, bias=False)
        self.h_proj = nn.Linear(size, size, bias=False)
        nn.init.eye_(self.h_proj.weight)
        self.layer = DeepseekV4DecoderLayer(config, config.num_hidden_layers - 1)
        # All parameters but the compressor's, which this layer lacks.
        self.layer.load_state_dict(target.model.layers[-1].state_dict(), strict=False)
        self.hc_head, self.norm = DeepseekV4HyperHead(config), DeepseekV4RMSNorm(size)
        self.hc_head.load_state_dict(target.model.hc_head.state_dict())
        self.norm.load_state_dict(target.model.norm.state_dict())
        # Shared with the target, which is not trained here, so not parameters of this module.
        self._shared = (target.model.embed_tokens, target.lm_head, target.model.rotary_emb)

    def first_hidden(self, states: tuple[Tensor, ...], last: Tensor) -> Tensor:
        return states[-1]

    def forward(self, tokens: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        embed_tokens, head, rotary = self._shared
        positions = torch.arange(tokens.shape[1])[None]
        embedded = torch.where(positions[..., None] == 0, 0, embed_tokens(tokens))
        mixed = self.h_proj(self.hnorm(hidden)) + self.e_proj(self.enorm(embedded)).unsqueeze(2)
        far = torch.full((tokens.shape[1],) * 2, float("-inf")).tril(-self.config.sliding_window)
        output = self.layer(
            mixed,
            attention_mask=_causal_mask(tokens.shape[1]) + far,
            position_embeddings={"main": rotary(embedded, positions, layer_type="main")},
            position_ids=positions,
        )
        return head(self.norm(self.hc_head(output))), output

    def save(self, directory: Path) -> None:
        """Writes `directory`/mtp.safetensors with released names; transformers does not read this
        file.
        """
        whole = AutoModelForCausalLM.from_config(self.config, dtype=torch.float32)
        whole.model.layers[-1].load_state_dict(self.layer.state_dict())
        prefix = f"layers.{self.config.num_hidden_layers - 1}."
        with tempfile.TemporaryDirectory() as scratch:
            whole.save_pretrained(scratch)
            rename(Path(scratch), {})
            named = load_file(Path(scratch) / "model.safetensors")
        tensors = {
            name.replace(prefix, "mtp.0."): tensor
            for name, tensor in named.items()
            if name.startswith(prefix)
        }
        for name in ("enorm", "hnorm", "e_proj", "h_proj", "norm"):
            tensors[f"mtp.0.{name}.weight"] = getattr(self, name).weight
        for name, tensor in self.hc_head.state_dict().items():
            tensors[f"mtp.0.hc_head_{name.removeprefix('hc_')}"] = tensor
        stored = {name: _stored(name, tensor) for name, tensor in tensors.items()}
        save_file(stored, directory / "mtp.safetensors", metadata={"format": "pt"})


class Eagle3Head(nn.Module):
    """EAGLE-3's head: one Llama layer over embeddings and the inputs of three target layers."""

    def __init__(self, target: PreTrainedModel, frequent_tokens: Tensor) -> None:
        super().__init__()
        self.config: LlamaConfig = target.config
        size = self.config.hidden_size
        self.fc = nn.Linear(len(EAGLE3_LAYERS) * size, size, bias=False)
        self.input_layernorm = LlamaRMSNorm(size, self.config.rms_norm_eps)
        self.hidden_norm = LlamaRMSNorm(size, self.config.rms_norm_eps)
        self.self_attn = LlamaAttention(self.config, layer_idx=0)
        for name in ("q_proj", "k_proj", "v_proj"):
            old = getattr(self.self_attn, name)
            setattr(self.self_attn, name, nn.Linear(2 * size, old.out_features, bias=False))
        self.post_attention_layernorm = LlamaRMSNorm(size, self.config.rms_norm_eps)
        self.mlp = LlamaMLP(self.config)
        self.mlp.load_state_dict(target.model.layers[-1].mlp.state_dict())
        self.norm = LlamaRMSNorm(size, self.config.rms_norm_eps)
        self.norm.load_state_dict(target.model.norm.state_dict())
        self.lm_head = nn.Linear(size, len(frequent_tokens), bias=False)
        self.lm_head.weight.data.copy_(target.lm_head.weight[frequent_tokens])
        self.frequent_tokens = nn.Buffer(frequent_tokens)
        self._shared = (target.model.embed_tokens, target.model.rotary_emb)

    def first_hidden(self, states: tuple[Tensor, ...], last: Tensor) -> Tensor:
        combined: Tensor = self.fc(torch.cat([states[layer] for layer in EAGLE3_LAYERS], dim=-1))
        return combined

    @classmethod
    def load(cls, target: PreTrainedModel, directory: Path) -> "Eagle3Head":
        """Reads the files that `save` wrote."""
        stored = load_file(directory / "model.safetensors")
        del stored["t2d"]
        offsets = stored.pop("d2t")
        head = cls(target, offsets + torch.arange(len(offsets)))
        named = {name.removeprefix("midlayer."): tensor for name, tensor in stored.items()}
        head.load_state_dict({**named, "frequent_tokens": head.frequent_tokens})
        return head

    def forward(self, tokens: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        embed_tokens, rotary = self._shared
        positions = torch.arange(tokens.shape[1])[None]
        embedded = self.input_layernorm(embed_tokens(tokens))
        attended, _ = self.self_attn(
            torch.cat([embedded, self.hidden_norm(hidden)], dim=-1),
            position_embeddings=rotary(hidden, positions),
            attention_mask=_causal_mask(tokens.shape[1]),
        )
        residual = hidden + attended
        output = residual + self.mlp(self.post_attention_layernorm(residual))
        drafted = self.lm_head(self.norm(output))
        logits = drafted.new_full((*tokens.shape, self.config.vocab_size), float("-inf"))
        logits[..., self.frequent_tokens] = drafted
        return logits, output

    def save(self, directory: Path) -> None:
        """Writes a directory with weights and configuration like released heads."""
        directory.mkdir(exist_ok=True)
        trained = {
            name: tensor for name, tensor in self.state_dict().items() if name != "frequent_tokens"
        }
        inside = ("self_attn.", "mlp.", "input_layernorm.", "hidden_norm.", "post_attention")
        tensors = {
            f"midlayer.{name}" if name.startswith(inside) else name: _stored(name, tensor)
            for name, tensor in trained.items()
        }
        drafts = torch.arange(len(self.frequent_tokens))
        tensors["d2t"] = self.frequent_tokens - drafts
        is_drafted = torch.zeros(self.config.vocab_size, dtype=torch.bool)
        is_drafted[self.frequent_tokens] = True
        tensors["t2d"] = is_drafted
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        config = LlamaConfig.from_dict(self.config.to_dict())
        config.architectures = ["LlamaForCausalLMEagle3"]
        config.dtype = torch.bfloat16
        config.num_hidden_layers = 1
        config.draft_vocab_size = len(self.frequent_tokens)
        config.tie_word_embeddings = False
        config.eagle_config = {"eagle_aux_hidden_state_layer_ids": list(EAGLE3_LAYERS)}
        config.save_pretrained(directory)


def _stored(name: str, tensor: Tensor) -> Tensor:
    kept = tensor.detach().contiguous()
    # Stays in fp32, as published: it decides between near ties.
    precise = name.endswith(("e_score_correction_bias", "gate.bias", "attn_sink")) or ".hc_" in name
    return kept.float() if precise else kept.bfloat16()
