"""NPUPlatform: vLLM's interface to the device. Importing it touches no device."""

import os
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, ClassVar

import torch
import vllm.envs as envs
from torch_npu import npu
from vllm.platforms.interface import DeviceCapability, Platform, PlatformEnum

from vllm_davinci.core import components
from vllm_davinci.core.config import environment_variables
from vllm_davinci.core.config.described import is_described
from vllm_davinci.core.config.parsing import get_settings, is_resolved
from vllm_davinci.core.config.time_limits import limit_device_waits
from vllm_davinci.core.device.local_devices import VISIBLE_DEVICES, check_device_count
from vllm_davinci.core.device.ray_devices import check_ray_devices
from vllm_davinci.core.device.soc import Soc, soc_of
from vllm_davinci.core.errors import (
    RELEASE,
    ConfigurationError,
    DeviceError,
    UnsupportedFeatureError,
)
from vllm_davinci.core.features.feature import Engine
from vllm_davinci.core.features.graphs import choose_graph_mode
from vllm_davinci.core.features.model_runner import choose_model_runner
from vllm_davinci.core.features.prefill_first import override_scheduler_fields
from vllm_davinci.core.features.quantization import refuse_quantization
from vllm_davinci.core.features.registry import named, settle
from vllm_davinci.core.features.resolution import log_resolution, resolve
from vllm_davinci.core.log import init_logger
from vllm_davinci.core.process.middleware import add_to_server
from vllm_davinci.core.process.plain_errors import shorten_errors_of_commands
from vllm_davinci.core.process.shutdown import fail_when_engine_dies, take_over_signals

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.distributed_c10d import PrefixStore
    from vllm.config import VllmConfig
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.attention.selector import AttentionSelectorConfig

logger = init_logger(__name__)


