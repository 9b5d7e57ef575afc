"""One block of vLLM's DeepSeek attention on the device, and steps for it."""

import math

import torch
from transformers import DeepseekV3Config
from vllm.config import VllmConfig
from vllm.forward_context import set_forward_context
from vllm.model_executor.models.deepseek_v2 import DeepseekV2MLAAttention
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_davinci.core.attention.mla.block import NPUMultiHeadLatentAttentionWrapper
from vllm_davinci.core.attention.mla.cache import MLACache
from vllm_davinci.core.attention.mla.metadata import NPUMLAMetadata, NPUMLAMetadataBuilder

BLOCK, KV_LORA, ROPE, HIDDEN, HEADS = 128, 512, 64, 64, 4

# A step is a list of (request, number of new tokens); requests stay in the order of their first
# use.
Step = list[tuple[str, int]]
WHOLE: list[Step] = [[("a", 3), ("b", 200), ("c", 1)]]
DECODES: list[Step] = [
    [("a", 5), ("b", 127), ("c", 300)],
    [("a", 1), ("b", 1), ("c", 1)],
    [("c", 1), ("a", 1)],
]
CHUNKED: list[Step] = [[("a", 40), ("b", 130)], [("b", 200)], [("a", 70), ("b", 3)]]
MIXED: list[Step] = [
    [("a", 40), ("b", 255), ("c", 128)],
    [("a", 1), ("b", 1), ("c", 20), ("d", 150)],
    [("d", 1), ("a", 1), ("b", 300), ("c", 2)],
]
STEPS = {"whole": WHOLE, "decodes": DECODES, "chunked": CHUNKED, "mixed": MIXED}


# Options that set the size of norms' biases.
BIAS_SIZES = {"kv_a_layernorm": "kv_bias", "q_a_layernorm": "q_bias"}


