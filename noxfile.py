"""Lists the tasks. `nox --list` shows them; run plain `nox` before a commit.

Sessions that need vLLM share one environment, `.nox/serving`, which `ci/prepare_environment.py`
creates and updates; only `lint` and `isolated` have their own.
"""

import os
import shutil
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nox

nox.needs_version = ">=2025.2.9"
nox.options.sessions = ["lint", "typecheck", "cpp_tests", "tests"]
nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_existing_virtualenvs = True

ROOT = Path(__file__).resolve().parent
SERVING = ROOT / ".nox" / "serving"
DENSE_CHECKPOINT = "checkpoints/tiny_llama"
DEEPSEEK_CHECKPOINT = "checkpoints/tiny_deepseek"
DEPENDENCY_GROUPS = nox.project.load_toml(ROOT / "pyproject.toml")["dependency-groups"]
TOOLS = ("build", "test", "typecheck", "lint")
# Tests of several ranks start one process per rank, and each engine takes about 1 GB.
CORES = len(os.sched_getaffinity(0))
# One more process than cores, because a third of a lane's time is spent waiting for other
# processes.
TEST_PROCESSES = min(4, CORES + 1)
IN_PARALLEL = (
    # A file's tests share engines, so they stay in one process; a line per file shows progress.
    (f"--lanes={TEST_PROCESSES}", "--override-ini=console_output_style=classic"),
    # Without a limit each process uses one thread per core, and they wait for each other.
    {"OMP_NUM_THREADS": str(max(1, CORES // TEST_PROCESSES))},
)
# Tests that depend on the processor, on paths or on signals: `other_machine` runs these for every
# change, `nightly` runs all tests there.
ON_OTHER_MACHINES = (
    "tests/contract/test_rounding.py",
    "tests/contract/test_support.py",
    "tests/contract/test_tasks.py",
    "packages/core/tests/graph",
    "packages/vnpu/tests/test_host_counts.py",
)
# Another supported torch release, and the tests that run with it: interfaces of torch, torch_npu
# and our packages, and a third of the engine tests.
OTHER_TORCH = "2.14.0"
WITH_OTHER_TORCH = (
    "tests/contract",
    "packages/vnpu/tests",
    "packages/kernels/tests",
    *(
        f"tests/e2e/test_{name}.py"
        for name in ("generate", "deepseek", "graph_mode", "speculation", "overlap", "quantization")
    ),
)
# Also supported by vnpu[triton]; the shared environment has the newest release.
OTHER_TRITONS = ("3.6.0", "3.7.1", "3.8.0")
LONG_FOLDER = "/".join(["a_folder_whose_name_is_as_long_as_those_of_build_machines"] * 3)
# The part of the virtual NPU that needs only the standard library's headers.
DEVICE = ROOT / "packages" / "vnpu" / "csrc"
DEVICE_FOLDERS = (
    "device/**/*.cpp",
    "collective/*.cpp",
    "race/*.cpp",
    "timing/*.cpp",
    "trace/*.cpp",
    "observers.cpp",
)
CPP_SUFFIXES = (".h", ".hpp", ".cpp")


def prepare(
    session: nox.Session, directory: Path = SERVING, *options: str, groups: Sequence[str] = TOOLS
) -> Path:
    """Updates the shared environment; returns its folder of commands.

    groups: dependency groups that the session needs; others stay installed
    """
    session.run(
        sys.executable,
        "ci/prepare_environment.py",
        f"--directory={directory}",
        *(f"--group={group}" for group in groups),
        *options,
        external=True,
    )
    return directory / "bin"


def run_on_vnpu(
    session: nox.Session, commands: Path, *command: str | Path, **environment: str
) -> None:
    """Runs a command of the shared environment over the virtual NPU, with additional variables."""
    session.run(
        str(commands / "vnpu"),
        "run",
        "--",
        str(commands / command[0]),
        *map(str, command[1:]),
        external=True,
        env=serving_variables(commands, **environment),
    )


def serving_variables(commands: Path, **environment: str) -> dict[str, str]:
    """Variables for commands of the shared environment, in addition to this process's."""
    return {
        "PATH": f"{commands}{os.pathsep}{os.environ['PATH']}",
        "HF_HUB_OFFLINE": "1",
        **environment,
    }


@nox.session
def lint(session: nox.Session) -> None:
    """Check style: ruff for Python, clang-format and clang-tidy for C++. `-- fix` rewrites."""
    session.install("-q", *DEPENDENCY_GROUPS["lint"], *DEPENDENCY_GROUPS["cpp_lint"])
    fix = "fix" in session.posargs
    session.run("ruff", "check", *(["--fix"] if fix else []), ".")
    session.run("ruff", "format", *([] if fix else ["--check"]), ".")
    session.run("python", "ci/line_budget.py")  # for readers of a change
    sources = [
        str(path)
        for package in (ROOT / "packages").iterdir()
        for path in sorted(package.glob("**/*"))
        if path.suffix in CPP_SUFFIXES and "build" not in path.relative_to(package).parts
    ]
    if sources:
        session.run("clang-format", *(["-i"] if fix else ["--dry-run", "--Werror"]), *sources)

    generated = ROOT / "build" / "lint"
    generator = DEVICE.parent / "cmake" / "generate_chips.py"
    session.run("python", str(generator), str(generated / "device" / "chips.inc"))

    def tidy(source: Path) -> None:
        flags = ("-std=gnu++20", f"-I{DEVICE}", f"-I{generated}")
        session.run("clang-tidy", "--quiet", str(source), "--", *flags, silent=True, log=False)

    # clang-tidy checks one file at a time.
    with ThreadPoolExecutor(CORES) as pool:
        list(pool.map(tidy, (path for name in DEVICE_FOLDERS for path in DEVICE.glob(name))))


@nox.session(venv_backend="none")
def typecheck(session: nox.Session) -> None:
    """Check types: mypy, strict, over the sources of every package and the tools."""
    commands = prepare(session)
    sources = sorted(str(path) for path in (ROOT / "packages").glob("*/src"))
    session.run(str(commands / "mypy"), *sources, external=True)
    session.run(
        str(commands / "mypy"),
        "ci",
        "benchmarks/run.py",
        "benchmarks/compare.py",
        external=True,
        env={"MYPYPATH": "ci:benchmarks:conformance"},
    )


@nox.session(venv_backend="none")
def tests(session: nox.Session) -> None:
    """Run the daily tests, in 11 to 20 minutes. `-- ARGUMENTS`: pytest's.

    `-- --all` runs every case, `-- --group GROUP` a nightly group (`today`: one by date), `-- -m
    thorough` the grids. `-- --record-times` writes tests/times.json, by which lanes get their
    files.
    """
    commands = prepare(session)
    names_files = any(Path(argument.split("::")[0]).exists() for argument in session.posargs)
    pytest = ("python", "-m", "pytest", "--durations=25")
    if not session.posargs:
        pytest = ("python", "ci/within_limit.py", *pytest[1:])  # only for the whole suite
    parallel, environment = ((), {}) if names_files else IN_PARALLEL
    run_on_vnpu(session, commands, *pytest, *parallel, *session.posargs, **environment)


@nox.session(venv_backend="none")
def other_machine(session: nox.Session) -> None:
    """Run tests as on another machine: older instructions, a long path, Ctrl-C ignored.

    Runs selected tests; `-- all` runs all, `-- PYTEST ARGUMENTS` others.
    """
    commands = prepare(session)
    checkout = ROOT / ".nox" / "other_machine" / LONG_FOLDER / "checkout"
    session.run(sys.executable, "ci/copy_checkout.py", str(checkout), external=True)
    commands = checkout / commands.relative_to(ROOT)
    chosen = () if session.posargs == ["all"] else session.posargs or ON_OTHER_MACHINES
    # A lane omits fixtures of folders named on the command line.
    parallel, environment = ((), {}) if chosen else IN_PARALLEL
    options = ("--processor=older", f"--basetemp={checkout.parent / 'tmp'}")
    with session.chdir(checkout):
        session.run(
            *("sh", "-c", "trap '' INT; exec \"$@\"", "sh", str(commands / "vnpu"), "run", "--"),
            *(str(commands / "python"), "-m", "pytest", *options, *parallel, *chosen),
            external=True,
            env=serving_variables(commands, **environment),
        )


@nox.session(venv_backend="none")
def other_torch(session: nox.Session) -> None:
    """Run some tests with the other supported torch. `-- ARGUMENTS`: pytest's.

    Needs torch's CPU build, the only one with which torch_npu 2.14 loads.
    """
    os.environ["DAVINCI_TORCH"] = OTHER_TORCH
    commands = prepare(session, ROOT / ".nox" / f"torch-{OTHER_TORCH}")
    chosen = session.posargs or WITH_OTHER_TORCH
    run_on_vnpu(session, commands, "python", "-m", "pytest", "--durations=25", *chosen)


@nox.session
def cpp_tests(session: nox.Session) -> None:
    """Run the C++ tests of the virtual device. `-- GOOGLETEST OPTIONS` narrows them."""
    session.install("-q", *DEPENDENCY_GROUPS["cpp_tests"])
    build = ROOT / "build" / "cpp_tests"
    options = ["-DVNPU_CPP_TESTS=ON"]
    # Folder in which googletest's wheel puts its sources; elsewhere CMake looks for an installed
    # one.
    sources = Path(session.virtualenv.location) / "src" / "gtest_vendor"
    if sources.is_dir():
        options.append(f"-DVNPU_GTEST_SOURCE={sources}")
    if ccache := shutil.which("ccache"):
        options.append(f"-DCMAKE_CXX_COMPILER_LAUNCHER={ccache}")
    source = ROOT / "packages" / "vnpu"
    session.run("cmake", "-S", str(source), "-B", str(build), "-G", "Ninja", *options, silent=True)
    session.run("cmake", "--build", str(build))
    session.run(str(build / "vnpu_tests"), "--gtest_brief=1", *session.posargs, external=True)


@nox.session(venv_backend="none")
def isolated(session: nox.Session) -> None:
    """Run each package's tests with only the package and its declared requirements. `-- NAMES`
    narrows.
    """
    prepare(session)
    session.run(
        str(SERVING / "bin" / "python"), "ci/isolated_tests.py", *session.posargs, external=True
    )


@nox.session(venv_backend="none")
def conformance(session: nox.Session) -> None:
    """Run other projects' tools and suites against ours: `-- SUITE [--checkout DIR] [NAMES]`.

    Default: the suites that need no checkout of another project's tests.
    """
    commands = prepare(session)
    suites = sorted(path.parent for path in (ROOT / "conformance").glob("*/run.py"))
    known = [suite.name for suite in suites]
    need_none = [suite.name for suite in suites if not (suite / "reasons.toml").exists()]
    chosen = session.posargs[:1] or need_none
    if unknown := set(chosen) - set(known):
        session.error(f"no suite {', '.join(unknown)}: there are {', '.join(known)}")
    for suite in chosen:
        run_on_vnpu(
            session, commands, "python", f"conformance/{suite}/run.py", *session.posargs[1:]
        )


@nox.session(venv_backend="none")
def upstream(session: nox.Session) -> None:
    """Try another vLLM release without changing anything; report the changes that affect our code.

    `-- VERSION` names one; the default is the newest release that installs. `--suite`: all tests.
    """
    prepare(session)
    session.run(sys.executable, "ci/upstream.py", *session.posargs, external=True)


@nox.session(venv_backend="none")
def triton(session: nox.Session) -> None:
    """Run the tests of Triton kernels on older releases of Triton: `-- VERSIONS`."""
    commands = prepare(session)
    for version in session.posargs or OTHER_TRITONS:
        place = ROOT / ".nox" / f"triton-{version}"
        if not place.exists():
            install = ("-m", "pip", "install", "--quiet", "--no-deps", f"--target={place}")
            session.run(sys.executable, *install, f"triton=={version}", external=True)
        tests = ("pytest", "packages/vnpu/tests/triton_backend", "-q")
        run_on_vnpu(session, commands, "python", "-m", *tests, PYTHONPATH=str(place))


@nox.session(venv_backend="none")
def nightly(session: nox.Session) -> None:
    """Run what takes hours: thorough, isolated, benchmarks; one summary. `-- PARTS` narrows."""
    session.run(sys.executable, "ci/nightly.py", *session.posargs, external=True)


@nox.session(venv_backend="none")
def demo(session: nox.Session) -> None:
    """Build everything, then complete prompts with a DeepSeek on one `npu`, then on two.

    VLLM_LOGGING_LEVEL=INFO shows vLLM's own log as well.
    """
    commands = prepare(session, groups=())
    session.log("a report on this environment; meanwhile vLLM loads, for some ten seconds")
    # Compiling C++ leaves time for Python to keep the bytecode of imports.
    variables = {
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
        "PYTHONDONTWRITEBYTECODE": "",
    }
    command = ("python", "ci/demo.py", DEEPSEEK_CHECKPOINT, *session.posargs)
    run_on_vnpu(session, commands, *command, **variables)
    session.log(f"go on with: source {SERVING.relative_to(ROOT)}/bin/activate")
    for model in ("tiny_llama", "tiny_deepseek_v4"):
        session.log(f"            vnpu run -- python examples/generate.py checkpoints/{model}")
    session.log("or start the OpenAI server: python3 -m nox -s serve")


@nox.session(venv_backend="none")
def serve(session: nox.Session) -> None:
    """Start the OpenAI server on the shipped checkpoint. `-- VLLM ARGUMENTS` are added."""
    commands = prepare(session, groups=())
    run_on_vnpu(
        session,
        commands,
        "vllm",
        "serve",
        DENSE_CHECKPOINT,
        "--served-model-name=tiny_llama",
        # Without a timeout, vLLM kills the engine at once when Ctrl-C ends the server.
        "--shutdown-timeout=15",
        *session.posargs,
    )


@nox.session(venv_backend="none")
def dev(session: nox.Session) -> None:
    """Make `.venv` in the repository root with every package installed editable."""
    prepare(session, ROOT / ".venv", "--editable")
    session.log("source .venv/bin/activate, then: vnpu run -- python -m pytest packages/core")


@nox.session(venv_backend="none")
def docs(session: nox.Session) -> None:
    """Write the generated pages under docs/reference. `-- check` fails if one is stale."""
    commands = prepare(session)
    options = ["--check"] if "check" in session.posargs else []
    run_on_vnpu(session, commands, "python", "ci/generate_reference.py", *options)
    if not options:  # takes minutes; a thorough test checks whether it is stale
        run_on_vnpu(session, commands, "python", "ci/verify_calls.py")


@nox.session(venv_backend="none")
def bench(session: nox.Session) -> None:
    """Run a benchmark: `-- GROUP/NAME [options] [--json FILE]`; `-- --list` names them."""
    commands = prepare(session)
    run_on_vnpu(session, commands, "python", "benchmarks/run.py", *session.posargs, PYTHONPATH="ci")


@nox.session(venv_backend="none")
def faults(session: nox.Session) -> None:
    """Inject faults into small engines: `-- --one-in N`, `--page FILE`; see `-- --help`."""
    commands = prepare(session)
    run_on_vnpu(session, commands, "python", "ci/faults.py", *session.posargs)


@nox.session(venv_backend="none")
def soak(session: nox.Session) -> None:
    """Serve mixed requests for a long time: `-- --seconds N`, `--requests N`; see `-- --help`."""
    commands = prepare(session)
    module = "vllm_davinci_testing.engines.soak"
    run_on_vnpu(session, commands, "python", "-m", module, *session.posargs)


@nox.session(venv_backend="none")
def deployments(session: nox.Session) -> None:
    """Dry-run published deployments: `-- NAME...`, or all; results/deployments/page.md."""
    commands = prepare(session)
    session.run(str(commands / "python"), "ci/deployments.py", *session.posargs, external=True)


@nox.session(venv_backend="none")
def step_costs(session: nox.Session) -> None:
    """Model published deployments' steps for the shipped step-time tables: `-- NAME...`.

    `-- --stamp-costs`: sample tables of another timing model, and stamp those whose times are
    unchanged.
    """
    commands = prepare(session)
    shipped = "packages/planner/src/vllm_davinci/planner/step_costs/shipped"
    command = (str(commands / "vllm-davinci"), "deployments", f"--step-costs={shipped}", "--resume")
    session.run(*command, *session.posargs, external=True)


@nox.session(venv_backend="none")
def verify(session: nox.Session) -> None:
    """Run `vllm-davinci verify` on the virtual NPU with modelled times; results/verify."""
    commands = prepare(session)
    chip = ("run", "--chip", "ascend910b3", "--", str(commands / "vllm-davinci"), "verify")
    models = (DENSE_CHECKPOINT, DEEPSEEK_CHECKPOINT, f"{DEEPSEEK_CHECKPOINT}_v4")
    checkpoints = ("--checkpoints", *models)
    where = ("--directory", "results/verify", "--restart")
    session.run(
        str(commands / "vnpu"),
        *(*chip, *where, *checkpoints, *session.posargs),
        external=True,
        env=serving_variables(commands),
    )


@nox.session(venv_backend="none")
def zoo(session: nox.Session) -> None:
    """Serve a small model of every family: `-- NAME...`, or all; results/zoo/page.md."""
    commands = prepare(session)
    run_on_vnpu(session, commands, "python", "ci/zoo.py", *session.posargs)


@nox.session
def clients(session: nox.Session) -> None:
    """Call servers of the shipped checkpoints with published clients; results/clients/page.md.

    openai, anthropic, litellm, lm-eval and vLLM's own. `-- NAME...`: servers whose names begin so.
    """
    commands = prepare(session)
    session.install("-q", *DEPENDENCY_GROUPS["clients"])
    python = Path(session.virtualenv.location) / "bin" / "python"
    program = ("python", "ci/clients/run.py", f"--python={python}")
    run_on_vnpu(session, commands, *program, *session.posargs, PYTHONPATH="ci")


@nox.session
def build(session: nox.Session) -> None:
    """Build the wheel and sdist of every package into dist/ and check their contents.

    Compiled wheels get the manylinux tag of this machine's processor.
    """
    commands = prepare(session)
    session.install("-q", *DEPENDENCY_GROUPS["wheels"])
    shutil.rmtree(ROOT / "dist", ignore_errors=True)
    session.run(str(commands / "python"), "ci/build_wheels.py", *session.posargs, external=True)
    session.run("python", "ci/repair_wheels.py", "dist")
    session.run(str(commands / "python"), "ci/verify_wheels.py", "dist", external=True)


@nox.session(venv_backend="none")
def constraints(session: nox.Session) -> None:
    """Write constraints.txt: the tested files of a release, with hashes."""
    commands = prepare(session)
    session.run(str(commands / "python"), "ci/write_constraints.py", external=True)


@nox.session(venv_backend="none")
def release_check(session: nox.Session) -> None:
    """Fail if a package's sources changed and its version or changelog did not."""
    session.run(sys.executable, "ci/release_check.py", *session.posargs, external=True)
