"""Files, nox sessions and packages that pages name exist."""

import ast
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from vllm_davinci_testing.processes.forked import run_alone

ROOT = Path(__file__).parents[2]
# Directories with build output or installed files.
BUILT = {".nox", ".venv", "build", "dist"}
PAGES = sorted(path for path in ROOT.rglob("*.md") if not BUILT & set(path.relative_to(ROOT).parts))
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
NAMED_FILE = re.compile(r"`((?:packages|tests|benchmarks|ci|examples)/[a-z0-9_/.]+\.[a-z]+)`")
SESSION = re.compile(r"nox -s ([a-z_]+)")


def page_name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_relative_links_lead_to_files(page: Path):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    broken = [
        target
        for target in LINK.findall(text)
        if not re.match(r"[a-z]+:|#", target) and not (page.parent / target.split("#")[0]).exists()
    ]
    assert not broken


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_files_that_pages_name_exist(page: Path):
    # Changelogs and decisions describe the past.
    if page.name == "CHANGELOG.md" or page.parent.name == "decisions":
        return
    named = NAMED_FILE.findall(page.read_text(encoding="utf-8"))
    assert not [name for name in named if not (ROOT / name).exists()]


def test_sessions_that_pages_name_exist():
    tree = ast.parse((ROOT / "noxfile.py").read_text(encoding="utf-8"))
    sessions = {
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        and any("session" in ast.unparse(decorator) for decorator in node.decorator_list)
    }
    named = {
        (page_name(page), session)
        for page in PAGES
        for session in SESSION.findall(page.read_text(encoding="utf-8"))
    }
    assert named, "the pages name no session: has the way to call nox changed?"
    assert not {(page, session) for page, session in named if session not in sessions}


def test_generated_pages_are_fresh():
    script = ROOT / "ci" / "generate_reference.py"
    ended = run_alone(
        f"""
        import runpy, sys
        sys.path.insert(0, {str(script.parent)!r})
        sys.argv = [{script.name!r}, "--check"]
        runpy.run_path({str(script)!r}, run_name="__main__")
        """
    )
    assert ended.status == 0, ended.output


def test_reference_holds_generated_pages_alone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(ROOT / "ci"))
    generate_reference = import_module("generate_reference")
    reference = generate_reference.REFERENCE
    generated = {page for page in generate_reference.pages() if page.parent == reference}
    in_git = {page for page in generated if page.name not in generate_reference.NOT_IN_GIT}
    assert in_git <= set(reference.iterdir()) <= generated


def test_every_session_has_a_description():
    tree = ast.parse((ROOT / "noxfile.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.decorator_list:
            assert ast.get_docstring(node), node.name


def test_every_package_is_in_the_readme_and_has_readme_and_changelog(packages: list[Path]):
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for package in packages:
        assert f"packages/{package.name}" in readme
        for name in ("README.md", "CHANGELOG.md"):
            assert (package / name).is_file(), f"packages/{package.name}/{name}"


def test_every_release_says_what_hardware_has_run_it(packages: list[Path]):
    """Each release in a changelog begins with "Never run on hardware", or with what ran on which
    chip.
    """
    for package in packages:
        text = (package / "CHANGELOG.md").read_text(encoding="utf-8")
        releases = re.findall(r"^## (\S+)\n\n(.*)", text, re.MULTILINE)
        assert releases, package.name
        for version, first_line in releases:
            assert first_line.startswith(("Never run on hardware", "Run on ")), (
                f"packages/{package.name}/CHANGELOG.md, {version}: {first_line}"
            )


def test_the_readme_names_every_command():
    program = [sys.executable, "-m", "vllm_davinci.meta", "--help"]
    asked = subprocess.run(program, capture_output=True, text=True, check=True)
    commands = set(re.search(r"\{([a-z,-]+)\}", asked.stdout)[1].split(","))
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    _, listed = readme.split("the command `vllm-davinci`: ")
    assert len(commands) > 5
    assert set(re.findall(r"`([a-z-]+)`", listed.split("|")[0])) == commands


def test_vllms_commands_in_the_readme_are_valid():
    """Also checks that vLLM knows every option, because vLLM only warns about unknown ones."""
    text = (ROOT / "README.md").read_text(encoding="utf-8").replace("\\\n", " ")
    commands = re.findall(r"^\$ (?:vnpu run -- )?vllm (serve|bench throughput) (.*)$", text, re.M)
    assert {name for name, _ in commands} == {"serve", "bench throughput"}
    ended = run_alone(
        f"""
        import json, shlex, warnings
        from pathlib import Path
        from vllm.benchmarks import throughput
        from vllm.entrypoints.common.cli_args import make_arg_parser
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        # It always warns about the prefix: both options have a default.
        warnings.filterwarnings("error", ".*(in|out)put-len")
        for name, options in {commands!r}:
            parser = FlexibleArgumentParser(exit_on_error=False)
            if name == "serve":
                make_arg_parser(parser).parse_args(shlex.split(options))
                continue
            throughput.add_cli_args(parser)
            asked = parser.parse_args(shlex.split(options))
            throughput.validate_args(asked)
            model = json.loads((Path({str(ROOT)!r}, asked.model) / "config.json").read_text())
            tokens = asked.random_input_len + asked.random_output_len
            assert tokens <= model["max_position_embeddings"], tokens
        """
    )
    assert ended.status == 0, ended.output
