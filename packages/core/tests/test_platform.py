"""The platform's answers, settings and refusals."""

import os
import re
import subprocess
import sys
from operator import attrgetter

import pytest
import torch
from vllm.config import CompilationMode, CUDAGraphMode, DeviceConfig, ParallelConfig, VllmConfig
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.selector import AttentionSelectorConfig

from vllm_davinci.core import platform as platform_module
from vllm_davinci.core.errors import ConfigurationError, DeviceError, UnsupportedFeatureError
from vllm_davinci.core.platform import NPUPlatform
from vllm_davinci_testing.processes.forked import run_alone
from vllm_davinci_testing.processes.programs import run_program


def selector(**changes: object) -> AttentionSelectorConfig:
    values = {"head_size": 64, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": 16}
    return AttentionSelectorConfig(**{**values, **changes})


def configured(**changes: object) -> VllmConfig:
    return VllmConfig(device_config=DeviceConfig(device="npu"), **changes)


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", os.environ.copy())


def test_vllm_runs_on_this_platform():
    assert isinstance(current_platform, NPUPlatform)
    assert current_platform.device_type == "npu"


@pytest.mark.nightly("planning")
def test_importing_the_platform_starts_no_device():
    program = (
        "import torch, torch_npu, vllm_davinci.core.platform;assert not torch.npu.is_initialized()"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_device_questions_are_answered():
    assert NPUPlatform.device_count() == torch.npu.device_count()
    assert NPUPlatform.get_device_name() == torch.npu.get_device_name(0)
    assert NPUPlatform.num_compute_units() > 0
    assert NPUPlatform.get_device_capability() is None


def test_memory_of_a_device_in_use_is_measured(device: torch.device):
    measured = torch.npu.mem_get_info(device)[1]
    assert NPUPlatform.get_device_total_memory() == measured


def test_memory_of_a_device_not_in_use_comes_from_the_table():
    program = (
        "import torch, torch_npu\n"
        "from vllm_davinci.core.device.soc import soc_of\n"
        "from vllm_davinci.core.platform import NPUPlatform as platform\n"
        "in_table = soc_of(platform.get_device_name()).memory_bytes\n"
        "assert platform.get_device_total_memory() == in_table, in_table\n"
        "assert not torch.npu.is_initialized()\n"
        "torch.empty(1, device='npu')\n"
        "print(platform.get_device_total_memory() - in_table)"
    )
    # A chip with more memory than the 32 GiB in its row.
    done = run_alone(program, VNPU_SOC="Ascend910B4", VNPU_MEMORY="40GiB")
    assert done.status == 0, done.output
    if "VNPU_ACTIVE" in os.environ:
        assert int(done.stdout.split()[-1]) == 8 << 30


def test_a_configuration_is_set_for_the_npu():
    config = configured()
    assert config.parallel_config.worker_cls == "vllm_davinci.core.worker.NPUWorker"
    assert config.compilation_config.mode == CompilationMode.NONE
    assert config.compilation_config.cudagraph_mode == CUDAGraphMode.NONE
    assert config.compilation_config.cudagraph_capture_sizes == []
    assert os.environ["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"


def test_checking_twice_gives_the_same_configuration():
    config = configured()
    before = repr(config)
    NPUPlatform.check_and_update_config(config)
    assert repr(config) == before


@pytest.mark.parametrize("block_size", [16, 100, 192])
def test_a_block_size_the_operator_lacks_becomes_128(block_size: int):
    config = configured()
    config.cache_config.block_size = block_size
    config.cache_config.user_specified_block_size = True
    NPUPlatform.check_and_update_config(config)
    assert config.cache_config.block_size == 128


def test_a_multiple_of_the_block_size_is_unchanged():
    config = configured()
    config.cache_config.block_size = 256
    config.cache_config.user_specified_block_size = True
    NPUPlatform.check_and_update_config(config)
    assert config.cache_config.block_size == 256


@pytest.mark.parametrize(
    ("holder", "name", "value", "named"),
    [
        ("parallel_config", "enable_eplb", True, "--enable-eplb"),
        ("parallel_config", "enable_fault_tolerance", True, "--enable-fault-tolerance.*HCCL"),
        ("parallel_config", "prefill_context_parallel_size", 2, "--prefill-context-parallel-size"),
        ("offload_config.uva", "cpu_offload_gb", 1.0, "--cpu-offload-gb"),
        ("offload_config.prefetch", "offload_group_size", 2, "--offload-group-size"),
        (
            "aux_output_config",
            "enable_return_routed_experts",
            True,
            "--enable-return-routed-experts",
        ),
        ("profiler_config", "profiler", "cuda", "--profiler-config .*the profiler cuda"),
        ("profiler_config", "torch_profiler_activities", ["CPU", "CUDA"], "the activity CUDA"),
        ("cache_config", "cache_dtype", "fp8", "--kv-cache-dtype fp8 .*Use --kv-cache-dtype auto"),
        ("cache_config", "cache_dtype", "float16", "--kv-cache-dtype float16 .*not supported"),
    ],
)
def test_options_of_vllm_that_are_not_served_are_refused_by_flag(holder, name, value, named):
    config = configured()
    setattr(attrgetter(holder)(config), name, value)
    with pytest.raises(ConfigurationError, match=named):
        NPUPlatform.check_and_update_config(config)


def test_an_unknown_environment_variable_is_reported_or_ends_the_start(monkeypatch):
    told: list[str] = []
    monkeypatch.setattr(platform_module.logger, "warning", told.append)
    monkeypatch.setenv("VLLM_ASCEND_ENABLE_DBO", "1")
    NPUPlatform.validate_environ(hard_fail=True)
    monkeypatch.setenv("VLLM_LOGING_LEVEL", "INFO")
    NPUPlatform.validate_environ(hard_fail=False)
    message = "Unknown environment variable VLLM_LOGING_LEVEL. Did you mean VLLM_LOGGING_LEVEL?"
    assert told == [message]
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        NPUPlatform.validate_environ(hard_fail=True)


def test_an_invalid_hccl_buffer_size_ends_configuration(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HCCL_BUFFSIZE", "abc")
    with pytest.raises(ValueError, match="HCCL_BUFFSIZE='abc' is not valid"):
        configured()


def test_an_unknown_option_ends_configuration():
    with pytest.raises(ValueError, match="Did you mean 'dbo'"):
        configured(additional_config={"dboo": {}})


def test_more_ranks_than_devices_is_an_error_that_counts_them(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr(platform_module.NPUPlatform, "device_count", classmethod(lambda cls: 2))
    config = configured()
    config.parallel_config = ParallelConfig(
        tensor_parallel_size=4, distributed_executor_backend="mp"
    )
    with pytest.raises(DeviceError) as caught:
        NPUPlatform.check_and_update_config(config)
    message = str(caught.value)
    assert "4 NPUs are needed" in message
    assert "2 are visible" in message
    assert "ASCEND_RT_VISIBLE_DEVICES is 0,1" in message
    assert "--tensor-parallel-size" in message


def test_attention_has_one_backend_and_mla_another():
    attention = "vllm_davinci.core.attention"
    mla = selector(use_mla=True, head_size=576)
    assert (
        NPUPlatform.get_attn_backend_cls(None, selector())
        == f"{attention}.backend.NPUAttentionBackend"
    )
    assert NPUPlatform.get_attn_backend_cls(None, mla) == f"{attention}.mla.backend.NPUMLABackend"


def test_a_backend_for_another_device_is_refused():
    with pytest.raises(ConfigurationError, match="--attention-backend FLASH_ATTN"):
        NPUPlatform.get_attn_backend_cls(AttentionBackendEnum.FLASH_ATTN, selector())


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"use_mla": True, "head_size": 320}, "head_size not supported"),
        ({"use_mla": True, "head_size": 576, "kv_cache_dtype": "fp8"}, "kv_cache_dtype not"),
        ({"use_mla": True, "head_size": 576, "has_sink": True}, "attention sinks not supported"),
        ({"use_sparse": True}, "sparse not supported"),
        ({"use_mla": True, "head_size": 576, "use_mm_prefix": True}, "token full attention not"),
        ({"attn_type": "encoder"}, "attention type encoder not supported"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype not supported"),
        ({"dtype": torch.float64}, "dtype not supported"),
    ],
)
def test_attention_that_cannot_run_is_refused_with_the_reason(changes, reason: str):
    with pytest.raises(UnsupportedFeatureError, match=reason):
        NPUPlatform.get_attn_backend_cls(None, selector(**changes))


def test_quantization_is_refused_by_name():
    with pytest.raises(UnsupportedFeatureError, match="'awq'"):
        NPUPlatform.verify_quantization("awq")


def test_an_unsupported_dtype_is_refused_with_the_chips_dtypes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(platform_module, "_device_name", lambda device_id: "Ascend310P3")
    with pytest.raises(DeviceError, match=r"Ascend310P3 .* bfloat16.*float16, float32"):
        NPUPlatform.check_if_supports_dtype(torch.bfloat16)
    assert NPUPlatform().supported_dtypes[0] == torch.float16


def test_the_configuration_is_logged_through_vllms_logger():
    program = """
        from vllm.config import DeviceConfig, VllmConfig
        from vllm.config.logging import LoggingConfig
        from vllm.logger import configure_logging
        configure_logging(LoggingConfig())
        VllmConfig(
            device_config=DeviceConfig(device="npu"),
            additional_config={"sequence_parallel": {"min_tokens": 7}},
        )
    """
    done = run_alone(program)
    assert done.status == 0, done.output
    told = "Effective vllm-davinci configuration: {'sequence_parallel.min_tokens': 7}"
    assert told in done.output


def test_steps_of_experts_are_not_divided_by_vllm(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(platform_module.NPUPlatform, "device_count", classmethod(lambda cls: 4))
    config = configured()
    config.parallel_config = ParallelConfig(
        tensor_parallel_size=2,
        data_parallel_size=2,
        data_parallel_size_local=2,
        enable_expert_parallel=True,
        distributed_executor_backend="mp",
    )
    assert config.parallel_config.use_sequence_parallel_moe
    NPUPlatform.check_and_update_config(config)
    assert not config.parallel_config.use_sequence_parallel_moe


@pytest.mark.nightly("planning")
def test_the_v2_model_runner_is_chosen_and_v1_refused():
    program = """
        from vllm.config import DeviceConfig, VllmConfig
        config = VllmConfig(device_config=DeviceConfig(device="npu"))
        print("chosen:", config.use_v2_model_runner)
        """
    done = run_program(program)
    assert "chosen: True" in done.stdout, done.stdout[-3000:] + done.stderr[-3000:]
    done = run_program(program, VLLM_USE_V2_MODEL_RUNNER="0")
    assert done.returncode != 0
    assert "VLLM_USE_V2_MODEL_RUNNER=0 (vLLM's V1 model runner) is not supported" in done.stderr
    assert "Unset VLLM_USE_V2_MODEL_RUNNER" in done.stderr
