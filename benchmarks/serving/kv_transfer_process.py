"""One of two engines that transfer blocks.

Answers questions (child.py), each a dictionary whose `do` names the action.
"""

import json
import os
import random
import socket
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import torch
import transformers
from vllm import LLM, SamplingParams

# The cache has Qwen3-8B's size, 147,456 bytes per token, but the model computes little.
SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 36,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 512,
    "tie_word_embeddings": True,
    "max_position_embeddings": 8192,
}
BYTES_OF_A_TOKEN = 2 * 36 * 8 * 128 * 2
BLOCK = 128
CACHE_BYTES = 48 * BLOCK * BYTES_OF_A_TOKEN
CAME = "vllm:external_prefix_cache_hits"
PIECE_BYTES = 4 << 20


class Engine:
    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options
        model = Path(options["model"])
        if not model.exists():
            torch.manual_seed(0)
            config = transformers.LlamaConfig(**SHAPE)
            transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(model)
        self._llm = LLM(
            str(model),
            dtype="bfloat16",
            enforce_eager=True,
            skip_tokenizer_init=True,
            disable_log_stats=False,
            async_scheduling=False,  # each step returns its own results
            max_model_len=options["prompt_tokens"] + 2 * BLOCK,
            max_num_seqs=4,
            max_num_batched_tokens=2048,
            kv_cache_memory_bytes=CACHE_BYTES,
            kv_transfer_config={
                "kv_connector": options["connector"],
                "kv_role": options["role"],
                "kv_load_failure_policy": "fail",
            },
        )
        self._requests = 0
        self._over_mooncake = options["connector"] == "MooncakeConnector"
        self._receiver: threading.Thread | None = None
        self._received: tuple[int, float] = (0, 0.0)
        self._buffer = torch.zeros(0, dtype=torch.int8)

    def __call__(self, question: dict[str, Any]) -> Any:
        return getattr(self, f"_{question.pop('do')}")(**question)

    # --- requests --------------------------------------------------------------------------------

    def _generate(
        self, seed: int, told: dict[str, Any] | None = None, length: int | None = None
    ) -> tuple[float, float, Any]:
        """Returns seconds to a prompt's last step and to its first token, and the output.

        Steps before the last one wait for blocks; the last step computes.
        """
        chosen = random.Random(seed)
        length = length or self._options["prompt_tokens"]
        prompt = [chosen.randrange(5, 500) for _ in range(length)]
        sampling = SamplingParams(
            temperature=0,
            max_tokens=1,
            ignore_eos=True,
            detokenize=False,
            extra_args={"kv_transfer_params": told} if told else None,
        )
        engine = self._llm.llm_engine
        self._requests += 1
        begin = time.perf_counter()
        engine.add_request(str(self._requests), {"prompt_token_ids": prompt}, sampling)
        outputs: list[Any] = []
        while not outputs:
            last = time.perf_counter()
            outputs = engine.step()
        return last - begin, time.perf_counter() - begin, outputs[0]

    def _prefill(self, seed: int) -> dict[str, Any]:
        """Computes a prompt; returns the transfer parameters for the other engine."""
        asked: dict[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False}
        if not self._over_mooncake:
            told: dict[str, Any] = self._generate(seed, asked)[2].kv_transfer_params
            return told
        address = f"http://127.0.0.1:{self._options['port']}"
        with urllib.request.urlopen(f"{address}/query", timeout=30) as answered:
            (engine,) = json.load(answered).values()
        named = {"transfer_id": f"prompt-{seed}"}
        self._generate(seed, {**asked, **named})
        # Blocks are sent in the steps after the prompt's last step.
        self._generate(seed, length=8)
        return {
            "do_remote_prefill": True,
            "remote_engine_id": engine["engine_id"],
            "remote_bootstrap_addr": address,
            **named,
        }

    def _decode(self, seed: int, told: dict[str, Any]) -> dict[str, Any]:
        before = self._tokens_that_came()
        come, seconds, _ = self._generate(seed, told)
        tokens = self._tokens_that_came() - before
        # Only whole blocks are transferred.
        num_bytes = -(-tokens // BLOCK) * BLOCK * BYTES_OF_A_TOKEN
        return {"come_s": come, "over_s": seconds, "tokens": tokens, "num_bytes": num_bytes}

    def _tokens_that_came(self) -> int:
        """Returns the number of transferred tokens of all requests so far."""
        found = [each for each in self._llm.get_metrics() if each.name == CAME]
        return int(sum(getattr(each, "value", 0) for each in found))

    def _compute(self, seed: int) -> float:
        """Returns seconds to the first token of a prompt that this engine computes."""
        return self._generate(seed)[1]

    # --- the copy itself -------------------------------------------------------------------------

    def _listen(self) -> int:
        listening = socket.create_server(("127.0.0.1", 0))
        listening.settimeout(60)
        self._receiver = threading.Thread(target=self._receive, args=(listening,), daemon=True)
        self._receiver.start()
        port: int = listening.getsockname()[1]
        return port

    def _receive(self, listening: socket.socket) -> None:
        """Receives bytes into memory that was written before, like the memory of blocks."""
        with listening, listening.accept()[0] as connection:
            connection.settimeout(60)
            size = int.from_bytes(connection.recv(8, socket.MSG_WAITALL), "little")
            into = memoryview(self._memory(size).numpy())
            begin, count = time.perf_counter(), 0
            connection.sendall(b"go")
            while count < size:
                count += connection.recv_into(into[count : count + PIECE_BYTES])
            self._received = count, time.perf_counter() - begin

    def _send(self, port: int, num_bytes: int) -> int:
        from_ = memoryview(self._memory(num_bytes).numpy())
        with socket.create_connection(("127.0.0.1", port), 60) as connection:
            connection.sendall(num_bytes.to_bytes(8, "little"))
            connection.recv(2, socket.MSG_WAITALL)
            connection.sendall(from_)
        return num_bytes

    def _received_bytes(self) -> int:
        assert self._receiver is not None
        self._receiver.join(60)
        return self._received[0]

    def _seconds(self) -> float:
        return self._received[1]

    def _copy(self, num_bytes: int) -> float:
        """Returns seconds for one copy within memory."""
        source = self._memory(num_bytes)
        target = torch.zeros_like(source)
        begin = time.perf_counter()
        target.copy_(source)
        return time.perf_counter() - begin

    def _memory(self, size: int) -> torch.Tensor:
        if self._buffer.numel() != size:
            self._buffer = torch.zeros(size, dtype=torch.int8)
        return self._buffer


answerer = Engine
