"""One rank's error ends the step of all ranks, or the engine.

vLLM logs an exception of a rank that does not reply, and continues. That rank's next collective
would then match the one in which the others still wait, one step behind, and tokens would be wrong.
So a rank that raises tells the others (core.distributed.fault_channel) and launches nothing more
until every rank has raised at the same point. If one does not, all ranks end: decisions/0013.
"""

import os
import re
import threading
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from vllm.v1.outputs import AsyncModelRunnerOutput

from vllm_davinci.core.device.runtime_error import with_runtime_words
from vllm_davinci.core.distributed.fault_channel import (
    CAUSE_CHARACTERS,
    PLACE_LINES,
    Fault,
    FaultChannel,
)
from vllm_davinci.core.errors import RankFaultError
from vllm_davinci.core.log import init_logger
from vllm_davinci.core.process.engine_exit import is_of_engine
from vllm_davinci.core.process.fault_report import leave_report
from vllm_davinci.core.process.liveness import StoppedRanks, leave_at_once

logger = init_logger(__name__)

# Time that ranks wait for each other to raise the same error, since one may be ahead of another.
# Less than the 5 s after which torch_npu's watchdog ends a process whose collective has failed.
SETTLE_S = 3.0
# Time for the failed rank to reply with its error before its process ends.
REPLY_S = 2.0
# Time for the other ranks, once the device releases them, to reply with the cause before they end.
PEERS_REPLY_S = 4.0
# Time that a rank in a step waits for vLLM to end an engine after one of its processes has ended.
LOSS_S = 5.0
# An operator's name in an error message of CANN or torch_npu.
OPERATOR = re.compile(r"\b(?:aclnn|aclrt|Hccl|npu_)\w+")

T = TypeVar("T")


