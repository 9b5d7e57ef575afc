"""This repository's pytest plugin: requirements of runs, case selection, times.

The root's pyproject.toml loads it (`-p vllm_davinci_testing.plugin`), before any test or conftest
imports torch.
"""

import contextlib
import ctypes
import gc
import os
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Generator
from importlib.util import find_spec
from pathlib import Path, PurePosixPath

import pytest

from vllm_davinci_testing import processors, selection
from vllm_davinci_testing.lanes import Lanes
from vllm_davinci_testing.processes import fork_server
from vllm_davinci_testing.selection import Selection
from vllm_davinci_testing.times import RECORDED, RESULTS, Clock, FileTimes, Seconds, Times

# Tests compare float32 results to the last bit, but chips have no operators for float32: by default
# tests run on a chip that accepts any dtype and size.
EXACT_SOC = "reference"
REFUSED = "refused_calls"
CALLS = "calls"  # user properties of reports, which lanes pass on
FREE = "calls_without_rules"
SECONDS = "seconds"
# Parts of paths of serving code, which may only call operators with rules.
SERVED = (
    "/vllm_davinci/core/",
    "/vllm_davinci/kernels/",
    "/vllm_davinci/models/",
    "/site-packages/vllm/",
)
SLOWEST_FILES = 15  # named by the summary
# Examples per property test: few in daily runs, more at night.
DAILY_EXAMPLES, EXAMPLES = 10, 25


def pytest_addoption(parser: pytest.Parser) -> None:
    selection.add_options(parser)
    parser.addoption(
        "--lanes",
        type=int,
        default=0,
        metavar="N",
        help="run the files in N processes that share one import of vLLM",
    )
    parser.addoption(
        "--lanes-import",
        default=fork_server.PRELOADED,
        metavar="MODULE",
        help="what they import together (default: %(default)s)",
    )
    parser.addoption(
        "--record-times",
        action="store_true",
        help=f"write the times of this run's files, of all their cases, into {RECORDED}",
    )
    parser.addoption(
        "--processor",
        choices=processors.CHOICES,
        help="use an older processor's instruction sets; `older`: one older than this machine's",
    )


def pytest_configure(config: pytest.Config) -> None:
    let_children_be_interrupted()
    processor = config.getoption("processor")
    if processor:
        processors.use(processor)
    os.environ["HF_HUB_OFFLINE"] = os.environ["VLLM_NO_USAGE_STATS"] = "1"
    use_virtual_npus_without_a_chip()
    repeat_property_tests(EXAMPLES if config.getoption("all") else DAILY_EXAMPLES)
    config.pluginmanager.register(Selection(config), "davinci-selection")
    config.pluginmanager.register(Summary(config), "davinci-summary")
    config.pluginmanager.register(TestClock(), "davinci-clock")
    if find_spec("vllm_davinci") and find_spec("vllm_davinci.vnpu"):
        config.pluginmanager.register(RefusedCalls(config), "davinci-refused-calls")
    lanes = config.getoption("lanes")
    if lanes and not (config.option.collectonly or config.option.usepdb):
        config.pluginmanager.register(Lanes(config, lanes), "davinci-lanes")


def let_children_be_interrupted() -> None:
    """Restores Ctrl-C if it is ignored, as under `nohup pytest &`, because children inherit this.

    Programs that tests interrupt must behave as when started from a terminal.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def use_virtual_npus_without_a_chip() -> None:
    """torch imports torch_npu, which needs CANN's libraries, real or virtual."""
    if find_spec("vllm_davinci") is None or find_spec("vllm_davinci.vnpu") is None:
        return
    from vllm_davinci.vnpu import ActivationError, activate

    os.environ.setdefault("VNPU_SOC", EXACT_SOC)
    # If a real CANN is present, `activate` refuses, and CANN serves the tests.
    with contextlib.suppress(ActivationError):
        activate()


def repeat_property_tests(examples: int) -> None:
    """Makes property tests deterministic: a failure on one machine is a failure on all."""
    if find_spec("hypothesis") is None:
        return
    from hypothesis import HealthCheck, settings

    settings.register_profile(
        "repeatable",
        derandomize=True,
        deadline=None,
        max_examples=examples,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )
    settings.load_profile("repeatable")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Excludes all test modules' imports from garbage collection."""
    if not session.config.getoption("lanes"):
        gc.collect()
        gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()


class TestClock:
    """Measures each test, including other plugins' work for it."""

    __test__ = False

    def __init__(self) -> None:
        self._clock = Clock()

    def pytest_collection_finish(self) -> None:
        self._clock.read()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None]:
        try:
            return (yield)
        finally:
            taken = self._clock.read()
            item.user_properties.append((SECONDS, (taken.wall, taken.processor)))