class NPUPlatform(Platform):
    """Ascend NPUs, through torch_npu."""

    _enum = PlatformEnum.OOT
    device_name: str = "npu"
    device_type: str = "npu"
    dispatch_key: str = "PrivateUse1"
    ray_device_key: str = "NPU"
    dist_backend: str = "hccl"
    device_control_env_var: str = VISIBLE_DEVICES
    ray_noset_device_env_vars: ClassVar[list[str]] = [
        "RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES"
    ]
    simple_compile_backend: str = "eager"
    has_pinned_memory: ClassVar[bool] = True

    # --- the device ------------------------------------------------------------------------

    @classmethod
    def device_count(cls) -> int:
        return int(npu.device_count())

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        return _device_name(device_id)

    @classmethod
    def get_device_uuid(cls, device_id: int = 0) -> str:
        return f"{_device_name(device_id)}-{cls.device_id_to_physical_device_id(device_id)}"

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        """Bytes of device memory; before the device is in use, from the chip table.

        The front end calls this for default batch sizes and must not occupy a device.
        """
        if not npu.is_initialized():
            return soc_of(_device_name(device_id)).memory_bytes
        return int(npu.get_device_properties(device_id).total_memory)

    @classmethod
    def get_device_capability(cls, device_id: int = 0) -> DeviceCapability | None:
        return None  # a number here would select CUDA code paths

    @classmethod
    def num_compute_units(cls, device_id: int = 0) -> int:
        return soc_of(_device_name(device_id)).cube_cores

    @classmethod
    def set_device(cls, device: torch.device) -> None:
        npu.set_device(device)

    @classmethod
    def manual_seed_all(cls, seed: int) -> None:
        npu.manual_seed_all(seed)

    @classmethod
    def get_current_memory_usage(cls, device: torch.types.Device | None = None) -> float:
        npu.empty_cache()
        npu.reset_peak_memory_stats(device)
        return float(npu.max_memory_allocated(device))

    @classmethod
    def is_pin_memory_available(cls) -> bool:
        return cls.has_pinned_memory

    @property
    def supported_dtypes(self) -> list[torch.dtype]:
        return list(_soc().dtypes)

    @classmethod
    def check_if_supports_dtype(cls, dtype: torch.dtype) -> None:
        soc = _soc()
        if dtype not in soc.dtypes:
            names = ", ".join(str(known).removeprefix("torch.") for known in soc.dtypes)
            raise DeviceError(
                f"--dtype: {_device_name(0)} does not compute in "
                f"{str(dtype).removeprefix('torch.')}. Start with --dtype and one of: {names}."
            )

    def is_sleep_mode_available(self) -> bool:
        return True

    # --- what vLLM may use -----------------------------------------------------------------

    @classmethod
    def import_kernels(cls) -> None:
        """Does nothing: vLLM's own compiled operators are for other devices."""

    @classmethod
    def register_triton_kernel_overrides(cls) -> None:
        from vllm_davinci.core.triton_kernels import registration  # imports vLLM's runner

        if not environment_variables.launches_kernels_of_vllm():
            registration.register()

    @classmethod
    def get_attn_backend_cls(
        cls,
        selected_backend: "AttentionBackendEnum",
        attn_selector_config: "AttentionSelectorConfig",
        num_heads: int | None = None,
    ) -> str:
        from vllm_davinci.core.attention.mla.selection import select_backend  # imports vllm.v1

        return select_backend(selected_backend, attn_selector_config)

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        return "vllm_davinci.core.distributed.communicator.NPUCommunicator"

    @classmethod
    def get_punica_wrapper(cls) -> str:
        return "vllm_davinci.core.lora.punica.NPUPunicaWrapper"

    @classmethod
    def use_custom_op_collectives(cls) -> bool:
        return False

    @classmethod
    def opaque_attention_op(cls) -> bool:
        return False

    @classmethod
    def support_static_graph_mode(cls) -> bool:
        return True

    @classmethod
    def support_hybrid_kv_cache(cls) -> bool:
        return True

    @classmethod
    def get_nixl_supported_devices(cls) -> dict[str, tuple[str, ...]]:
        return {"npu": ("cpu",)}

    @classmethod
    def check_runner_kv_caches_multi_layer(cls) -> None:
        """Accepts several attention layers with one index: caches are bound by name."""

    @classmethod
    def stateless_init_device_torch_dist_pg(
        cls,
        backend: str,
        prefix_store: "PrefixStore",
        group_rank: int,
        group_size: int,
        timeout: timedelta,
    ) -> "ProcessGroup":
        raise UnsupportedFeatureError(
            f"--enable-elastic-ep (elastic expert parallelism) is not supported in {RELEASE}. "
            "Remove it."
        )

    @classmethod
    def log_warnings(cls) -> None:
        """Adds the engine-death log handler again after vLLM has configured logging."""
        fail_when_engine_dies()

    # --- configuration ---------------------------------------------------------------------

    @classmethod
    def validate_environ(cls, hard_fail: bool) -> None:
        """Extends vLLM's check, which does not know the variables of other Ascend plugins.

        hard_fail: raise ConfigurationError instead of a warning for each (vLLM's
                   --fail-on-environ-validation)
        """
        unknown = environment_variables.unknown_variables(envs.environment_variables, os.environ)
        if unknown and hard_fail:
            raise ConfigurationError("\n".join(unknown))
        for told in unknown:
            logger.warning(told)

    @classmethod
    def pre_register_and_update(cls, parser: "FlexibleArgumentParser | None" = None) -> None:
        from vllm_davinci.core.quantization.vllm_methods import register  # imports vLLM's layers

        register()
        if parser is not None:
            add_to_server(parser)
            shorten_errors_of_commands()

    @classmethod
    def verify_quantization(cls, quant: str) -> None:
        refuse_quantization(quant)

    @classmethod
    def apply_config_platform_defaults(cls, vllm_config: "VllmConfig") -> None:
        from vllm.config import CompilationMode  # vLLM imports this module first

        from vllm_davinci.core.quantization.vllm_methods import choose_quantization

        choose_quantization(vllm_config)
        override_scheduler_fields(vllm_config)
        choose_model_runner(os.environ)
        if vllm_config.compilation_config.mode is None:
            vllm_config.compilation_config.mode = CompilationMode.NONE
        choose_graph_mode(vllm_config)

    @classmethod
    def check_and_update_config(cls, vllm_config: "VllmConfig") -> None:
        """Refuses what this release does not support, sets what the NPU needs. Idempotent."""
        take_over_signals(vllm_config.shutdown_timeout)
        # Engine processes get the resolved configuration and have nothing new to log.
        is_new = not is_resolved(vllm_config)
        resolution = resolve(vllm_config, may_make=not is_described())
        engine = Engine(vllm_config, resolution.config)
        environment_variables.hccl_buffer_mib(os.environ)  # read again when groups are made
        environment_variables.launches_kernels_of_vllm(os.environ)  # read again in each process
        settle(engine)
        warnings = [*resolution.warnings, *engine.warnings]
        if not is_described():
            check_device_count(vllm_config.parallel_config, cls.device_count())
            if is_new:
                check_ray_devices(vllm_config.parallel_config)
            if vllm_config.parallel_config.world_size_across_dp > 1:
                warnings += limit_device_waits(os.environ)
        if not is_new:
            return
        get_settings(vllm_config).extend(engine.changes)
        log_resolution(resolution, warnings, engine.changes)
        logger.info_once("Features: %s", ", ".join(each.title for each in named(engine)) or "none")
        components.log_missing()


@cache
def _device_name(device_id: int) -> str:
    return str(npu.get_device_name(device_id))


def _soc() -> Soc:
    return soc_of(_device_name(0))
