"""Models that would give wrong tokens are refused by name."""

import pytest
from vllm.config import DeviceConfig, ModelConfig, VllmConfig

from vllm_davinci.core import out_of_tree
from vllm_davinci.core.config.options import DavinciConfig
from vllm_davinci.core.errors import UnsupportedFeatureError
from vllm_davinci.core.features.feature import Engine
from vllm_davinci.core.features.registry import settle
from vllm_davinci_testing.engines.family_zoo import small_config
from vllm_davinci_testing.engines.model_zoo import write_tokenizer


@pytest.mark.parametrize(
    ("family", "architecture", "told"),
    [
        # vLLM inspects each architecture's definition once, in a separate process.
        pytest.param(
            *("hy_v4", "HYV4ForCausalLM", r"a definition for NPUs \(vLLM's needs kernels of CUDA"),
            marks=pytest.mark.thorough,
        ),
        ("inkling_text", "InklingForCausalLM", "a definition for NPUs"),
        ("qwen3", "Qwen3ForCausalLM", None),
    ],
)
def test_an_unsupported_model_is_refused_with_its_requirement(family, architecture, told, tmp_path):
    config = small_config(family)
    config.architectures = [architecture]
    config.save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    out_of_tree.register()  # vLLM does this before it inspects a model
    model = ModelConfig(model=str(tmp_path))
    vllm_config = VllmConfig(device_config=DeviceConfig(device="npu"))
    vllm_config.model_config = model
    engine = Engine(vllm_config, DavinciConfig())
    if told is None:
        settle(engine)
        return
    with pytest.raises(UnsupportedFeatureError, match=f"^{architecture} of .* needs {told}"):
        settle(engine)