class RefusedCalls:
    """Fails a test that makes a call which a chip would refuse, unless it tests refusals.

    Counts calls checked against CANN's documents and records refusals, in this process and in those
    that tests start. Also fails if serving code, ours or vLLM's, calls an operator without rules.
    """

    def __init__(self, config: pytest.Config) -> None:
        directory = Path(tempfile.mkdtemp(prefix="refusals-"))
        config.add_cleanup(lambda: shutil.rmtree(directory, ignore_errors=True))
        self.write_to(directory)
        self._calls: Counter[str] = Counter()
        self._num_refused = 0
        self._num_free = 0

    def write_to(self, directory: Path) -> None:
        """Sets the folder in which processes record their calls; each lane has its own."""
        directory.mkdir(exist_ok=True)
        self._directory = directory
        os.environ["VNPU_REFUSALS"] = str(directory)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None]:
        from vllm_davinci.vnpu import refusals

        try:
            return (yield)
        finally:
            forget_last_error()
            found = refusals.read(self._directory)
            calls = Counter(found.calls)
            new = found.refused[self._num_refused :]
            item.user_properties.append((CALLS, dict(calls - self._calls)))
            item.user_properties.append((REFUSED, len(new)))
            self._calls, self._num_refused = calls, len(found.refused)
            free = found.free[self._num_free :]
            served = [each for each in free if any(part in each.site for part in SERVED)]
            self._num_free = len(found.free)
            item.user_properties.append((FREE, sorted({each.operator for each in served})))
            if new and item.get_closest_marker(REFUSED) is None:
                pytest.fail(
                    f"{len(new)} calls were refused, and the test is not marked {REFUSED}. "
                    f"The first: {new[0].message} Called at {new[0].site}",
                    pytrace=False,
                )
            if served:
                pytest.fail(
                    f"{served[0].operator} has no rules to check its calls. Write "
                    "them down in packages/vnpu/csrc/ops (docs/guides/add_an_operator.md). "
                    f"Called at {served[0].site}",
                    pytrace=False,
                )


def forget_last_error() -> None:
    """Clears the runtime's last error, which a thread keeps until it is read.

    torch_npu would attribute it to the next test's calls: after an unsupported call, it treats
    another refusal as a warning.
    """
    if "torch_npu" in sys.modules:
        ctypes.CDLL("libascendcl.so").aclrtGetLastError(0)


def group_of(node_id: str) -> str:
    """Returns the key for summing times: `packages/core`, `tests/e2e`, `checkpoints`."""
    parts = PurePosixPath(node_id.split("::")[0]).parts
    return "/".join(parts[: 2 if parts[0] in ("packages", "tests") else 1])


class Summary:
    """Prints a run's last lines: cases left out, the slowest files, and each group's time.

    times: of the files whose tests have run
    """

    def __init__(self, config: pytest.Config) -> None:
        self.times = Times()
        self._config = config
        self._calls: Counter[str] = Counter()
        self._num_refused = 0
        self._free: set[str] = set()

    def pytest_report_header(self) -> list[str]:
        return [processors.description(self._config.getoption("processor"))]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "teardown":
            return
        properties = dict(report.user_properties)
        if SECONDS in properties:
            self.times.ran(report.nodeid, Seconds(*properties[SECONDS]))
        self._calls.update(properties.get(CALLS, {}))
        self._num_refused += properties.get(REFUSED, 0)
        self._free.update(properties.get(FREE, []))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        chosen: Selection = self._config.pluginmanager.get_plugin("davinci-selection")
        if self.times.files:
            self.times.write(self._config.rootpath, chosen.name)
        if self._config.getoption("record_times"):
            self.times.record(self._config.rootpath, chosen.name)
        self._write_calls(terminalreporter)
        if len(self.times.files) > SLOWEST_FILES:
            title = f"the {SLOWEST_FILES} slowest files; all of them: {RESULTS}"
            write_times(terminalreporter, title, self.times.longest(SLOWEST_FILES))
        if len(groups := self.times.by_group(group_of)) > 1:
            write_times(terminalreporter, f"{chosen.name} cases that ran, by group", groups)
        if left_out := chosen.lines():
            terminalreporter.section("cases left out; --all runs every one, as every night does")
            for line in left_out:
                terminalreporter.write_line(line)

    def _write_calls(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self._calls:
            return
        terminalreporter.section("calls checked against CANN's documents")
        for soc, calls in sorted(self._calls.items()):
            terminalreporter.write_line(f"{soc:24} {calls:9} calls")
        terminalreporter.write_line(
            f"{self._num_refused} of them refused; a test that is not marked {REFUSED} fails "
            "where one of its calls is"
        )
        terminalreporter.write_line(
            f"{len(self._free)} operators without rules called by what is served"
            + "".join(f" {name}" for name in sorted(self._free))
        )


def write_times(
    reporter: pytest.TerminalReporter, title: str, rows: list[tuple[str, FileTimes]]
) -> None:
    reporter.section(title)
    reporter.write_line(f"{'core-s':>8} {'wall s':>8} {'cases':>6}")
    for name, times in rows:
        line = f"{times.processor_s:8.1f} {times.wall_s:8.1f} {times.cases:6}  {name}"
        reporter.write_line(line)
