"""A prefill engine and a decode engine, and a proxy's requests to both."""

from __future__ import annotations

import json
import signal
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from vllm_davinci_testing.engines.server_process import ForkedServer, answers, processes_of_session
from vllm_davinci_testing.processes.ranks import free_port

REQUEST_LIMIT_S = 120


class Answer(NamedTuple):
    """A greedy continuation, and the logprob of each of its tokens."""

    tokens: list[int]
    logprobs: list[float]


class Pair:
    """Two servers that can be stopped, killed and restarted separately.

    options:     options of both servers
    of_prefills: additional options of the prefill engine
    extra:       both servers' kv_connector_extra_config
    policy:      kv_load_failure_policy
    """

    CONNECTOR = "NixlConnector"

    def __init__(
        self,
        model: Path,
        directory: Path,
        *options: str,
        of_prefills: tuple[str, ...] = (),
        extra: Mapping[str, Any] | None = None,
        policy: str = "recompute",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._model, self._directory, self._options = model, directory, options
        self._of_prefills, self._extra, self._policy = of_prefills, dict(extra or {}), policy
        self._environment = dict(environment or {})
        self._started: list[ForkedServer] = []
        self._side_channels = {"kv_producer": str(free_port()), "kv_consumer": str(free_port())}
        self.prefills = self._start("kv_producer")
        self.decodes = self._start("kv_consumer")

    def wait_until_ready(self) -> Pair:
        self.prefills.wait_until_ready()
        self.decodes.wait_until_ready()
        return self

    def is_ready(self) -> bool:
        return answers(self.prefills.port) and answers(self.decodes.port)

    def restart_prefills(self) -> None:
        """Starts a prefill engine in place of the killed one, with the same addresses and a new
        HTTP port.
        """
        self.prefills = self._start("kv_producer")
        self.prefills.wait_until_ready()

    def restart_decodes(self) -> None:
        self.decodes = self._start("kv_consumer")
        self.decodes.wait_until_ready()

    def _start(self, role: str) -> ForkedServer:
        config = {
            "kv_connector": self.CONNECTOR,
            "kv_role": role,
            "kv_load_failure_policy": self._policy,
            "kv_connector_extra_config": self._extra,
        }
        of_role = self._of_prefills if role == "kv_producer" else ()
        environment = {**self._channel(self._side_channels[role]), **self._environment}
        log = self._directory / f"{role}_{len(self._started)}.txt"
        transfer = f"--kv-transfer-config={json.dumps(config)}"
        server = ForkedServer(
            self._model, log, *self._options, *of_role, transfer, environment=environment
        )
        self._started.append(server)
        return server

    @staticmethod
    def _channel(port: str) -> dict[str, str]:
        """Returns variables with the address at which the other server requests blocks."""
        return {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_PORT": port}

    # --- actions of a proxy ----------------------------------------------------------------------

    def prefill(self, prompt: list[int]) -> dict[str, Any]:
        """Computes a prompt; returns the address of its blocks."""
        asked = {"do_remote_decode": True, "do_remote_prefill": False}
        answer = self._ask(self.prefills, prompt, 1, asked)
        told: dict[str, Any] = answer["kv_transfer_params"]
        return told

    def decode(self, prompt: list[int], told: dict[str, Any], max_tokens: int) -> Answer:
        """Continues a prompt greedily from its existing blocks."""
        return answer_of(self._ask(self.decodes, prompt, max_tokens, told))

    def complete(self, prompt: list[int], max_tokens: int) -> Answer:
        return self.decode(prompt, self.prefill(prompt), max_tokens)

    def _ask(
        self, server: ForkedServer, prompt: list[int], max_tokens: int, told: dict[str, Any]
    ) -> dict[str, Any]:
        return ask(server.url, str(self._model), prompt, max_tokens, told)

    # --- observations of a test ------------------------------------------------------------------

    def stop_prefills(self) -> None:
        """Suspends the prefill engine's processes, so that its host seems to be cut off."""
        self._signal_prefills(signal.SIGSTOP)

    def continue_prefills(self) -> None:
        self._signal_prefills(signal.SIGCONT)

    def _signal_prefills(self, number: signal.Signals) -> None:
        for process in processes_of_session(self.prefills.process.pid):
            process.send_signal(number)

    def close(self) -> None:
        for server in self._started:
            server.kill()


class MooncakePair(Pair):
    """Servers that transfer blocks with Mooncake."""

    CONNECTOR = "MooncakeConnector"

    @staticmethod
    def _channel(port: str) -> dict[str, str]:
        return {"VLLM_HOST_IP": "127.0.0.1", "VLLM_MOONCAKE_BOOTSTRAP_PORT": port}

    def transfer(self) -> dict[str, Any]:
        """Names a new transfer; the proxy passes the result to the decode engine."""
        address = f"http://127.0.0.1:{self._side_channels['kv_producer']}"
        (engine,) = httpx.get(f"{address}/query", timeout=30).json().values()
        return {
            "do_remote_prefill": True,
            "remote_engine_id": engine["engine_id"],
            "remote_bootstrap_addr": address,
            "transfer_id": str(uuid.uuid4()),
        }

    def prefill(self, prompt: list[int]) -> dict[str, Any]:
        told = self.transfer()
        self.begin_prefill(prompt, told)
        return told

    def begin_prefill(self, prompt: list[int], told: dict[str, Any]) -> None:
        """Computes a prompt for a transfer, whose blocks wait for the decode engine."""
        asked = {"do_remote_decode": True, "do_remote_prefill": False}
        self._ask(self.prefills, prompt, 1, {**asked, "transfer_id": told["transfer_id"]})


def ask(
    url: str, model: str, prompt: list[int], max_tokens: int, told: dict[str, Any]
) -> dict[str, Any]:
    """Returns a server's answer to a greedy request. told: kv_transfer_params"""
    answer = httpx.post(
        f"{url}/v1/completions",
        json={
            "model": model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "logprobs": 1,
            "kv_transfer_params": told,
        },
        timeout=REQUEST_LIMIT_S,
    )
    answer.raise_for_status()
    value: dict[str, Any] = answer.json()
    return value


def answer_of(answer: dict[str, Any]) -> Answer:
    choice = answer["choices"][0]
    return Answer(choice["token_ids"], choice["logprobs"]["token_logprobs"])


def metric(server: ForkedServer, name: str) -> float:
    """Returns the sum of a metric over its labels; 0 if it does not exist yet."""
    lines = httpx.get(f"{server.url}/metrics", timeout=30).text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name + "{"))
