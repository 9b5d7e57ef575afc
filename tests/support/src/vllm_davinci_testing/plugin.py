"""The pytest plugin of this repository: what every run needs, today's sample, who took how long.

The root's pyproject.toml loads it (`-p vllm_davinci_testing.plugin`), before any test or conftest
imports torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import gc
import os
import shutil
import signal
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Generator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path, PurePosixPath

import pytest

from vllm_davinci_testing import processors
from vllm_davinci_testing.sample import sampled

# Tests compare float32 results to the last bit, which chips have no operators for: unless the
# environment or a test says otherwise, they run on a chip that takes any dtype and size.
EXACT_SOC = "reference"
THOROUGH = "thorough"
REFUSED = "refused_calls"
CALLS = "calls"  # user properties of reports, which travel from xdist's workers
FREE = "calls_without_rules"
# Parts of the paths of what serves models: an operator that they call has rules.
SERVED = (
    "/vllm_davinci/core/",
    "/vllm_davinci/kernels/",
    "/vllm_davinci/models/",
    "/site-packages/vllm/",
)
SLOWEST_FILES = 15  # that the summary names
SAMPLED = "sampled"  # a user property of reports, which travels from xdist's workers
# Tests that start whole engines come first: what is left at the end is short, and no process is
# idle while another one still has a long file.
LONGEST_FIRST = ("tests/e2e", "tests/contract", "checkpoints")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--sample-date",
        type=datetime.date.fromisoformat,
        metavar="YYYY-MM-DD",
        help="run the sample of thorough cases of this day (default: today)",
    )
    parser.addoption(
        "--processor",
        choices=processors.CHOICES,
        help="use the instruction sets of an older processor; `older`: than this machine's",
    )


def pytest_configure(config: pytest.Config) -> None:
    let_children_be_interrupted()
    processor = config.getoption("processor")
    if processor:
        processors.use(processor)
    use_virtual_npus_without_a_chip()
    repeat_property_tests()
    if worker := getattr(config, "workerinput", None):
        date = worker["sample_date"]  # near midnight, the processes of one run agree
    else:
        today = datetime.datetime.now(datetime.UTC).date()
        date = (config.getoption("sample_date") or today).isoformat()
        config.pluginmanager.register(Summary(date, processor), "davinci-summary")
    config.pluginmanager.register(Selection(date), "davinci-selection")
    if find_spec("vllm_davinci") and find_spec("vllm_davinci.vnpu"):
        config.pluginmanager.register(RefusedCalls(config), "davinci-refused-calls")


def let_children_be_interrupted() -> None:
    """Undo an ignored Ctrl-C, which `nohup pytest &` inherits and every child would inherit too.

    Programs that tests interrupt must behave as if they were started from a terminal.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def use_virtual_npus_without_a_chip() -> None:
    """torch imports torch_npu, which needs CANN's libraries: a chip's, or else vnpu's."""
    if find_spec("vllm_davinci") is None or find_spec("vllm_davinci.vnpu") is None:
        return
    from vllm_davinci.vnpu import ActivationError, activate

    os.environ.setdefault("VNPU_SOC", EXACT_SOC)
    # Refused where a real CANN is present, which then serves the tests.
    with contextlib.suppress(ActivationError):
        activate()


def repeat_property_tests() -> None:
    """A property that fails on one machine fails on all."""
    if find_spec("hypothesis") is None:
        return
    from hypothesis import HealthCheck, settings

    settings.register_profile(
        "repeatable",
        derandomize=True,
        deadline=None,
        max_examples=25,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )
    settings.load_profile("repeatable")


