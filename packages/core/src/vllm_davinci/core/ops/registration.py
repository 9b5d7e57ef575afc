"""The table of vLLM's layers and the classes that take their place."""

from vllm.model_executor.custom_op import PluggableLayer, op_registry_oot
from vllm.model_executor.layers.activation import SiluAndMul
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
from vllm.model_executor.layers.mla import MultiHeadLatentAttentionWrapper
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from vllm_davinci.core.moe.layer import NPURoutedExperts
from vllm_davinci.core.moe.method import NPUUnquantizedFusedMoEMethod
from vllm_davinci.core.ops.activation import NPUSiluAndMul
from vllm_davinci.core.ops.embedding import NPUVocabParallelEmbedding
from vllm_davinci.core.ops.layernorm import NPURMSNorm
from vllm_davinci.core.ops.linear import (
    NPUColumnParallelLinear,
    NPUMergedColumnParallelLinear,
    NPUQKVParallelLinear,
    NPUReplicatedLinear,
    NPURowParallelLinear,
)
from vllm_davinci.core.ops.mla import NPUMultiHeadLatentAttention
from vllm_davinci.core.ops.rotary_embedding import VARIANTS, NPURotaryEmbedding

# class name in vLLM -> class that is instantiated in its place
LAYERS: dict[str, type] = {
    RMSNorm.__name__: NPURMSNorm,
    SiluAndMul.__name__: NPUSiluAndMul,
    RotaryEmbedding.__name__: NPURotaryEmbedding,
    **VARIANTS,
    VocabParallelEmbedding.__name__: NPUVocabParallelEmbedding,
    ReplicatedLinear.__name__: NPUReplicatedLinear,
    ColumnParallelLinear.__name__: NPUColumnParallelLinear,
    MergedColumnParallelLinear.__name__: NPUMergedColumnParallelLinear,
    QKVParallelLinear.__name__: NPUQKVParallelLinear,
    RowParallelLinear.__name__: NPURowParallelLinear,
    MultiHeadLatentAttentionWrapper.__name__: NPUMultiHeadLatentAttention,
    RoutedExperts.__name__: NPURoutedExperts,
    UnquantizedFusedMoEMethod.__name__: NPUUnquantizedFusedMoEMethod,
}


def register_layers() -> None:
    """Registers every row of LAYERS with vLLM. Idempotent."""
    for name, layer in LAYERS.items():
        if op_registry_oot.get(name) is not layer:
            PluggableLayer.register_oot(layer, name=name)
