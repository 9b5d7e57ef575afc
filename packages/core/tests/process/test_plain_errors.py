"""Configuration errors are one line with a remedy; other errors keep their traceback."""

import logging
import multiprocessing
import sys
from pathlib import Path

import pytest
from pydantic import BaseModel, ValidationError
from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from vllm_davinci.core.errors import ConfigurationError, DeviceError, RankFaultError
from vllm_davinci.core.process import plain_errors
from vllm_davinci.core.process.plain_errors import NOT_STARTED, WORKER_FAILED, words_of

HEADS = "Total number of attention heads (9) must be divisible by tensor parallel size (2)."


class Setting(BaseModel):
    size: int


def raised(error: BaseException, by: str) -> BaseException:
    """Returns the error with a traceback through a function of this name."""
    names = {"error": error}
    exec(f"def {by}():\n    raise error", names)
    try:
        names[by]()  # type: ignore[operator]
    except BaseException as found:
        return found
    raise AssertionError


def invalid() -> ValidationError:
    with pytest.raises(ValidationError) as found:
        Setting(size="many")  # type: ignore[arg-type]
    return found.value


@pytest.mark.parametrize(
    ("error", "by", "words"),
    [
        (ValueError(HEADS), "create_engine_config", ["(9)", "one of: 1, 3, 9."]),
        (OSError("Can't load '/no/model'."), "create_engine_config", ["no /no/model on this host"]),
        (ValueError("Repo id must be ...: '/no/model'."), "from_cli_args", ["no /no/model on"]),
        (
            OSError(98, "Address already in use"),
            "create_server_socket",
            ["in use", "another --port"],
        ),
        (invalid(), "create_engine_config", ["size: Input should be a valid integer"]),
        (ConfigurationError("dbo.x is unknown"), "anywhere", ["dbo.x is unknown"]),
        (RuntimeError("Engine core initialization failed. See"), "anywhere", ["reason above"]),
    ],
)
def test_an_error_of_configuration_is_one_line(error: BaseException, by: str, words: list[str]):
    found = raised(error, by)
    text = words_of(found, found.__traceback__)
    assert "\n" not in text
    assert all(word in text for word in words), text


@pytest.mark.parametrize(
    ("error", "by"),
    [(ValueError("of a step"), "execute_model"), (TypeError("ours"), "create_engine_config")],
)
def test_another_error_keeps_its_traceback(error, by, capsys):
    found = raised(error, by)
    assert plain_errors._print_error(type(found), found, found.__traceback__) is None
    assert "Traceback" in capsys.readouterr().err


def test_a_command_prints_a_line(capsys: pytest.CaptureFixture[str], monkeypatch):
    monkeypatch.setattr(sys, "argv", [str(Path("/bin/vllm")), "serve", "model"])
    found = raised(ValueError(HEADS), "create_engine_config")
    assert plain_errors._print_error(type(found), found, found.__traceback__) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("vllm serve: error: Total") and "VLLM_LOGGING_LEVEL=DEBUG" in line
    assert plain_errors._print_error(KeyboardInterrupt, KeyboardInterrupt(), None) == 130
    assert capsys.readouterr().err == "vllm-davinci: Interrupted.\n"


def test_an_engine_says_why_it_did_not_start_and_ends(monkeypatch: pytest.MonkeyPatch):
    def record(error: Exception, words: str) -> logging.LogRecord:
        return logging.LogRecord("", 40, "", 0, words, (), (type(error), error, None))

    plain_errors.shorten_errors_of_engines()  # in the program that forks the engine
    assert plain_errors._say_and_end in logging.getLogger(plain_errors.ENGINE_LOGGER).filters
    assert plain_errors._say_and_end(record(ValueError("too long"), NOT_STARTED))
    monkeypatch.setattr(multiprocessing.current_process(), "_name", "EngineCore")
    for error in (ValueError("too long"), DeviceError("no room")):
        with pytest.raises(SystemExit):
            plain_errors._say_and_end(record(error, NOT_STARTED))
    assert plain_errors._say_and_end(record(RuntimeError("of the device"), NOT_STARTED))
    assert plain_errors._say_and_end(record(ValueError("later"), "another line"))
    with pytest.raises(SystemExit):
        plain_errors._say_and_end(record(RuntimeError(f"{WORKER_FAILED[0]} 'x'"), NOT_STARTED))


def test_the_workers_of_an_engine_that_does_not_start_are_ended_first():
    ended = []

    class Executor(MultiprocExecutor):
        def __init__(self) -> None:
            """Starts nothing."""

        def collective_rpc(self) -> None:
            raise RuntimeError(f"{WORKER_FAILED[0]} 'x'")

        def shutdown(self) -> None:
            ended.append(self)

    executor = Executor()
    with pytest.raises(RuntimeError) as found:
        executor.collective_rpc()
    plain_errors._end_workers(found.value.__traceback__)
    assert ended == [executor]
    plain_errors._end_workers(None)


@pytest.mark.parametrize(
    ("error", "by", "is_short"),
    [
        (DeviceError("no room"), "load_model", True),
        (DeviceError("in service"), "execute_model", False),
        (RankFaultError("rank 1 is gone"), "load_model", False),
        (ValueError("of a library"), "load_model", False),
    ],
)
def test_a_worker_refuses_a_setting_in_a_line(error: Exception, by: str, is_short: bool):
    found = raised(error, by)
    words, told = "WorkerProc hit an exception.", (type(found), found, found.__traceback__)
    record = logging.LogRecord("", 40, "", 0, words, (), told)  # type: ignore[arg-type]
    assert plain_errors._shorten_of_worker(record)
    assert (record.exc_info is None) is is_short
    assert (str(error) in record.getMessage()) is is_short