def pytest_collection_finish() -> None:
    """Collections of garbage leave out what all test modules have imported."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: object) -> None:
    """xdist starts a process: it takes the date of this one."""
    date = node.config.pluginmanager.get_plugin("davinci-selection").date  # type: ignore[attr-defined]
    node.workerinput["sample_date"] = date  # type: ignore[attr-defined]


class Selection:
    """Leaves out the thorough cases that are not asked for, and orders files by their length."""

    def __init__(self, date: str) -> None:
        self.date = date

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        items.sort(key=lambda item: group_rank(item.nodeid))
        if THOROUGH in (config.getoption("markexpr") or ""):
            return
        thorough = {item.nodeid for item in items if item.get_closest_marker(THOROUGH)}
        chosen = sampled(thorough, self.date)
        left_out = [item for item in items if item.nodeid in thorough - chosen]
        for item in items:
            if item.nodeid in chosen:
                item.user_properties.append((SAMPLED, True))
        if left_out:
            config.hook.pytest_deselected(items=left_out)
            items[:] = [item for item in items if item.nodeid not in thorough - chosen]


class RefusedCalls:
    """No test makes a call that a chip would refuse, unless that is what it is about.

    Every call that operators hold against CANN's documents is counted, and every refusal kept, in
    this process and in those that tests start. What is served, by these packages or by vLLM, calls
    no operator that has no rules to be held against.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="refusals-"))
        config.add_cleanup(lambda: shutil.rmtree(self._directory, ignore_errors=True))
        os.environ["VNPU_REFUSALS"] = str(self._directory)
        self._calls: Counter[str] = Counter()
        self._num_refused = 0
        self._num_free = 0

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
                    f"{served[0].operator} has no rules that its calls are held against. Write "
                    "them down in packages/vnpu/csrc/ops (docs/guides/add_an_operator.md). "
                    f"Called at {served[0].site}",
                    pytrace=False,
                )


def forget_last_error() -> None:
    """Takes the runtime's last error, which a thread keeps until somebody asks for it.

    torch_npu would believe it to be that of a call of the next test: after one that is not
    supported it takes another one's refusal for a warning.
    """
    if "torch_npu" in sys.modules:
        ctypes.CDLL("libascendcl.so").aclrtGetLastError(0)


def group_of(node_id: str) -> str:
    """`packages/core`, `tests/e2e`, `checkpoints`: what the times are summed by."""
    parts = PurePosixPath(node_id.split("::")[0]).parts
    return "/".join(parts[: 2 if parts[0] in ("packages", "tests") else 1])


def group_rank(node_id: str) -> int:
    group = group_of(node_id)
    return LONGEST_FIRST.index(group) if group in LONGEST_FIRST else len(LONGEST_FIRST)


@dataclass
class Times:
    """of one group. seconds: of setups, calls and teardowns, summed over processes"""

    tests: set[str] = field(default_factory=set)
    seconds: float = 0.0


class Summary:
    """The last lines of a run: today's sample, the slowest files, and the time of each group."""

    def __init__(self, date: str, processor: str | None) -> None:
        self._date = date
        self._processor = processor
        self._seconds_of_files: Counter[str] = Counter()
        self._times: dict[str, Times] = defaultdict(Times)
        self._sampled: set[str] = set()
        self._calls: Counter[str] = Counter()
        self._num_refused = 0
        self._free: set[str] = set()

    def pytest_report_header(self) -> list[str]:
        return [
            processors.description(self._processor),
            f"thorough cases: the sample of --sample-date={self._date}, all with -m thorough",
        ]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        times = self._times[group_of(report.nodeid)]
        times.tests.add(report.nodeid)
        times.seconds += report.duration
        self._seconds_of_files[report.nodeid.split("::")[0]] += report.duration
        if report.when == "teardown":
            properties = dict(report.user_properties)
            self._calls.update(properties.get(CALLS, {}))
            self._num_refused += properties.get(REFUSED, 0)
            self._free.update(properties.get(FREE, []))
        if (SAMPLED, True) in map(tuple, report.user_properties):
            self._sampled.add(report.nodeid)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._sampled:
            terminalreporter.section(f"thorough cases of --sample-date={self._date}")
            for node_id in sorted(self._sampled):
                terminalreporter.write_line(node_id)
        if self._calls:
            terminalreporter.section("calls held against CANN's documents")
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
        if len(self._seconds_of_files) > SLOWEST_FILES:
            terminalreporter.section(f"the {SLOWEST_FILES} slowest files")
            for file, seconds in self._seconds_of_files.most_common(SLOWEST_FILES):
                terminalreporter.write_line(f"{seconds:8.1f} s  {file}")
        if len(self._times) > 1:
            terminalreporter.section("time per group, summed over processes")
            for group, times in sorted(self._times.items(), key=lambda item: -item[1].seconds):
                line = f"{group:24} {len(times.tests):5} tests {times.seconds:8.1f} s"
                terminalreporter.write_line(line)
