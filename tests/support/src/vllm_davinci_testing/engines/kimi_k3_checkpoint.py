"""A small Kimi-K3 with random weights under its released names, and its equations in plain torch.

transformers lacks this model. Each module computes one equation, token by token if it has a state.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import pad, silu

from vllm_davinci_testing.engines.integer_reference import (
    DESCRIPTIONS,
    IntegerLinear,
    integer_product,
)
from vllm_davinci_testing.engines.kimi_k3_tower import (
    PAD,
    PROCESSOR,
    SPECIAL,
    VISION,
    Projector,
    Tower,
    expanded,
    linear,
    pixels_of,
)
from vllm_davinci_testing.engines.model_zoo import fill_with_normal_weights, write_tokenizer
from vllm_davinci_testing.engines.multimodal_family import Request
from vllm_davinci_testing.engines.transformers_reference import TransformersReference
from vllm_davinci_testing.engines.zoo_model import EOS_ID, VOCAB_SIZE

PAD_ID = VOCAB_SIZE + SPECIAL.index(PAD)

# Latent attention pads these heads to 8, or to 4 on each of two ranks.
HIDDEN, HEADS, HEAD, LATENT, EPS = 192, 6, 32, 64, 1e-5
Q_RANK, KV_RANK, NOPE, ROPE, VALUE = 48, 512, 32, 64, 32
EXPERTS, TOP_K, INNER, SHARED, DENSE = 8, 2, 64, 2, 96
BOUND, BLOCK, FULL_ATTENTION, NUM_LAYERS = -5.0, 2, (2, 4), 5
BETA, LINEAR_BETA = 1.5, 2.0  # many activations reach it

TEXT: dict[str, Any] = {
    "model_type": "kimi_linear",
    "dtype": "float32",
    "vocab_size": VOCAB_SIZE + len(SPECIAL),
    "bos_token_id": EOS_ID,
    "eos_token_id": EOS_ID,
    "pad_token_id": EOS_ID,
    "hidden_size": HIDDEN,
    "intermediate_size": DENSE,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": HEADS,
    "hidden_act": "situ",
    "activation_situ_beta": BETA,
    "activation_situ_linear_beta": LINEAR_BETA,
    "rms_norm_eps": EPS,
    "moe_intermediate_size": INNER,
    "num_experts": EXPERTS,
    "num_experts_per_token": TOP_K,
    "num_shared_experts": SHARED,
    "first_k_dense_replace": 1,
    "routed_expert_hidden_size": LATENT,
    "latent_moe_use_norm": True,
    "q_lora_rank": Q_RANK,
    "kv_lora_rank": KV_RANK,
    "qk_nope_head_dim": NOPE,
    "qk_rope_head_dim": ROPE,
    "v_head_dim": VALUE,
    "mla_use_nope": True,
    "mla_use_output_gate": True,
    "attn_res_block_size": BLOCK,
    "linear_attn_config": {
        "kda_layers": [i + 1 for i in range(NUM_LAYERS) if i not in FULL_ATTENTION],
        "full_attn_layers": [i + 1 for i in FULL_ATTENTION],
        "num_heads": HEADS,
        "head_dim": HEAD,
        "short_conv_kernel_size": 4,
        "gate_lower_bound": BOUND,
        "use_full_rank_gate": True,
    },
    "max_position_embeddings": 1024,
}
RELEASED: dict[str, Any] = {
    "architectures": ["KimiK3ForConditionalGeneration"],
    "model_type": "kimi_k3",
    "text_config": TEXT,
    "vision_config": VISION,
    "media_placeholder_token_id": PAD_ID,
    "dtype": "float32",
}


def norm(size: int) -> nn.RMSNorm:
    return nn.RMSNorm(size, EPS)


class Situ(nn.Module):
    """A gated MLP with SiTU; `names` are the names of its three matrices."""

    def __init__(self, size: int, inner: int, names: Sequence[str]) -> None:
        super().__init__()
        self.names = names
        for name, sizes in zip(names, ((size, inner), (size, inner), (inner, size)), strict=True):
            self.add_module(name, linear(*sizes))

    def forward(self, x: Tensor) -> Tensor:
        to_gate, to_up, down = map(self.get_submodule, self.names)
        gate, up = to_gate(x), to_up(x)
        gate = BETA * (gate / BETA).tanh() * gate.sigmoid()
        result: Tensor = down(gate * LINEAR_BETA * (up / LINEAR_BETA).tanh())
        return result


class KimiRouter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(EXPERTS, HIDDEN))
        self.register_buffer("e_score_correction_bias", torch.empty(EXPERTS))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = (x @ self.weight.T).sigmoid()
        chosen = (scores + self.e_score_correction_bias).topk(TOP_K).indices
        weights = scores.gather(1, chosen)
        return weights / weights.sum(-1, keepdim=True), chosen


class LatentExperts(nn.Module):
    """Experts compute on a narrow copy of each token; a norm applies to their total."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = KimiRouter()
        self.experts = nn.ModuleList(
            Situ(LATENT, INNER, ("w1", "w3", "w2")) for _ in range(EXPERTS)
        )
        names = ("gate_proj", "up_proj", "down_proj")
        self.shared_experts = Situ(HIDDEN, SHARED * INNER, names)
        self.routed_expert_down_proj = linear(HIDDEN, LATENT)
        self.routed_expert_norm = norm(LATENT)
        self.routed_expert_up_proj = linear(LATENT, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x)
        narrow, sums = self.routed_expert_down_proj(x), []
        for token, own, experts in zip(narrow, weights, chosen.tolist(), strict=True):
            parts = [w * self.experts[e](token) for w, e in zip(own, experts, strict=True)]
            sums.append(torch.stack(parts).sum(0))
        routed = self.routed_expert_up_proj(self.routed_expert_norm(torch.stack(sums)))
        result: Tensor = routed + self.shared_experts(x)
        return result


class DeltaAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        size = HEADS * HEAD
        for name in "qkv":
            self.add_module(f"{name}_proj", linear(HIDDEN, size))
            self.add_module(f"{name}_conv1d", nn.Conv1d(size, size, 4, groups=size, bias=False))
        self.f_a_proj, self.f_b_proj = linear(HIDDEN, HEAD), linear(HEAD, size)
        self.b_proj, self.g_proj = linear(HIDDEN, HEADS), linear(HIDDEN, size)
        self.A_log = nn.Parameter(torch.randn(HEADS))
        self.dt_bias = nn.Parameter(torch.randn(size))
        self.o_norm, self.o_proj = norm(HEAD), linear(size, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        def mixed(name: str) -> Tensor:
            projected = self.get_submodule(f"{name}_proj")(x).T
            out: Tensor = silu(self.get_submodule(f"{name}_conv1d")(pad(projected, (3, 0))))
            return out.T.unflatten(-1, (HEADS, HEAD))

        query, key, value = map(mixed, "qkv")
        query, key = (v * (v.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for v in (query, key))
        step = (self.f_b_proj(self.f_a_proj(x)) + self.dt_bias).unflatten(-1, (HEADS, HEAD))
        decays = (BOUND * (self.A_log.exp()[:, None] * step).sigmoid()).exp()
        rates = self.b_proj(x).sigmoid()
        state, outputs = x.new_zeros(HEADS, HEAD, HEAD), []
        for q, k, v, decay, rate in zip(query, key, value, decays, rates, strict=True):
            state = state * decay[..., None]
            change = rate[:, None] * (v - torch.einsum("hkv,hk->hv", state, k))
            state = state + torch.einsum("hk,hv->hkv", k, change)
            outputs.append(torch.einsum("hkv,hk->hv", state, q * HEAD**-0.5))
        gate = self.g_proj(x).sigmoid()
        result: Tensor = self.o_proj(self.o_norm(torch.stack(outputs)).flatten(1) * gate)
        return result


class GatedLatentAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_a_proj, self.q_a_layernorm = linear(HIDDEN, Q_RANK), norm(Q_RANK)
        self.q_b_proj = linear(Q_RANK, HEADS * (NOPE + ROPE))
        self.kv_a_proj_with_mqa = linear(HIDDEN, KV_RANK + ROPE)
        self.kv_a_layernorm = norm(KV_RANK)
        self.kv_b_proj = linear(KV_RANK, HEADS * (NOPE + VALUE))
        self.g_proj, self.o_proj = linear(HIDDEN, HEADS * VALUE), linear(HEADS * VALUE, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        query = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))).unflatten(-1, (HEADS, -1))
        rows, shared = self.kv_a_proj_with_mqa(x).split([KV_RANK, ROPE], dim=-1)
        kv = self.kv_b_proj(self.kv_a_layernorm(rows)).unflatten(-1, (HEADS, -1))
        key, value = kv.split([NOPE, VALUE], dim=-1)
        key = torch.cat([key, shared[:, None].expand(-1, HEADS, -1)], dim=-1)
        scores = torch.einsum("qhd,khd->hqk", query, key) * (NOPE + ROPE) ** -0.5
        future = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
        shares = scores.masked_fill(future, -torch.inf).softmax(-1)
        out = torch.einsum("hqk,khd->qhd", shares, value).flatten(1)
        result: Tensor = self.o_proj(out * self.g_proj(x).sigmoid())
        return result


def mixed_sums(sums: list[Tensor], of_scores: nn.Module, to_score: nn.Module) -> Tensor:
    values = torch.stack(sums)
    return (to_score(of_scores(values)).softmax(0) * values).sum(0)


