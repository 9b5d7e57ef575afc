"""An export by ModelSlim's earlier library: `older_export.py MODEL DIRECTORY TEXT.jsonl KIND`.

KIND w8a8 is the format before 1.0.0: files named after the type, separate scales of weights and
products, and for each norm a copy `norm.module` with outliers moved into it. w4a16 and
w4a16-groups, which only this library writes, are in format 1.0.0, with a scale per channel or per
group. Runs in ModelSlim's environment.
"""

import json
import shutil
import sys
from pathlib import Path

import torch
import transformers
from msmodelslim.pytorch.llm_ptq.anti_outlier import AntiOutlier, AntiOutlierConfig
from msmodelslim.pytorch.llm_ptq.llm_ptq_tools import Calibrator, QuantConfig

NUM_TEXTS, NUM_TOKENS = 4, 256
GROUP_SIZE = 64


def main(source: str, destination: str, texts: str, kind: str) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        source, torch_dtype=torch.float32, attn_implementation="eager"
    ).eval()
    lines = Path(texts).read_text(encoding="utf-8").splitlines()[:NUM_TEXTS]
    data = []
    for line in lines:
        text = json.loads(line)["inputs_pretokenized"]
        ids = torch.tensor([tokenizer(text)["input_ids"][:NUM_TOKENS]])
        data.append([ids, torch.ones_like(ids)])
    common = {"disable_names": ["lm_head"], "dev_type": "cpu", "mm_tensor": False}
    if kind == "w8a8":
        AntiOutlier(
            model, calib_data=data, cfg=AntiOutlierConfig(anti_method="m2", dev_type="cpu")
        ).process()
        config = QuantConfig(w_bit=8, a_bit=8, act_method=1, **common)
    else:
        groups = {"is_lowbit": True, "open_outlier": False, "group_size": GROUP_SIZE}
        config = QuantConfig(
            w_bit=4, a_bit=16, w_sym=kind == "w4a16", **common,
            **(groups if kind == "w4a16-groups" else {}),
        )  # fmt: skip
    calibrator = Calibrator(model, config, calib_data=data, disable_level="L0")
    calibrator.run()
    calibrator.save(destination, save_type=["safe_tensor" if kind == "w8a8" else "ascendV1"])
    for path in Path(source).glob("*.json"):
        if not path.name.endswith(".index.json"):
            shutil.copy(path, destination)


if __name__ == "__main__":
    main(*sys.argv[1:])
