"""The shape of a feature: how a user asks for it, who serves it, what it excludes and settles."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Flag
from typing import TYPE_CHECKING

from vllm_davinci.core.config.options import DavinciConfig

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig


class Runner(Flag):
    """vLLM's model runners."""

    V1 = 1
    V2 = 2
    BOTH = V1 | V2


@dataclass(frozen=True)
class Engine:
    """One engine's configuration, as features read and settle it.

    vllm:   vLLM's
    config: the resolved options of `additional_config`
    """

    vllm: VllmConfig
    config: DavinciConfig

    @property
    def model(self) -> ModelConfig | None:
        return self.vllm.model_config


@dataclass(frozen=True)
class Feature:
    """One feature.

    name:     other features name it so
    title:    a noun, for pages and errors
    flag:     the flag or option that asks for it; empty where the model brings it
    is_asked: whether an engine has it
    runners:  vLLM's model runners that serve it here
    """

    name: str
    title: str
    flag: str
    is_asked: Callable[[Engine], bool]
    runners: Runner

    @property
    def asked_by(self) -> str:
        """The flag, or the title without one, as an error begins."""
        return self.flag or self.title