class StepGuard:
    """Wraps every worker call that launches or awaits a step, start-up included, so that one rank's
    error stops all.

    All ranks of the world make it once, at the same point of their start.

    engine: number of the data-parallel engine; its ranks get the same calls
    exit:   ends the process at once, with a status
    """

    def __init__(self, engine: int, exit: Callable[[int], None] = os._exit) -> None:
        self._engine, self._exit = engine, exit
        self._calls = 0  # calls begun
        self._ended_calls = 0
        self._outputs = 0  # calls waited for
        self._change = threading.Condition()  # protects everything below
        self._error: RankFaultError | None = None  # the reason why calls are refused
        self._first: Fault | None = None  # unsettled faults
        self._heard: dict[int, deque[Fault]] = {}
        self._missing: Fault | None = None  # a process that has ended
        self._channel = FaultChannel(self._hear, self._miss)
        if is_of_engine():
            StoppedRanks(
                self._channel.stopped_siblings, lambda: self._calls, self._is_busy, self._end
            )

    def call(self, work: Callable[..., T], *arguments: Any, **options: Any) -> T:
        """Runs a call of the worker; raises its error if every rank has raised the same.

        Raises RankFaultError otherwise, and in every later call.
        """
        if self._missing is not None:
            self._end(self._missing)
        self._raise_error()
        self._calls += 1
        try:
            output = work(*arguments, **options)
        except Exception as error:
            self._settle(work.__name__.lstrip("_"), error)
            self._ended_calls = self._calls
            raise
        self._ended_calls = self._calls
        if self._first is not None:
            self._end_if_passed(self._first)
        self._raise_error()
        return output

    def output(self, output: Any) -> Any:
        """Returns a call's output; tokens on the device pass through `receive`."""
        return GuardedOutput(output, self) if isinstance(output, AsyncModelRunnerOutput) else output

    def receive(self, output: AsyncModelRunnerOutput) -> Any:
        """Waits for tokens. Raises RankFaultError instead as soon as a rank has failed."""
        self._outputs += 1
        try:
            received = output.get_output()
        except Exception as error:
            # The device may report that a rank has gone before this process has received the cause.
            with self._change:
                self._change.wait_for(lambda: self._error or self._missing, REPLY_S)
            if self._missing is not None:
                self._end(self._missing)
            self._raise_error(error)
            raise
        finally:
            self._outputs -= 1
        self._raise_error()
        return received

    def close(self) -> None:
        """Ignores other ranks from now on, because the engine is ending normally."""
        if self._error is not None:  # vLLM has the reply and ends its processes
            self._end_stopped()
        self._channel.close()

    @property
    def has_failed(self) -> bool:
        """True once a rank has failed: this rank's device may have been stopped."""
        return self._error is not None

    def _raise_error(self, cause: Exception | None = None) -> None:
        if self._error is not None:
            raise self._error from cause

    # --- this rank has failed ----------------------------------------------------------------

    def _settle(self, name: str, error: Exception) -> None:
        """Returns when every rank has failed at the same point; otherwise raises RankFaultError."""
        own = self._own_fault(name, error)
        self._channel.tell(own)
        with self._change:
            first = self._first or own
            self._first = first
            patience_s = 0 if self._channel.stopped() else SETTLE_S
            self._change.wait_for(
                lambda: self._error or self._missing or self._is_decided(own), patience_s
            )
            if self._error is None and self._is_shared(own):
                for faults in self._heard.values():
                    faults.popleft()
                self._first = next((f for faults in self._heard.values() for f in faults), None)
                return
        self._end(first)
        self._raise_error(error)

    def _is_decided(self, own: Fault) -> bool:
        """True if all ranks have failed, or one at another point."""
        unlike = any(faults and not own.is_like(faults[0]) for faults in self._heard.values())
        return unlike or self._is_shared(own)

    def _is_shared(self, own: Fault) -> bool:
        heard = [self._heard.get(rank) for rank in self._channel.others]
        return all(faults and own.is_like(faults[0]) for faults in heard)

    def _own_fault(self, name: str, error: Exception) -> Fault:
        place = [
            f"{os.path.basename(frame.filename)}:{frame.lineno} {frame.name}"
            for frame in traceback.extract_tb(error.__traceback__)
        ]
        words = with_runtime_words(str(error))
        cause = f"{type(error).__name__}: {words}"[:CAUSE_CHARACTERS]
        operator = OPERATOR.search(cause)
        for stopped in self._channel.stopped():
            cause += f" [The process of {stopped.who} is stopped, by SIGSTOP or a debugger.]"
        return replace(
            self._channel.own,
            engine=self._engine,
            call=self._calls,
            name=name,
            place=place[-PLACE_LINES:],
            cause=f"operator {operator[0]}: {cause}" if operator else cause,
            collectives=self._channel.launched_collectives(),
        )

    # --- another rank has failed -------------------------------------------------------------

    def _hear(self, fault: Fault, teller: int) -> None:
        """Records another rank's fault; called in the channel's thread."""
        # Another rank ends because of this fault, or the rank failed because a process is missing.
        if teller != fault.rank or self._missing is not None:
            self._end(fault)
            return
        with self._change:
            self._heard.setdefault(fault.rank, deque()).append(fault)
            self._first = self._first or fault
            self._change.notify_all()
        self._end_if_passed(fault)
        _after(SETTLE_S, self._end_if_pending, fault)

    def _end_if_passed(self, fault: Fault) -> None:
        """Ends if this rank has passed the call in which the other rank failed."""
        if fault.engine == self._engine and self._ended_calls >= fault.call:
            self._end_if_pending(fault)

    def _end_if_pending(self, fault: Fault) -> None:
        with self._change:
            is_pending = fault in self._heard.get(fault.rank, ())
        if is_pending:
            self._end(fault)

    def _miss(self, ended: Fault) -> None:
        """Records, in another thread of the channel, that a rank's process or host has ended."""
        with self._change:
            self._missing = ended
            self._change.notify_all()
        if self._first is not None:
            self._end(self._first)
        _after(LOSS_S, self._end_if_busy, ended)

    def _root_of(self, fault: Fault) -> Fault:
        """Returns the fault of the rank whose process ended, if another one reported its absence.

        gloo and devices report it to all ranks that wait for it.
        """
        if self._missing is None:
            return fault
        if self._first is not None and self._first.rank == self._missing.rank:
            return self._first  # reported before it ended
        return fault if fault.rank == self._missing.rank else self._missing

    def _end_if_busy(self, ended: Fault) -> None:
        """Ends if this rank is in a step; otherwise the engine may be ending normally."""
        if self._is_busy():
            self._end(ended)

    def _is_busy(self) -> bool:
        return self._ended_calls < self._calls or self._outputs > 0

    # --- the end -----------------------------------------------------------------------------

    def _end(self, fault: Fault) -> None:
        """Refuses all later calls, and ends the process once it can have reported why."""
        fault = self._root_of(fault)
        is_own = fault.rank == self._channel.rank
        reason = (
            "At least one other rank has not failed at the same point. Tokens of ranks that are a "
            "step apart would be wrong"
            if fault.name
            else "No other rank can compute without it"
        )
        with self._change:
            if self._error is not None or self._channel.is_closed:
                return
            self._error = RankFaultError(f"{fault}. {reason}, so all ranks of the engine end.")
            self._change.notify_all()
        leave_report(str(self._error))
        logger.error("%s", self._error)
        if is_own:
            self._channel.leave_device_groups()
        else:
            self._channel.tell(fault)
            self._channel.stop_device()
        if is_of_engine():
            _after(REPLY_S if is_own else PEERS_REPLY_S, self._leave)
        else:  # the program's own process, which gets the error as soon as its step returns
            _after(SETTLE_S, self._leave_if_busy)

    def _leave_if_busy(self) -> None:
        if self._is_busy():
            self._leave()

    def _end_stopped(self) -> None:
        """Kills stopped processes, which cannot notice the engine's end, so vLLM need not wait."""
        if is_of_engine():
            self._channel.end_stopped_siblings()

    def _leave(self) -> None:
        if self._channel.is_closed:
            return  # vLLM is ending the process normally
        self._end_stopped()
        leave_at_once(1, self._exit)


class GuardedOutput(AsyncModelRunnerOutput):
    """Tokens being copied to the host."""

    def __init__(self, output: AsyncModelRunnerOutput, guard: StepGuard) -> None:
        self._output, self._guard = output, guard

    def get_output(self) -> Any:
        return self._guard.receive(self._output)

    def get_kv_connector_output(self) -> Any:
        return self._output.get_kv_connector_output()


def _after(seconds: float, work: Callable[..., None], *arguments: Any) -> None:
    timer = threading.Timer(seconds, work, arguments)
    timer.daemon = True
    timer.start()
