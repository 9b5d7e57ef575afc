"""Completes prompts: `vnpu run -- python examples/generate.py [CHECKPOINT [PROMPT ...]]`.

`--tensor-parallel-size 2` divides the model between two devices. On a machine with an NPU, leave
out `vnpu run --`.
"""

import argparse

import torch
import torch_npu
import vllm

PROMPTS = ["def ", "import ", "class ", "    for name in ", "if __name__ == "]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", nargs="?", default="checkpoints/tiny_llama")
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", default=PROMPTS)
    parser.add_argument("-tp", "--tensor-parallel-size", type=int, default=1)
    args = parser.parse_args()
    llm = vllm.LLM(
        model=args.checkpoint,
        dtype="bfloat16",
        seed=0,
        tensor_parallel_size=args.tensor_parallel_size,
    )
    sampling = vllm.SamplingParams(temperature=0.0, max_tokens=48)
    outputs = llm.generate(args.prompts, sampling)

    print(
        f"\nvLLM {vllm.__version__}, torch {torch.__version__}, torch_npu {torch_npu.__version__}"
    )
    print(
        f"device npu: {args.tensor_parallel_size} x {torch_npu.npu.get_device_name(0)}, "
        f"checkpoint {args.checkpoint}"
    )
    for output in outputs:
        print(f"\n--- {output.prompt!r}\n{output.prompt}{output.outputs[0].text}")


if __name__ == "__main__":
    main()
