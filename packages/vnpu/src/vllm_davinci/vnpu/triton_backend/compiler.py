"""Lowers kernels for virtual NPUs, by Triton's own passes and `program`."""

import hashlib
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from triton.backends.compiler import BaseBackend, GPUTarget

from vllm_davinci.vnpu.triton_backend import chip_limits
from vllm_davinci.vnpu.triton_backend.driver import ARCHITECTURE, NAME

# Options of a launch that Triton reads. A kernel may request any of these precisions of tl.dot; all
# are computed in float32.
DEFAULTS: dict[str, Any] = {
    "num_warps": 4,
    "num_ctas": 1,
    "num_stages": 2,
    "warp_size": 1,
    "enable_fp_fusion": False,
    "launch_cooperative_grid": False,
    "debug": False,
    "sanitize_overflow": False,
    "backend_name": NAME,
    "arch": ARCHITECTURE,
    "extern_libs": (),
    "supported_fp8_dtypes": ("fp8e4nv", "fp8e5"),
    "deprecated_fp8_dot_operand_dtypes": (),
    "default_dot_input_precision": "ieee",
    "allowed_dot_input_precisions": ("ieee", "tf32", "tf32x3", "bf16x3", "bf16x6"),
    "max_num_imprecise_acc_default": 0,
}


@cache
def version() -> str:
    """Hash of the files that lower kernels: Triton's cache of lowered kernels depends on it."""
    folder = Path(__file__).parent
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


class Options(SimpleNamespace):
    """Options of a launch: the defaults, and any that this Triton release adds."""

    def hash(self) -> str:
        return hashlib.sha256(repr(sorted(vars(self).items())).encode()).hexdigest()


class VirtualBackend(BaseBackend):  # type: ignore[misc]
    """Stages: Triton's passes on TTIR, then instructions for vnpu."""

    binary_ext = "vnpu"

    @staticmethod
    def supports_target(target: GPUTarget) -> bool:
        return bool(target.backend == NAME and target.arch == ARCHITECTURE)

    def hash(self) -> str:
        return f"{ARCHITECTURE}-{version()}-{chip_limits.mode()}"

    def parse_options(self, options: dict[str, Any]) -> Options:
        return Options(**{**DEFAULTS, **options})

    def pack_metadata(self, metadata: Any) -> tuple[Any, ...]:
        return ()

    def get_codegen_implementation(self, options: Options) -> dict[str, Any]:
        return {"min_dot_size": lambda lhs, rhs: (1, 1, 1)}

    def load_dialects(self, context: Any) -> None:
        """Loads nothing: this backend has no dialects."""

    def get_module_map(self) -> dict[str, ModuleType]:
        from triton.language.extra.cuda import libdevice  # functions by name; lowering knows them

        return {"triton.language.extra.libdevice": libdevice}

    def add_stages(self, stages: dict[str, Any], options: Options, language: Any = None) -> None:
        stages["ttir"] = simplify
        stages["vnpu"] = lower


def simplify(module: Any, metadata: dict[str, Any]) -> Any:
    """Runs the passes of Triton that need no GPU. They change no floating-point operation."""
    from triton._C.libtriton import ir, passes

    manager = ir.pass_manager(module.context)
    manager.enable_debug()
    passes.common.add_inliner(manager)
    if hasattr(passes.ttir, "add_rewrite_tensor_pointer"):  # before Triton 3.8
        passes.ttir.add_rewrite_tensor_pointer(manager)
    passes.ttir.add_rewrite_tensor_descriptor_to_pointer(manager)
    passes.common.add_canonicalizer(manager)
    passes.ttir.add_reorder_broadcast(manager)
    passes.common.add_cse(manager)
    passes.common.add_symbol_dce(manager)
    manager.run(module, "make_ttir")
    return module


def lower(module: Any, metadata: dict[str, Any]) -> bytes:
    """Instructions of the kernel. Raises NotImplementedError naming kernel, line and operation."""
    from vllm_davinci.vnpu.triton_backend.program import write_program
    from vllm_davinci.vnpu.triton_backend.ttir import parse

    text = module.str() if hasattr(module, "str") else str(module)
    parsed = parse(text)
    chip_limits.check_kernel(parsed, text)
    metadata["name"] = parsed.kernel.name
    metadata["shared"] = 0
    return write_program(parsed)
