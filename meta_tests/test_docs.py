"""What the pages name exists: targets, modules, options, marks, faults, variables, files, links."""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import importlib.util
import io
import re
import shlex
import subprocess
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from fixtures import options
from fixtures.faults import FAULTS
from fixtures.implementations import REPLACEABLE
from fixtures.options import MARKS

ROOT = Path(__file__).parent.parent
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *DOCS]
MAKEFILE = (ROOT / "Makefile").read_text()
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]

PLACEHOLDER = "package.module"  # stands for what is the reader's own
ANY = {"NODE", "FAULT"}  # for any of them
FOREIGN = {  # variables of commands in the pages that other programs read
    "CUDA_VISIBLE_DEVICES",
    "PYTEST_ADDOPTS",
    "PYTHONPATH",
}
TOP = "docs|fixtures|golden|meta_tests|precision_tests|reports"
PATH = re.compile(rf"(?<![\w/.<-])(?:{TOP})/[\w./-]*\w(?:\.\w+)+(?![\w<*/])")

Problems = Iterator[str]
Config = pytest.Config

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))


# --- what stands in a page ----------------------------------------------------------------------


def fenced(text: str, language: str) -> list[str]:
    return re.findall(rf"(?ms)^```{language}\n(.*?)^```$", text)


def prose(text: str) -> str:
    """Without fenced blocks."""
    return re.sub(r"(?ms)^```.*?^```$", "", text)


def commands_in(text: str) -> Iterator[list[str]]:
    """The words of each command: in blocks of shell, and in code spans that begin like one."""
    spans = re.findall(r"`([^`]+)`", prose(text))
    begin = re.compile(r"(?:[A-Z_]+=\S+ )*(?:make|pytest|python -m|torchrun|pip) ")
    for script in (*fenced(text, "sh"), *filter(begin.match, spans)):
        yield from commands_of(script)


def commands_of(script: str) -> Iterator[list[str]]:
    for line in script.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        words: list[str] = []
        for word in lexer:
            if word in ("&&", "||", ";", "&", "|"):
                yield words
                words = []
            else:
                words.append(word)
        if words:
            yield words


# --- what a command may be ----------------------------------------------------------------------


def problems_of(command: list[str], config: Config) -> Problems:
    """Says of each thing that a command names and that does not exist."""
    words = list(command)
    while words and re.match(r"[A-Z_]+=", words[0]):
        yield from of_variable(words.pop(0).partition("=")[0])
    if not words:
        return
    program, *arguments = words
    if program == "python" and arguments[:1] == ["-m"]:
        program, *arguments = arguments[1:]
        if program not in COMMANDS:
            yield from of_module(program, arguments)
            return
    if program not in COMMANDS:
        yield f"unknown command {program!r}"
        return
    yield from COMMANDS[program](arguments, config)


def of_variable(name: str) -> Problems:
    ours = (path.read_text() for path in (ROOT / "fixtures").rglob("*.py"))
    if name not in FOREIGN and not any(f'"{name}"' in source for source in ours):
        yield f"nothing reads the variable {name}"


def of_path(word: str) -> Problems:
    is_ours = re.match(rf"(?:{TOP})/", word) and "/runs/" not in word
    if is_ours and not (ROOT / word.partition("::")[0]).exists():
        yield f"no file {word}"


def of_module(name: str, arguments: list[str]) -> Problems:
    """A module of ours: it has the options and the subcommand in its source."""
    found = importlib.util.find_spec(name)
    if found is None:
        yield f"no module {name}"
        return
    package = f"{name}.__main__" if found.submodule_search_locations else name
    main = importlib.util.find_spec(package)
    if main is None or main.origin is None:
        yield f"module {name} cannot be run"
        return
    source = Path(main.origin).read_text()
    for word in arguments:
        if word.startswith("-") and f'"{word.partition("=")[0]}"' not in source:
            yield f"{name} has no option {word}"
    if name == "reports" and f'"{arguments[0]}"' not in source:
        yield f"{name} has no command {arguments[0]}"
    if name == "fixtures.faults":
        yield from (
            f"no fault {word}" for word in arguments if word not in FAULTS | dict.fromkeys(ANY)
        )


