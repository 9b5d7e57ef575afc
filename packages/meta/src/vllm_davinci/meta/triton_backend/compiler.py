"""Refuses to compile, naming the kernel."""

import re
from pathlib import PurePath
from types import ModuleType, SimpleNamespace
from typing import Any

from triton.backends.compiler import BaseBackend, GPUTarget

from vllm_davinci.meta.triton_backend.driver import ARCHITECTURE, NAME

# Part of a kernel file's path -> the feature that launches its kernels.
OPTIONS = {
    "sample/watermark": "--watermark-config",
    "sample/batch_shard": "--enable-batch-sharded-sampling",
    "sample/trace_replay": "--enable-trace-replay",
    "sample/output": "--return-sampling-mask",
    "sample/thinking_budget": "a request's thinking_token_budget",
    "spec_decode/": "--speculative-config",
    "v1/spec_decode": "--speculative-config",
    "metrics/logits": "VLLM_COMPUTE_NANS_IN_LOGITS",
    "model_states/prompt_embeds": "--enable-prompt-embeds",
    "model_states/recoverssm": "--mamba-cache-mode",
    "mamba_utils": "--mamba-cache-mode align",
    "lora/": "--enable-lora",
}
LOCATION = re.compile(r'loc\("([^"]+)":\d+')


# Fields of a launch that Triton reads before it compiles.
DEFAULTS: dict[str, Any] = {
    "num_warps": 4,
    "num_ctas": 1,
    "num_stages": 2,
    "enable_fp_fusion": False,
    "launch_cooperative_grid": False,
    "debug": False,
    "sanitize_overflow": False,
    "backend_name": NAME,
    "arch": ARCHITECTURE,
    "extern_libs": (),
    "supported_fp8_dtypes": (),
    "deprecated_fp8_dot_operand_dtypes": (),
    "default_dot_input_precision": "ieee",
    "allowed_dot_input_precisions": ("ieee",),
    "max_num_imprecise_acc_default": 0,
}


class Options(SimpleNamespace):
    """Options of a launch: the defaults, and any that this Triton release adds."""

    def hash(self) -> str:
        return NAME


class NPUBackend(BaseBackend):  # type: ignore[misc]
    """Refuses to compile kernels; the error has the kernel's name."""

    binary_ext = "none"

    @staticmethod
    def supports_target(target: GPUTarget) -> bool:
        return bool(target.backend == NAME and target.arch == ARCHITECTURE)

    def hash(self) -> str:
        return NAME

    def parse_options(self, options: dict[str, Any]) -> Options:
        return Options(**{**DEFAULTS, **options})

    def pack_metadata(self, metadata: Any) -> tuple[Any, ...]:
        return ()

    def get_codegen_implementation(self, options: Options) -> dict[str, Any]:
        return {"min_dot_size": lambda lhs, rhs: (1, 1, 1)}

    def load_dialects(self, context: Any) -> None:
        """Loads nothing: this backend has no dialects."""

    def get_module_map(self) -> dict[str, ModuleType]:
        from triton.language.extra import libdevice

        return {"triton.language.extra.libdevice": libdevice}

    def add_stages(self, stages: dict[str, Any], options: Options, language: Any = None) -> None:
        stages["ttir"] = refuse


def refuse(module: Any, metadata: dict[str, Any]) -> None:
    """Raises NotImplementedError that names the kernel, its file and the feature that needs it.

    module: the kernel in Triton's intermediate representation, with source locations
    """
    text = module.str() if hasattr(module, "str") else str(module)
    found = re.search(r"tt\.func public @(\w+)", text)
    name = metadata.get("name") or (found[1] if found else "a kernel")
    place = LOCATION.search(text)
    path = PurePath(place[1]).as_posix() if place else "an unknown file"
    led_there = next(
        (option for part, option in OPTIONS.items() if part in path),
        "an option of the engine, the request or the model",
    )
    raise NotImplementedError(
        f"{led_there}: vLLM launches its Triton kernel {name} of {path}, which has no stand-in on "
        "NPUs. Start without that option, and please report this line."
    )
