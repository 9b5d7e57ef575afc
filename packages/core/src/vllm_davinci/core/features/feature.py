"""The shape of a feature: how it is requested, who serves it, what it excludes and sets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Flag
from typing import TYPE_CHECKING, Any

from vllm_davinci.core.config.options import DavinciConfig
from vllm_davinci.core.config.setting import Setting, Source, shown

if TYPE_CHECKING:
    from vllm.config import ParallelConfig, VllmConfig


class Runner(Flag):
    """vLLM's model runners; NONE: this release does not serve the feature."""

    NONE = 0
    V1 = 1
    V2 = 2
    BOTH = V1 | V2


# As shown in rows.
V1, V2, BOTH = Runner.V1, Runner.V2, Runner.BOTH


@dataclass(frozen=True)
class Engine:
    """One engine's configuration, which features read and settle.

    vllm:     vLLM's
    config:   the resolved options of `additional_config`
    changes:  settings of vLLM that features have changed, with reasons
    warnings: messages for the user
    """

    vllm: VllmConfig
    config: DavinciConfig
    changes: list[Setting] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def model(self) -> Any:
        """vLLM's ModelConfig, or None."""
        return self.vllm.model_config

    @property
    def parallel(self) -> ParallelConfig:
        return self.vllm.parallel_config

    def set(self, holder: Any, name: str, value: Any, reason: str) -> None:
        """Sets a value of vLLM's configuration; records the change if the value differs."""
        old = getattr(holder, name)
        if old != value:
            setattr(holder, name, value)
            replaced = f"instead of {shown(old)}: {reason}"
            self.changes.append(Setting(name, value, Source.RELEASE, replaced))


@dataclass(frozen=True)
class Feature:
    """One feature, or one value of a flag.

    flag:     the flag or option that requests it; empty if the model does
    title:    a noun, for pages and errors
    is_asked: whether an engine uses it
    runners:  vLLM's model runners that serve it here
    because:  the reason why no runner serves it; a clause
    instead:  what to do if no runner serves it
    as_given: the flag with its value, if errors should show it
    excludes: flag, or title, of each incompatible feature -> why: a clause, or ""
    settle:   sets what it needs in vLLM's configuration. Idempotent. Raises ConfigurationError for
              values that contradict each other.
    after:    flags, or titles, of features that settle before it
    """

    flag: str
    title: str
    is_asked: Callable[[Engine], bool]
    runners: Runner
    because: str | Callable[[Engine], str] = ""
    instead: str = "Remove it."
    as_given: Callable[[Engine], str] | None = None
    excludes: Mapping[str, str] = field(default_factory=dict)
    settle: Callable[[Engine], None] | None = None
    after: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """The flag, or the title if the model requests the feature."""
        return self.flag or self.title


def refused(
    flag: str,
    title: str,
    is_asked: Callable[[Engine], bool],
    because: str | Callable[[Engine], str] = "",
    instead: str = "Remove it.",
    as_given: Callable[[Engine], str] | None = None,
) -> Feature:
    """A feature that no runner serves: a flag, one of its values, or a need of models (no flag)."""
    return Feature(flag, title, is_asked, Runner.NONE, because, instead, as_given)


def model_has(name: str) -> Callable[[Engine], bool]:
    """A predicate: True if vLLM's ModelConfig has a true value of that name."""
    return lambda engine: bool(getattr(engine.model, name, False))


def is_always(engine: Engine) -> bool:
    """Always True, for what every engine settles."""
    return True