def of_make(arguments: list[str], _: Config) -> Problems:
    for word in arguments:
        name, equals, _value = word.partition("=")
        if equals and f"$({name})" not in MAKEFILE and f"$(if $({name})" not in MAKEFILE:
            yield f"the Makefile has no variable {name}"
        if not equals and not re.search(rf"(?m)^{re.escape(name)}:", MAKEFILE):
            yield f"the Makefile has no target {name}"


def of_pip(arguments: list[str], _: Config) -> Problems:
    for word in arguments:
        if word.startswith(".["):
            yield from (f"no extra {name}" for name in word[2:-1].split(",") if name not in EXTRAS)
        if word.endswith(".txt") and not (ROOT / word).exists():
            yield f"no file {word}"


def of_torchrun(arguments: list[str], config: Config) -> Problems:
    try:
        with contextlib.redirect_stderr(io.StringIO()) as said:
            parsed: argparse.Namespace = get_args_parser().parse_args(arguments)
    except SystemExit:
        yield f"torchrun: {said.getvalue().splitlines()[-1]}"
        return
    if not parsed.module or parsed.training_script != "pytest":
        yield "torchrun runs something else than -m pytest"
    yield from of_pytest(parsed.training_script_args, config)


def of_pytest(arguments: list[str], config: Config) -> Problems:
    waiting = list(arguments)
    while waiting:
        word = waiting.pop(0)
        if not word.startswith("-"):
            yield from of_path(word)
            continue
        name, equals, value = word.partition("=")
        if not name.startswith("--"):
            name, value = name[:2], name[2:]
        try:
            default = config.getoption(name)
        except ValueError:
            yield f"pytest has no option {name}"
            continue
        takes_value = not isinstance(default, bool) and name not in ("-q", "-v", "-s", "-x")
        if takes_value and not equals and not value:
            value = waiting.pop(0) if waiting else ""
        yield from of_value(name, value, config)


def of_value(name: str, value: str, config: Config) -> Problems:
    """Of an option of pytest; a mere mention of the option has none."""
    if not value or value in ANY:
        return
    lines = config.getini("markers")
    marks = MARKS.keys() | {line.partition(":")[0].partition("(")[0] for line in lines}
    if name in ("-m", "--require"):
        yield from (f"no mark {word}" for word in options.words_of(value) if word not in marks)
    elif name == "--inject" and value not in FAULTS:
        yield f"no fault {value}"
    elif name == "--golden" and value not in options.GOLDEN_MODES:
        yield f"--golden has no mode {value}"
    elif name == "--implementation":
        node, _, place = value.partition("=")
        if node not in REPLACEABLE:
            yield f"{node} takes no implementation"
        yield from of_object(place)
    elif name == "--model":
        yield from of_object(value)


def of_object(place: str) -> Problems:
    """``package.module:name``, also from docs/examples."""
    module, _, name = place.partition(":")
    if module == PLACEHOLDER:
        return
    file = Path(*module.split(".")).with_suffix(".py")
    found = [base / file for base in (ROOT, ROOT / "docs/examples") if (base / file).exists()]
    if not found or not re.search(rf"(?m)^(?:def|class) {name}\b", found[0].read_text()):
        yield f"no {place}"


def of_files(arguments: list[str], _: Config) -> Problems:
    for word in arguments:
        yield from of_path(word)


COMMANDS: dict[str, Callable[[list[str], Config], Problems]] = {
    "make": of_make,
    "pip": of_pip,
    "pytest": of_pytest,
    "torchrun": of_torchrun,
    # Read by their own programs; of their arguments only files are ours.
    **dict.fromkeys(("git", "kubectl", "mypy", "ruff", "sbatch"), of_files),
    "docs/examples/gate_upgrade.sh": of_files,
}


# --- pages --------------------------------------------------------------------------------------


