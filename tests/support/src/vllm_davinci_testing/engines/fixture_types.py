"""Types of fixtures for tests of engines."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from vllm_davinci_testing.engines.engine_process import EngineProcess
from vllm_davinci_testing.engines.transformers_reference import TransformersReference

Zoo = Callable[[str], Path]  # directory of a small model by name
Reference = Callable[[str], TransformersReference]
StartEngine = Callable[..., EngineProcess]
Engines = Callable[..., AbstractContextManager[EngineProcess]]  # compares tokens
Undrafted = Callable[[Path], list[list[int]]]  # a checkpoint's tokens without drafts
Prompts = list[list[int]]
