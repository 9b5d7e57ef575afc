"""Generates offline with prefills in two ubatches: one computes while the other communicates.

vnpu run -- python examples/overlap_offline.py checkpoints/tiny_deepseek

All prompts form one step, which is split from 256 tokens on: 41 copies of a short prompt suffice.
"""

import argparse

from vllm import LLM, SamplingParams

COPIES = 41

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="checkpoint directory")
    parser.add_argument("--prompt", default="def read_file(path, mode='r'):")
    parser.add_argument("--max-tokens", type=int, default=100)
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("-tp", type=int, default=2, help="ranks")
    options = parser.parse_args()

    llm = LLM(
        options.model,
        enforce_eager=True,
        tensor_parallel_size=options.tp,
        max_model_len=options.max_model_len,
        max_num_seqs=COPIES,
        distributed_executor_backend="mp",
        additional_config={"dbo": {"enabled": True}},
    )
    greedy = SamplingParams(temperature=0, max_tokens=options.max_tokens)
    outputs = llm.generate([options.prompt] * COPIES, greedy)
    texts = {output.outputs[0].text for output in outputs}
    for text in texts:
        print(f"{options.prompt}{text}")
    print(f"{len(outputs)} requests, {len(texts)} different texts")
    for rank, decisions in enumerate(llm.collective_rpc("overlap_decisions")):
        print(f"rank {rank}: {decisions}")