@every_page
def test_commands_name_only_what_exists(page: Path, pytestconfig: Config) -> None:
    found = {
        shlex.join(command): problems
        for command in commands_in(page.read_text())
        if (problems := list(problems_of(command, pytestconfig)))
    }
    assert found == {}


@every_page
def test_links_and_files_exist(page: Path) -> None:
    text = page.read_text()
    linked = [target.partition("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", text)]
    there = [page.parent / target for target in linked if not re.match(r"https?:", target)]
    named = [ROOT / match for match in PATH.findall(text) if "/runs/" not in match]
    assert [str(path) for path in (*there, *named) if not path.exists()] == []


@every_page
def test_blocks_can_be_read_by_what_they_are_written_for(page: Path) -> None:
    text = page.read_text()
    for script in fenced(text, "sh"):
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    for source in fenced(text, "python"):
        ast.parse(source)
    for table in fenced(text, "toml"):
        settings = tomllib.loads(table)["tool"]["precision"]
        assert settings.keys() <= {"drift_fails", "require"}


@every_page
def test_python_examples_import_what_exists(page: Path) -> None:
    for source in fenced(page.read_text(), "python"):
        for statement in ast.walk(ast.parse(source)):
            if isinstance(statement, ast.ImportFrom) and statement.module:
                module = importlib.import_module(statement.module)
                names = [alias.name for alias in statement.names]
                for name in names:
                    if not hasattr(module, name):
                        importlib.import_module(f"{statement.module}.{name}")


@every_page
def test_rows_of_a_table_have_as_many_cells_as_its_head(page: Path) -> None:
    outside_blocks = re.sub(r"(?ms)^```.*?^```$", "", page.read_text())
    for table in re.findall(r"(?m)(?:^\|.*\n)+", outside_blocks):
        assert len({len(re.findall(r"(?<!\\)\|", row)) for row in table.splitlines()}) == 1, table


def test_every_page_stands_in_the_index() -> None:
    index = ROOT / "docs" / "README.md"
    linked = set(re.findall(r"\]\(([^)]+)\)", index.read_text()))
    pages = {str(path.relative_to(index.parent)) for path in DOCS if path != index}
    assert pages - linked == set()


# --- the checks themselves ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        ("make gaet", "the Makefile has no target gaet"),
        ("make gate TROCH=1", "the Makefile has no variable TROCH"),
        ("pytest -m gleu", "no mark gleu"),
        ("pytest --inject=gelu_gone -q", "no fault gelu_gone"),
        ("pytest --no-such-option", "pytest has no option --no-such-option"),
        ("pytest --golden=blass", "--golden has no mode blass"),
        ("pytest precision_tests/test_gone.py", "no file precision_tests/test_gone.py"),
        ("pytest --implementation gelu=gelu_kernel:gone", "no gelu_kernel:gone"),
        ("python -m fixtures.gone", "no module fixtures.gone"),
        ("python -m fixtures.faults gone", "no fault gone"),
        ("python -m reports contrast A B", "reports has no command contrast"),
        ("python -m reports render A --form=x", "reports has no option --form=x"),
        ("PRECISION_GONE=1 pytest", "nothing reads the variable PRECISION_GONE"),
        ("pip install -e '.[gone]'", "no extra gone"),
        ("torchrun --no-such 2 -m pytest", "unrecognized arguments: --no-such"),
        ("torchrun --nnodes 2 -m pytest -m rangs", "no mark rangs"),
        ("true && curl x", "unknown command 'curl'"),
    ],
)
def test_what_does_not_exist_is_found(script: str, problem: str, pytestconfig: Config) -> None:
    found = [said for words in commands_of(script) for said in problems_of(words, pytestconfig)]
    assert any(problem in said for said in found), found


def test_commands_are_found_in_blocks_and_in_spans() -> None:
    page = "See `make gate`, `gelu`.\n\n```sh\nA=1 pytest -m x \\\n  -q & # why\nmake test\n```\n"
    expected = [["A=1", "pytest", "-m", "x", "-q"], ["make", "test"], ["make", "gate"]]
    assert list(commands_in(page)) == expected
