"""Registration with vLLM in every process: layer classes, quantization methods, models."""

from vllm.model_executor.custom_op import PluggableLayer, op_registry_oot
from vllm.model_executor.layers.activation import SiluAndMul, SiluAndMulWithClamp
from vllm.model_executor.layers.attention.mm_encoder_attention import MMEncoderAttention
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn import KimiGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.gdn.olmo_gdn_linear_attn import (
    OlmoHybridGatedDeltaNetAttention,
)
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.mamba_mixer import MambaMixer
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
from vllm.model_executor.layers.mamba.short_conv import ShortConv
from vllm.model_executor.layers.mla import MultiHeadLatentAttentionWrapper
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.models import ModelRegistry
from vllm.model_executor.models.dbrx import DbrxExperts
from vllm.model_executor.models.gpt_oss import GptOssRoutedExperts
from vllm.model_executor.models.transformers.moe import TransformersRoutedExperts
from vllm.model_executor.models.whisper import WhisperEncoderAttention

from vllm_davinci.core import components
from vllm_davinci.core.attention.encoder import NPUMMEncoderAttention
from vllm_davinci.core.attention.mla.block import NPUMultiHeadLatentAttentionWrapper
from vllm_davinci.core.attention.whisper_encoder import NPUWhisperEncoderAttention
from vllm_davinci.core.checkpoint.loader import register as register_loader
from vllm_davinci.core.config.architectures import UNSERVED_MODEL, not_importable
from vllm_davinci.core.fused_moe.expert_containers import (
    NPUDbrxExperts,
    NPUGptOssRoutedExperts,
    NPUTransformersRoutedExperts,
)
from vllm_davinci.core.fused_moe.layer import NPURoutedExperts
from vllm_davinci.core.fused_moe.method import NPUUnquantizedFusedMoEMethod
from vllm_davinci.core.layers.activation import NPUSiluAndMul, NPUSiluAndMulWithClamp
from vllm_davinci.core.layers.embedding import NPUVocabParallelEmbedding
from vllm_davinci.core.layers.linear import (
    NPUColumnParallelLinear,
    NPUMergedColumnParallelLinear,
    NPUQKVParallelLinear,
    NPUReplicatedLinear,
    NPURowParallelLinear,
)
from vllm_davinci.core.layers.norm import NPURMSNorm
from vllm_davinci.core.layers.rotary import VARIANTS, NPURotaryEmbedding
from vllm_davinci.core.linear_attention.gated_delta_net import (
    NPUOlmoHybridGatedDeltaNetAttention,
    NPUQwenGatedDeltaNetAttention,
)
from vllm_davinci.core.linear_attention.kimi_delta_attention import NPUKimiGatedDeltaNetAttention
from vllm_davinci.core.linear_attention.mamba import NPUMambaMixer
from vllm_davinci.core.linear_attention.mamba2 import NPUMambaMixer2
from vllm_davinci.core.linear_attention.short_conv import NPUShortConv
from vllm_davinci.core.log import leave_out_what_means_nothing
from vllm_davinci.core.process.engine_exit import keep_no_semaphore, leave_at_exit
from vllm_davinci.core.process.plain_errors import shorten_errors_of_engines
from vllm_davinci.core.process.shutdown import fail_when_engine_dies
from vllm_davinci.core.quantization.vllm_methods import register as register_quantization
from vllm_davinci.core.sleep_mode.backend import register as register_sleep_backend
from vllm_davinci.core.weight_transfer.registration import register as register_weight_transfer

# class name in vLLM -> class that replaces it
LAYERS: dict[str, type] = {
    RMSNorm.__name__: NPURMSNorm,
    SiluAndMul.__name__: NPUSiluAndMul,
    SiluAndMulWithClamp.__name__: NPUSiluAndMulWithClamp,
    RotaryEmbedding.__name__: NPURotaryEmbedding,
    **VARIANTS,
    VocabParallelEmbedding.__name__: NPUVocabParallelEmbedding,
    ReplicatedLinear.__name__: NPUReplicatedLinear,
    ColumnParallelLinear.__name__: NPUColumnParallelLinear,
    MergedColumnParallelLinear.__name__: NPUMergedColumnParallelLinear,
    QKVParallelLinear.__name__: NPUQKVParallelLinear,
    RowParallelLinear.__name__: NPURowParallelLinear,
    MMEncoderAttention.__name__: NPUMMEncoderAttention,
    WhisperEncoderAttention.__name__: NPUWhisperEncoderAttention,
    MultiHeadLatentAttentionWrapper.__name__: NPUMultiHeadLatentAttentionWrapper,
    QwenGatedDeltaNetAttention.__name__: NPUQwenGatedDeltaNetAttention,
    OlmoHybridGatedDeltaNetAttention.__name__: NPUOlmoHybridGatedDeltaNetAttention,
    KimiGatedDeltaNetAttention.__name__: NPUKimiGatedDeltaNetAttention,
    MambaMixer.__name__: NPUMambaMixer,
    MambaMixer2.__name__: NPUMambaMixer2,
    ShortConv.__name__: NPUShortConv,
    RoutedExperts.__name__: NPURoutedExperts,
    DbrxExperts.__name__: NPUDbrxExperts,
    GptOssRoutedExperts.__name__: NPUGptOssRoutedExperts,
    TransformersRoutedExperts.__name__: NPUTransformersRoutedExperts,
    UnquantizedFusedMoEMethod.__name__: NPUUnquantizedFusedMoEMethod,
}


def register() -> None:
    """Registers out-of-tree layers, quantization and models. Idempotent; does not touch the device.

    vLLM calls this in every process, through its general plugins, before any model is built.
    """
    for name, layer in LAYERS.items():
        if op_registry_oot.get(name) is not layer:
            PluggableLayer.register_oot(layer, name=name)
    register_quantization()
    register_loader()
    register_sleep_backend()
    register_weight_transfer()
    for architecture in not_importable():
        ModelRegistry.register_model(architecture, UNSERVED_MODEL)
    for provider in components.find(components.MODELS).values():
        for architecture, path in provider.models().items():
            ModelRegistry.register_model(architecture, path)
    fail_when_engine_dies()
    shorten_errors_of_engines()
    leave_at_exit()
    keep_no_semaphore()
    leave_out_what_means_nothing()
