"""Completes prompts: `vnpu run -- python examples/generate.py [CHECKPOINT [PROMPT ...]]`.

`-tp 2` divides the model between two devices; `-tp 1 2` runs both. On a machine with an NPU, leave
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
    parser.add_argument("-tp", "--tensor-parallel-size", type=int, nargs="+", default=[1])
    args = parser.parse_args()
    print(f"vLLM {vllm.__version__}, torch {torch.__version__}, torch_npu {torch_npu.__version__}")
    for devices in args.tensor_parallel_size:
        llm = vllm.LLM(
            model=args.checkpoint, dtype="bfloat16", seed=0, tensor_parallel_size=devices
        )
        sampling = vllm.SamplingParams(temperature=0.0, max_tokens=48)
        outputs = llm.generate(args.prompts, sampling)
        print(f"\n{args.checkpoint} on {devices} x npu", flush=True)
        for output in outputs:
            print(f"\n--- {output.prompt!r}\n{output.prompt}{output.outputs[0].text}", flush=True)
        del llm  # ends the engine's processes and frees the devices


if __name__ == "__main__":
    main()
