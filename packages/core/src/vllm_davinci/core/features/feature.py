"""A feature: how it is requested, what it excludes and sets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm_davinci.core.config.options import DavinciConfig
from vllm_davinci.core.config.setting import Setting, Source, shown

if TYPE_CHECKING:
    from vllm.config import ParallelConfig, VllmConfig


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
    is_asked: True if an engine uses the feature
    because:  why the feature is not supported; a clause
    instead:  what the user should do if it is not supported
    as_given: the flag with its value, if errors should show it
    excludes: flag, or title, of each incompatible feature -> why: a clause, or ""
    settle:   sets what the feature needs in vLLM's configuration. Idempotent. Raises
              ConfigurationError for values that contradict each other.
    after:    flags, or titles, of features that settle before this one
    is_served: False if this release refuses the feature
    """

    flag: str
    title: str
    is_asked: Callable[[Engine], bool]
    because: str | Callable[[Engine], str] = ""
    instead: str = "Remove it."
    as_given: Callable[[Engine], str] | None = None
    excludes: Mapping[str, str] = field(default_factory=dict)
    settle: Callable[[Engine], None] | None = None
    after: tuple[str, ...] = ()
    is_served: bool = True

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
    """A feature that this release refuses: a flag, a value of one, or a need of models (no
    flag)."""
    return Feature(flag, title, is_asked, because, instead, as_given, is_served=False)


def model_has(name: str) -> Callable[[Engine], bool]:
    """A predicate: True if vLLM's ModelConfig has a true value of that name."""
    return lambda engine: bool(getattr(engine.model, name, False))


def is_always(engine: Engine) -> bool:
    """Always True: for features of every engine."""
    return True