class Block:
    """One attention block of vLLM's model, its cache, and the hidden states of its requests."""

    def __init__(
        self, vllm_config: VllmConfig, device: torch.device, dtype=torch.float32, **options
    ) -> None:
        values = {"qk_nope_head_dim": 32, "v_head_dim": 32, "q_lora_rank": 48, "rope": None}
        values |= options
        quant_config = values.pop("quant_config", None)
        self.config = DeepseekV3Config(
            hidden_size=HIDDEN,
            num_attention_heads=HEADS,
            kv_lora_rank=KV_LORA,
            qk_rope_head_dim=ROPE,
            rope_parameters=values["rope"] or {"rope_type": "default", "rope_theta": 10000.0},
            **{name: value for name, value in values.items() if name != "rope"},
        )
        self.vllm_config, self.device, self.dtype = vllm_config, device, dtype
        self.generator = torch.Generator().manual_seed(0)
        standard = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            self.module = DeepseekV2MLAAttention(
                vllm_config,
                self.config,
                HIDDEN,
                values.get("heads", HEADS),
                self.config.qk_nope_head_dim,
                ROPE,
                self.config.v_head_dim,
                self.config.q_lora_rank,
                KV_LORA,
                max_position_embeddings=1024,
                cache_config=vllm_config.cache_config,
                quant_config=quant_config,
                prefix="layers.0.attention",
            )
        finally:
            torch.set_default_dtype(standard)
        with torch.no_grad():
            for name, weight in self.module.named_parameters():
                weight.copy_(self.initial(name, weight))
            for name, norm in self.module.named_children():
                if getattr(norm, "bias", None) is not None:
                    size = values.get(BIAS_SIZES[name], 0.0)
                    random = torch.randn(norm.bias.shape, generator=self.generator) * size
                    norm.bias.weight_loader(norm.bias, random)
        self.module.to(device)
        self.wrapper: NPUMultiHeadLatentAttentionWrapper = self.module.mla_attn
        for layer in self.module.modules():
            if hasattr(layer, "quant_method"):
                layer.quant_method.process_weights_after_loading(layer)
        self.wrapper.mla_attn.process_weights_after_loading(dtype)
        self.ids = (torch.randperm(31, generator=self.generator) + 1).tolist()
        self.cache = MLACache.in_region(
            torch.zeros(32 * BLOCK * (KV_LORA + ROPE), dtype=dtype, device=device),
            BLOCK, KV_LORA, ROPE,
        )  # fmt: skip
        self.wrapper.mla_attn.bind_kv_cache(self.cache)
        spec = self.wrapper.mla_attn.get_kv_cache_spec(vllm_config)
        self.builder = NPUMLAMetadataBuilder(spec, [], vllm_config, device)
        self.hidden: dict[str, torch.Tensor] = {}
        self.blocks: dict[str, list[int]] = {}

    def initial(self, name: str, parameter: torch.Tensor) -> torch.Tensor:
        """Returns a parameter's random values, by its name in the model."""
        bound = 0.1 if "norm" in name else 1 / math.sqrt(parameter.shape[-1])
        random = torch.randn(parameter.shape, generator=self.generator) * bound
        return random + 1 if "norm" in name else random

    def common(self, step: Step) -> CommonAttentionMetadata:
        """Adds the step's new tokens to its requests, and describes the batch like the runner."""
        seq_lens, slots, table = [], [], torch.zeros(len(step), 8, dtype=torch.int32)
        self.new, positions = [], []
        for row, (name, count) in enumerate(step):
            before = self.hidden.get(name, torch.empty(0, HIDDEN, dtype=self.dtype))
            rows = torch.randn(count, HIDDEN, generator=self.generator).to(self.dtype)
            self.hidden[name] = torch.cat([before, rows])
            self.new.append(rows)
            seq_lens.append(len(self.hidden[name]))
            own = self.blocks.setdefault(name, [])
            while len(own) * BLOCK < seq_lens[-1]:
                own.append(self.ids.pop())
            table[row, : len(own)] = torch.tensor(own)
            span = range(len(before), seq_lens[-1])
            positions.extend(span)
            slots.extend(own[p // BLOCK] * BLOCK + p % BLOCK for p in span)
        starts = torch.tensor([0, *[count for _, count in step]]).cumsum(0).to(torch.int32)
        self.positions = torch.tensor(positions, device=self.device)
        return CommonAttentionMetadata(
            query_start_loc=starts.to(self.device),
            query_start_loc_cpu=starts,
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=self.device),
            seq_lens_cpu_upper_bound=torch.tensor(seq_lens, dtype=torch.int32),
            num_reqs=len(step),
            num_actual_tokens=int(starts[-1]),
            max_query_len=max(count for _, count in step),
            max_seq_len=max(seq_lens),
            block_table_tensor=table.to(self.device),
            slot_mapping=torch.tensor(slots, device=self.device),
        )

    def metadata(self, step: Step) -> NPUMLAMetadata:
        return self.builder.build(0, self.common(step))

    def forward(
        self,
        metadata: NPUMLAMetadata | None,
        hidden: torch.Tensor | None = None,
        num_padding_rows: int = 0,
    ) -> torch.Tensor:
        hidden = torch.cat(self.new) if hidden is None else hidden
        hidden = torch.cat([hidden, hidden.new_full((num_padding_rows, HIDDEN), 9.0)])
        padding = self.positions.new_zeros(num_padding_rows)
        by_layer = {self.wrapper.mla_attn.layer_name: metadata} if metadata else None
        with torch.inference_mode(), set_forward_context(by_layer, self.vllm_config):
            output = self.module(torch.cat([self.positions, padding]), hidden.to(self.device), None)
        return output.cpu()

    def run(self, step: Step) -> list[torch.Tensor]:
        """Returns the output of the step's new tokens by request."""
        output = self.forward(self.metadata(step))
        return list(output.split([count for _, count in step]))

    def expected(self, name: str, scale_correction: float) -> torch.Tensor:
        """Computes a request's output [tokens, HIDDEN] in fp64 from all its hidden states."""
        weights = {
            key: value.detach().cpu().double() for key, value in self.module.named_parameters()
        }
        config = self.config
        x = self.hidden[name].double()

        def norm(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            mean = rows.pow(2).mean(-1, keepdim=True)
            return rows * (mean + config.rms_norm_eps).rsqrt() * weight

        def kv_bias() -> torch.Tensor:
            return weights.get("kv_a_layernorm.bias", torch.zeros(KV_LORA))

        def linear(rows: torch.Tensor, layer: str) -> torch.Tensor:
            return rows @ weights[f"{layer}.weight"].T

        if config.q_lora_rank is not None:
            joint = linear(x, "fused_qkv_a_proj")
            q_c, kv = joint.split([config.q_lora_rank, KV_LORA + ROPE], -1)
            q = linear(norm(q_c, weights["q_a_layernorm.weight"]), "q_b_proj")
        else:
            q, kv = linear(x, "q_proj"), linear(x, "kv_a_proj_with_mqa")
        nope, value_size = config.qk_nope_head_dim, config.v_head_dim
        q_nope, q_pe = q.unflatten(-1, (-1, nope + ROPE)).split([nope, ROPE], -1)
        kv_c, k_pe = kv.split([KV_LORA, ROPE], -1)
        up = linear(norm(kv_c, weights["kv_a_layernorm.weight"]) + kv_bias(), "kv_b_proj")
        k_nope, value = up.unflatten(-1, (-1, nope + value_size)).split([nope, value_size], -1)
        table = self.module.rotary_emb.cos_sin_cache.cpu().double()[: len(x)]

        # Pairs of adjacent entries, [tokens, heads, R].
        def rotate(rows: torch.Tensor) -> torch.Tensor:
            cos, sin = table[:, None].chunk(2, -1)
            even, odd = rows[..., ::2], rows[..., 1::2]
            return torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).flatten(-2)

        scores = torch.einsum("qhd,khd->hqk", q_nope, k_nope)
        scores += torch.einsum("qhd,kd->hqk", rotate(q_pe), rotate(k_pe[:, None])[:, 0])
        scores *= scale_correction / math.sqrt(nope + ROPE)
        hidden_keys = torch.ones(len(x), len(x)).triu(1).bool()
        weights_of_keys = scores.masked_fill(hidden_keys, -math.inf).softmax(-1)
        out = torch.einsum("hqk,khd->qhd", weights_of_keys, value).flatten(1)
        return linear(out, "o_proj")

    def check(
        self, steps: list[Step], scale_correction: float = 1.0, tolerance: float = 2e-5
    ) -> None:
        for step in steps:
            for (name, count), actual in zip(step, self.run(step), strict=True):
                expected = self.expected(name, scale_correction)[-count:].to(self.dtype)
                torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


SIDE_STREAM = {"torchair_graph_config": {"enable_multistream_mla": True}}


def with_streams(vllm_config: VllmConfig, device: torch.device, **options: object) -> Block:
    """Makes a block whose layer has a side stream."""
    vllm_config.additional_config = SIDE_STREAM
    try:
        return Block(vllm_config, device, **options)
    finally:
        vllm_config.additional_config = {}
