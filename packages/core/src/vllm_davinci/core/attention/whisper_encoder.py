"""Attention of Whisper's encoder, for which vLLM has a class of its own."""

from vllm.model_executor.models.whisper import WhisperEncoderAttention

from vllm_davinci.core.attention.encoder import NPUMMEncoderAttention


class NPUWhisperEncoderAttention(NPUMMEncoderAttention, WhisperEncoderAttention):
    """NPUMMEncoderAttention that also accepts [tokens, hidden_size], as vLLM's class does."""
