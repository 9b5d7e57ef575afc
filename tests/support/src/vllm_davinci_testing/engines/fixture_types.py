"""Types of the fixtures that tests of engines take."""

from collections.abc import Callable
from pathlib import Path

from vllm_davinci_testing.engines.engine_process import EngineProcess
from vllm_davinci_testing.engines.transformers_reference import TransformersReference

Zoo = Callable[[str], Path]  # directory of a small model, by its name
Reference = Callable[[str], TransformersReference]
StartEngine = Callable[..., EngineProcess]
Prompts = list[list[int]]
