"""A model built by vLLM that loads checkpoints in turn."""

from pathlib import Path
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.utils.torch_utils import set_default_torch_dtype

from vllm_davinci.core.checkpoint.check import check_checkpoint


class LoadedModel:
    """A rank's part of a checkpoint's model on one device, without an engine.

    Its parameters stay as loaded, without preparation for computing. Requires process groups.
    """

    def __init__(
        self, directory: Path, dtype: torch.dtype = torch.bfloat16, device: int = 0, **options: Any
    ) -> None:
        arguments = EngineArgs(str(directory), skip_tokenizer_init=True, dtype=dtype, **options)
        self.config = arguments.create_engine_config()
        with (
            set_current_vllm_config(self.config),
            set_default_torch_dtype(dtype),
            torch.device("npu", device),
        ):
            self.network = initialize_model(self.config)

    def load(self, directory: Path) -> None:
        """Loads another checkpoint with the same shapes."""
        model_config = self.config.model_config
        model_config.model = str(directory)
        loader = get_model_loader(self.config.load_config)
        with set_current_vllm_config(self.config):
            loader.load_weights(self.network, model_config)

    def parameters(self) -> dict[str, torch.Tensor]:
        """Returns all parameters, on the host."""
        return {name: value.detach().cpu() for name, value in self.network.named_parameters()}


def loads_as(checkpoint: Path, meant: Path) -> LoadedModel:
    """Loads a checkpoint and asserts that all parameters equal those of another checkpoint."""
    report = check_checkpoint(checkpoint)
    assert report.can_load, report.problems()
    model, other = LoadedModel(checkpoint), LoadedModel(meant)
    model.load(checkpoint)
    other.load(meant)
    loaded, expected = model.parameters(), other.parameters()
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[each], value) for each, value in expected.items())
    return model