class Layer(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.begins_block = index % BLOCK == 0
        is_full = index in FULL_ATTENTION
        self.self_attn = GatedLatentAttention() if is_full else DeltaAttention()
        if index == 0:
            self.mlp: nn.Module = Situ(HIDDEN, DENSE, ("gate_proj", "up_proj", "down_proj"))
        else:
            self.block_sparse_moe = LatentExperts()
        self.input_layernorm, self.post_attention_layernorm = norm(HIDDEN), norm(HIDDEN)
        self.self_attention_res_norm, self.mlp_res_norm = norm(HIDDEN), norm(HIDDEN)
        self.self_attention_res_proj, self.mlp_res_proj = linear(HIDDEN, 1), linear(HIDDEN, 1)

    def forward(self, sums: list[Tensor]) -> list[Tensor]:
        x = mixed_sums(sums, self.self_attention_res_norm, self.self_attention_res_proj)
        out = self.self_attn(self.input_layernorm(x))
        sums = [*sums, out] if self.begins_block else [*sums[:-1], sums[-1] + out]
        x = mixed_sums(sums, self.mlp_res_norm, self.mlp_res_proj)
        mlp = getattr(self, "block_sparse_moe", None) or self.mlp
        return [*sums[:-1], sums[-1] + mlp(self.post_attention_layernorm(x))]


class Text(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(TEXT["vocab_size"], HIDDEN)
        self.layers = nn.ModuleList(map(Layer, range(NUM_LAYERS)))
        self.output_attn_res_norm, self.norm = norm(HIDDEN), norm(HIDDEN)
        self.output_attn_res_proj = linear(HIDDEN, 1)

    def forward(self, token_ids: Tensor, features: Sequence[Tensor]) -> Tensor:
        embedded = self.embed_tokens(token_ids)
        if features:
            embedded[token_ids == PAD_ID] = torch.cat([*features])
        sums = [embedded]
        for layer in self.layers:
            sums = layer(sums)
        last: Tensor = self.norm(
            mixed_sums(sums, self.output_attn_res_norm, self.output_attn_res_proj)
        )
        return last


class CausalText(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model, self.lm_head = Text(), linear(HIDDEN, TEXT["vocab_size"])

    def forward(self, token_ids: Tensor, features: Sequence[Tensor]) -> Tensor:
        logits: Tensor = self.lm_head(self.model(token_ids, features))
        return logits


class Network(nn.Module):
    config = None  # transformers has no configuration class

    def __init__(self) -> None:
        super().__init__()
        self.language_model = CausalText()
        self.vision_tower, self.mm_projector = Tower(), Projector(HIDDEN)

    def features(self, image: Any) -> Tensor:
        """Returns [tokens, HIDDEN] of an image of PIL."""
        dtype = self.mm_projector.post_norm.weight.dtype
        found: Tensor = self.mm_projector(self.vision_tower(pixels_of(image).to(dtype)))
        return found

    def forward(self, token_ids: Tensor, images: Sequence[Any] = ()) -> Tensor:
        logits: Tensor = self.language_model(token_ids, [*map(self.features, images)])
        return logits


class KimiK3Reference(TransformersReference):
    """Computes the equations with a checkpoint's weights, also integers in ModelSlim's format.

    dtype: dtype of values between the layers
    """

    def __init__(self, checkpoint: Path, dtype: torch.dtype = torch.float32) -> None:
        self.network = Network().to(dtype).eval()
        descriptions = [json.loads(each.read_text()) for each in checkpoint.glob(DESCRIPTIONS)]
        types = descriptions[0] if descriptions else {}
        tensors: dict[str, Tensor] = {}
        for file in checkpoint.glob("*.safetensors"):
            tensors |= load_file(file)
        for name, module in list(self.network.named_modules()):
            kind = types.get(f"{name}.weight", "FLOAT")
            if type(module) is nn.Linear and kind != "FLOAT":
                own = {
                    part: tensors.pop(part) for part in list(tensors) if part.startswith(f"{name}.")
                }
                product = integer_product({n.rpartition(".")[2]: t for n, t in own.items()}, kind)
                parent, _, last = name.rpartition(".")
                setattr(self.network.get_submodule(parent), last, IntegerLinear(product))
        missing, unexpected = self.network.load_state_dict(tensors, strict=False)
        assert not missing and not unexpected, (missing, unexpected)

        self._tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int], images: Sequence[Any] = ()) -> Tensor:
        rows: Tensor = self.network(torch.tensor(list(token_ids)), images)
        return rows.float()

    def prompt_of(self, request: Request) -> list[int]:
        """Returns the token ids of a request in vLLM's form."""
        images = request.get("multi_modal_data", {}).get("image", [])
        ids: list[int] = self._tokenizer(expanded(request["prompt"], images))["input_ids"]
        return ids

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        text = [*prompt]
        for _ in range(count):
            text.append(int(self.logits(text)[-1].argmax()))
        return text[len(prompt) :]


def write_kimi_k3(directory: Path, seed: int = 0) -> Path:
    """Writes configuration, fp32 weights and tokenizer; returns the directory."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        network = Network()
        fill_with_normal_weights(network)
    save_file(network.state_dict(), directory / "model.safetensors", metadata={"format": "pt"})
    for name, content in {"config": RELEASED, "preprocessor_config": PROCESSOR}.items():
        (directory / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    write_tokenizer(directory)
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL)})
    tokenizer.save_pretrained(directory)
    return directory
