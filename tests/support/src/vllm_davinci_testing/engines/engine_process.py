"""A vLLM engine in its own process, forked from one that has already imported vLLM."""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import torch

from vllm_davinci.vnpu import _C
from vllm_davinci.vnpu.environment_variables import VNPU_SOC
from vllm_davinci_testing.plugin import EXACT_SOC
from vllm_davinci_testing.processes.fork_server import fork_context
from vllm_davinci_testing.processes.waiting import becomes_true

STRICT_SOC = "Ascend910B3"
# Replaces the chip for some engines of every run, so that its refusals show.
ON_910C = {VNPU_SOC: "Ascend910_9391"}
# Limit of an engine's start, or one call, on a busy machine.
LIMIT_S = 240
# Limit of its end, in all cases.
END_LIMIT_S = 60

# All sizes are small: tests need few tokens, and reserved memory is zeroed.
DEFAULTS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 256,
    "max_num_seqs": 64,
    "max_num_batched_tokens": 2048,
    "kv_cache_memory_bytes": 96 << 20,
    "enforce_eager": True,
    "seed": 0,
}


WEIGHT_SYNC = (
    "init_weight_transfer_engine",
    "start_weight_update",
    "update_weights",
    "finish_weight_update",
)


class EngineError(Exception):
    """An error in an engine's process, with the traceback from there."""


class EngineProcess:
    """`vllm.LLM` in another process, which gets the calls and returns vLLM's own outputs.

    log:         file for the process's output
    environment: variables of that process; without VNPU_SOC, a strict chip in 16 bits
    engine:      arguments of vllm.LLM in addition to DEFAULTS
    """

    def __init__(
        self, model: Path, log: Path, environment: Mapping[str, str] | None = None, **engine: Any
    ) -> None:
        engine = {"model": str(model), **DEFAULTS, **engine}
        context = fork_context()
        self._connection, other = context.Pipe()
        self._log = log
        self._process = context.Process(
            target=_serve,
            args=(
                other,
                str(log),
                {**ENVIRONMENT, **chip_for(engine["dtype"]), **(environment or {})},
                engine,
            ),
        )
        self._process.start()
        other.close()
        try:
            self._receive("the start of the engine")
        except EngineError:
            self.close()  # an engine that fails to start ends itself
            raise
        except BaseException:
            self._process.kill()
            raise

    def generate(self, *args: Any, **kwargs: Any) -> list[Any]:
        return self._call("generate", args, kwargs)

    def embed(self, *args: Any, **kwargs: Any) -> list[Any]:
        return self._call("embed", args, kwargs)

    def classify(self, *args: Any, **kwargs: Any) -> list[Any]:
        return self._call("classify", args, kwargs)

    def encode(self, *args: Any, **kwargs: Any) -> list[Any]:
        return self._call("encode", args, kwargs)

    def metrics(self) -> dict[str, float]:
        """Returns the engine's counters and gauges by name."""
        metrics = self._call("get_metrics", (), {})
        return {metric.name: metric.value for metric in metrics if hasattr(metric, "value")}

    def metric_vectors(self) -> dict[str, list[int]]:
        """Returns the engine's counters with a value per position, by name."""
        metrics = self._call("get_metrics", (), {})
        return {metric.name: metric.values for metric in metrics if hasattr(metric, "values")}

    def abort_all(self) -> None:
        """Removes requests that a failed call left in the engine."""
        self._call("abort_all", (), {})

    def add_lora(self, adapter: Any) -> bool:
        """Loads an adapter before its requests, as a server does."""
        return self._call("add_lora", (adapter,), {})

    def sleep(self, level: int = 1) -> None:
        self._call("sleep", (), {"level": level})

    def wake_up(self, tags: list[str] | None = None) -> None:
        self._call("wake_up", (), {"tags": tags})

    def weight_sync(self, method: str, *args: Any) -> None:
        """Calls one of vLLM's methods for weights sent by a trainer."""
        assert method in WEIGHT_SYNC
        self._call(method, args, {})

    def on_workers(self, method: str, *args: Any) -> list[Any]:
        """Calls a method of every worker; returns the results by rank."""
        return self._call("collective_rpc", (method,), {"args": args})

    def scheduler_settings(self) -> dict[str, Any]:
        """Returns vLLM's effective scheduler configuration, and the number of steps in flight."""
        return self._call("scheduler_settings", (), {})

    def schedule(self) -> str:
        """Returns the execution policy of the virtual device."""
        return self._call("schedule", (), {})

    def log_text(self) -> str:
        return self._log.read_text(errors="replace")

    def processes(self) -> list[psutil.Process]:
        """Returns the engine's process and its workers."""
        engine = psutil.Process(self._process.pid)
        return [engine, *engine.children(recursive=True)]

    def close(self) -> None:
        self._connection.close()
        if not becomes_true(lambda: not self._process.is_alive(), END_LIMIT_S):
            self._print_stacks()
            self._process.kill()
            raise TimeoutError(f"The engine did not end within {END_LIMIT_S} s.\n{self._tail()}")

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._connection.send((method, args, kwargs))
        return self._receive(method)

    def _receive(self, what: str) -> Any:
        if not self._connection.poll(LIMIT_S):
            self._print_stacks()
            self._process.kill()
            raise TimeoutError(f"Waited {LIMIT_S} s for {what}.\n{self._tail()}")
        try:
            succeeded, value = self._connection.recv()
        except EOFError:
            self._process.join(10)
            raise EngineError(
                f"The process ended during {what}, status {self._process.exitcode}.\n{self._tail()}"
            ) from None
        if not succeeded:
            raise EngineError(value)
        return value

    def _print_stacks(self) -> None:
        """Lets the process log its threads' stacks."""
        if self._process.pid is not None:
            os.kill(self._process.pid, signal.SIGUSR1)
            time.sleep(1)

    def _tail(self) -> str:
        return self.log_text()[-4000:]


