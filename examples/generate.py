"""Completes prompts: `vnpu run -- python examples/generate.py [CHECKPOINT [PROMPT ...]]`.

On a machine with an NPU, leave out `vnpu run --`.
"""

import sys

import torch
import torch_npu
import vllm

PROMPTS = ["def ", "import ", "class ", "    for name in ", "if __name__ == "]


def main(checkpoint: str = "checkpoints/tiny_llama", *prompts: str) -> None:
    llm = vllm.LLM(model=checkpoint, dtype="bfloat16", seed=0)
    sampling = vllm.SamplingParams(temperature=0.0, max_tokens=48)
    outputs = llm.generate(list(prompts) or PROMPTS, sampling)

    print(
        f"\nvLLM {vllm.__version__}, torch {torch.__version__}, torch_npu {torch_npu.__version__}"
    )
    print(f"device npu: {torch_npu.npu.get_device_name(0)}, checkpoint {checkpoint}")
    for output in outputs:
        print(f"\n--- {output.prompt!r}\n{output.prompt}{output.outputs[0].text}")


if __name__ == "__main__":
    main(*sys.argv[1:])
