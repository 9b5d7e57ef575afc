"""GGUF files become checkpoints with the same weights; invalid files are reported."""

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from safetensors.torch import load_file

from vllm_davinci.meta import gguf
from vllm_davinci.meta.errors import ModelFileError

HIDDEN, HEADS, KV_HEADS, INNER, WORDS = 64, 4, 2, 96, 300


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, dict[str, np.ndarray]]:
    """A Llama of one layer in float32, and its tensors by GGUF's names."""
    monkeypatch.setenv("DAVINCI_GGUF_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "small.gguf"
    random = np.random.default_rng(0)
    size = HIDDEN // HEADS
    shapes = {
        "token_embd.weight": (WORDS, HIDDEN),
        "output_norm.weight": (HIDDEN,),
        "blk.0.attn_norm.weight": (HIDDEN,),
        "blk.0.ffn_norm.weight": (HIDDEN,),
        "blk.0.attn_q.weight": (HEADS * size, HIDDEN),
        "blk.0.attn_k.weight": (KV_HEADS * size, HIDDEN),
        "blk.0.attn_v.weight": (KV_HEADS * size, HIDDEN),
        "blk.0.attn_output.weight": (HIDDEN, HEADS * size),
        "blk.0.ffn_gate.weight": (INNER, HIDDEN),
        "blk.0.ffn_up.weight": (INNER, HIDDEN),
        "blk.0.ffn_down.weight": (HIDDEN, INNER),
    }
    tensors = {name: random.standard_normal(s).astype(np.float32) for name, s in shapes.items()}
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(size)
    writer.add_vocab_size(WORDS)
    writer.add_tokenizer_model("gpt2")
    letters = [chr(0x100 + n) for n in range(WORDS - 1)]
    writer.add_token_list([*letters, letters[0] + letters[1]])
    writer.add_token_types([1] * WORDS)
    writer.add_token_merges([f"{letters[0]} {letters[1]}"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path, tensors


def test_a_gguf_file_becomes_a_checkpoint_once(model: tuple[Path, dict[str, np.ndarray]]):
    path, tensors = model
    assert gguf.is_gguf(path)
    directory = gguf.converted(path)
    assert not list(directory.parent.glob(f"{directory.name}.*"))
    written = load_file(directory / "model.safetensors")
    plain = {"mlp.gate_proj": "ffn_gate", "mlp.down_proj": "ffn_down", "self_attn.v_proj": "attn_v"}
    for name, theirs in plain.items():
        expected = torch.from_numpy(tensors[f"blk.0.{theirs}.weight"]).bfloat16()
        assert torch.equal(written[f"model.layers.0.{name}.weight"], expected)
    # GGUF stores the two halves of a rotary pair side by side.
    query = torch.from_numpy(tensors["blk.0.attn_q.weight"]).view(HEADS, -1, 2, HIDDEN)
    expected = query.transpose(1, 2).reshape(HIDDEN, HIDDEN).bfloat16()
    assert torch.equal(written["model.layers.0.self_attn.q_proj.weight"], expected)
    before = (directory / "model.safetensors").stat().st_mtime_ns
    assert gguf.converted(path) == directory
    assert (directory / "model.safetensors").stat().st_mtime_ns == before


def test_a_file_unsupported_by_transformers_is_reported(model: tuple[Path, dict[str, np.ndarray]]):
    path, _ = model
    content = path.read_bytes()
    path.write_bytes(content.replace(b"llama", b"lamma"))
    with pytest.raises(ModelFileError, match="transformers does not read this GGUF file"):
        gguf.converted(path)
    assert not any(gguf.checkpoint_directory().glob("small-*"))
    path.write_text("no model")
    assert not gguf.is_gguf(path)