# Workers are forked from a process that has not used the device, so that they need not import
# everything again. Tests of servers and programs use spawn, vLLM's default.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_WORKER_MULTIPROC_METHOD": "fork",
    "HF_HUB_OFFLINE": "1",
}


def chip_for(dtype: str) -> dict[str, str]:
    """Selects a strict chip for 16 bits, because chips have no float32 attention.

    The run names it, as in VNPU_SOC=reference:Ascend910_9391, also if the whole run is strict.
    """
    exact, _, chip = os.environ.get(VNPU_SOC, "").partition(":")
    return {VNPU_SOC: chip or STRICT_SOC} if exact == EXACT_SOC and dtype != "float32" else {}


def end(llm: Any) -> None:
    """Ends an engine, its other processes, and this one, without freeing its memory.

    vLLM's complete shutdown visits every object of the process several times, which takes a second.
    """
    parallel = llm.llm_engine.vllm_config.parallel_config
    client = llm.llm_engine.engine_core
    if os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "1" or parallel.data_parallel_size > 1:
        client.shutdown()
    elif parallel.world_size > 1:
        client.engine_core.model_executor.shutdown()
    sys.stdout.flush()
    os._exit(0)


def _serve(
    connection: Connection, log: str, environment: dict[str, str], engine: dict[str, Any]
) -> None:
    os.environ.update(environment)
    torch.set_num_threads(1)  # several processes share two cores, and the matrices are small
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    faulthandler.register(signal.SIGUSR1, file=file)
    from vllm import LLM  # the process that was forked already has it

    try:
        llm = LLM(**engine)
    except BaseException:
        connection.send((False, traceback.format_exc()))
        raise
    connection.send((True, None))
    while True:
        try:
            method, args, kwargs = connection.recv()
        except EOFError:
            end(llm)
        try:
            if method == "scheduler_settings":
                config = llm.llm_engine.vllm_config
                settings = vars(config.scheduler_config).items()
                value = {name: value for name, value in settings if name[0] != "_"}
                value["max_concurrent_batches"] = config.max_concurrent_batches
            elif method == "schedule":
                value = _C.schedule()
            elif method == "get_metrics":
                value = llm.get_metrics()
            elif method == "abort_all":
                left = list(llm.llm_engine.output_processor.request_states)
                value = llm.llm_engine.abort_request(left, internal=True)
            elif method == "add_lora":
                value = llm.llm_engine.add_lora(*args)
            elif method in ("sleep", "wake_up", *WEIGHT_SYNC):
                value = getattr(llm, method)(*args, **kwargs)
            elif method == "collective_rpc":
                value = llm.collective_rpc(*args, **kwargs)
            else:
                value = getattr(llm, method)(*args, **{"use_tqdm": False, **kwargs})
            answer = (True, value)
        except Exception:
            answer = (False, traceback.format_exc())
        if not answer[0]:
            # vLLM's future and its exception reference each other, and through frames the workers'
            # queues. At exit, zmq's context and its open sockets would form a garbage cycle, in
            # which the context's finalizer waits for the sockets forever.
            gc.collect()
        connection.send(answer)
