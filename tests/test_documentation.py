"""The examples of the documentation run, and its site can be built.

Every Python block and every block of commands in README.md and docs/ is run as printed. The Python
blocks of a page run one after the other, and so do its commands, each page in a new folder. To take
seconds instead of minutes, they run in the smaller setting of the fixture `world`: smaller presets,
fewer bundled images, and a trained model in runs/demo.

A block that cannot be run here states the reason in a comment on the line above it:
``<!-- not run: needs a GPU -->``. It must at least compile, and its options must exist.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.util
import inspect
import json
import re
import shlex
import shutil
import subprocess
import sys
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import pytest
import torch
import tyro
import yaml
from PIL import Image

import poecaps
from benchmarks import colour, criteria, transformations
from benchmarks.study import CLASSES, STUDY
from poecaps import applications, evaluation, export, plotting, sklearn, training
from poecaps.cli.main import main
from poecaps.data import datasets
from poecaps.explorer import server
from poecaps.explorer.render import ExplorerModel
from poecaps.training import PRESETS, Config
from tests.explorer.conftest import serving
from tests.samples import some_of_the_bundled
from tests.systems import needs_links
from tools.check_site import faults

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).parent.parent
PAGES = {
    str(file.relative_to(ROOT)): file
    for file in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
}
FENCE = re.compile(
    r"^(?:<!-- (?P<mark>[^\n]*) -->\n)?```(?P<language>[^\n]*)\n(?P<body>.*?)^```$", re.M | re.S
)
MARK = re.compile(r"not run: \w+( \S+)+")
GENERATED = re.compile(r"<!-- table: [^\n]+ -->\n(?:[^\n]+\n)*")  # by benchmarks.report
# Another name for one of the first two would not be run.
LANGUAGES = {"python", "sh", "text", "math", "bibtex"}
# Number of images of each bundled set, for the Python of MANY and for everything else.
IMAGES = {"many": {"train": 2000, "test": 500}, "few": {"train": 300, "test": 100}}
PICTURES = ("my/pictures",)  # folders of pictures that commands name
EXPLORER = "http://127.0.0.1:8000"  # address of the explorer in the documentation
EXPLORER_TOKEN = "sT0iGkmXw4d7Zq2r"
# Percentages that a page states, and the output that they are compared with.
CLAIMS = {
    "README.md": (r"afterwards about (\d+) %", r"(\d+)% of variance lost"),
    "docs/index.md": (r"It prints (\d+) %", r"(\d+)% of 500 test images"),
}
# Pages that state results, or take parts of a set.
MANY = {*CLAIMS, "docs/how-to/layer.md"}


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    language: str
    body: str
    mark: str | None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    def code(self) -> Any:
        """Compile Python with the line numbers of the page, to which tracebacks then point."""
        return compile(
            "\n" * (self.line - 1) + self.body, PAGES[self.page], "exec", dont_inherit=True
        )

    def commands(self) -> Iterator[list[str]]:
        for line in re.split(r"\n|\|\|", self.body.replace("\\\n", " ")):
            words = shlex.split(line, comments=True)
            if words:
                yield words


def blocks_of(page: str, text: str) -> list[Block]:
    return [
        Block(
            page,
            text.count("\n", 0, found.start("body")) + 1,
            found["language"],
            found["body"],
            found["mark"],
        )
        for found in FENCE.finditer(text)
    ]


BLOCKS = [
    block
    for page, file in PAGES.items()
    for block in blocks_of(page, file.read_text(encoding="utf-8"))
]
MARKED = [block for block in BLOCKS if block.mark is not None]


def to_run(language: str) -> dict[str, list[Block]]:
    found: dict[str, list[Block]] = {}
    for block in BLOCKS:
        if block.language == language and block.mark is None:
            found.setdefault(block.page, []).append(block)
    return found


PYTHON, COMMANDS = to_run("python"), to_run("sh")


# -------------------------------------------------------------------------------------------------
# The smaller setting


def small(config: Config) -> Config:
    model = replace(
        config.model,
        features=8,
        capsule_dim=4,
        experts=((5, 6),),
        joint_components=4,
        expert_components=2,
    )
    stages = (
        "autoencoder",
        "encoder",
        "decoder",
        *(("pixel_decoder",) if config.model.pixel_decoder else ()),
    )
    return replace(
        config, model=model, **{name: replace(getattr(config, name), epochs=1) for name in stages}
    )


@pytest.fixture(scope="module")
def bundled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Make folders like that of the bundled sets, with fewer images."""
    return {
        name: some_of_the_bundled(tmp_path_factory.mktemp(name), count)
        for name, count in IMAGES.items()
    }


@pytest.fixture
def presets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, preset in list(PRESETS.items()):
        monkeypatch.setitem(PRESETS, name, functools.partial(lambda made: small(made()), preset))


@pytest.fixture(scope="module")
def demo(bundled: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a smaller version of the model of `make demo`."""
    folder = tmp_path_factory.mktemp("runs") / "demo"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets, "BUNDLED", bundled["few"])
        poecaps.train(replace(small(PRESETS["default"]()), device="cpu"), folder)
    return folder


@pytest.fixture
def world(
    bundled: dict[str, Path],
    demo: Path,
    presets: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[None]:
    monkeypatch.setattr(datasets, "BUNDLED", bundled["few"])
    shutil.copytree(demo, tmp_path / "runs" / "demo")
    numbers = np.random.default_rng(0)
    for name in PICTURES:
        (tmp_path / name).mkdir(parents=True)
        for index in range(40):
            Image.fromarray(numbers.integers(256, size=(40, 36), dtype=np.uint8)).save(
                tmp_path / name / f"{index}.png"
            )
    monkeypatch.chdir(tmp_path)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


@pytest.fixture
def shell(world: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `poecaps explore` print its address and exit."""
    monkeypatch.setattr(server, "serve", lambda *_, ready, **__: ready(*[f"{EXPLORER}/"] * 2))
    monkeypatch.setattr("webbrowser.open", lambda _: True)


@pytest.fixture
def explorer(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Serve the model mnist on a free port; clients of the documented address find it there."""
    model = ExplorerModel("mnist", "mnist", poecaps.load("mnist"))
    with serving(server.create_app([model], token=EXPLORER_TOKEN)) as address:
        clients: list[httpx.Client] = []

        def client(*, base_url: str, **options: Any) -> httpx.Client:
            clients.append(
                plain(base_url=base_url.replace(EXPLORER, address), trust_env=False, **options)
            )
            return clients[-1]

        plain = httpx.Client
        monkeypatch.setattr(httpx, "Client", client)
        yield
        for each in clients:
            each.close()


# -------------------------------------------------------------------------------------------------
# Blocks that are run


# torch's exporter uses a deprecated part of torch.
@pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")
@pytest.mark.parametrize("page", PYTHON)
def test_python_runs(
    page: str,
    world: None,
    bundled: dict[str, Path],
    request: pytest.FixtureRequest,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if page in MANY:
        monkeypatch.setattr(datasets, "BUNDLED", bundled["many"])
    if any(EXPLORER in block.body for block in PYTHON[page]):
        request.getfixturevalue("explorer")
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in PYTHON[page]:
        exec(block.code(), names)
    if page in CLAIMS:
        said, printed = CLAIMS[page]
        (claim,) = re.findall(said, PAGES[page].read_text(encoding="utf-8"))
        (truth,) = re.findall(printed, capsys.readouterr().out)
        assert abs(int(truth) - int(claim)) <= 3


@pytest.mark.parametrize("page", COMMANDS)
def test_commands_run(page: str, shell: None, capsys: pytest.CaptureFixture[str]) -> None:
    for block in COMMANDS[page]:
        for program, *arguments in block.commands():
            if program == "poecaps":
                status = main(arguments)
                assert status == 0, (
                    f"{block}: poecaps {shlex.join(arguments)}: {capsys.readouterr().err}"
                )
            else:
                check_command(program, arguments)


def check_command(program: str, arguments: list[str]) -> None:
    """Check the arguments of a command that is not ours and would change the machine."""
    if program == "make":
        targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
        assert set(arguments) <= set(targets)
    elif program == ".":
        assert arguments == [".venv/bin/activate"]
    elif program == "pip":
        what = arguments[-1]
        given = re.fullmatch(r"(?:\.|poecaps)(?:\[([\w,]+)\])?", what)
        assert given, f"pip install {what}"
        extras = re.findall(r"^(\w+) = \[", extras_table(), re.M)
        assert set((given[1] or extras[0]).split(",")) <= set(extras)
    else:
        pytest.fail(f"{program} is not run here: mark the block as not run, and state the reason")


def extras_table() -> str:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    return text.split("[project.optional-dependencies]")[1].split("\n[")[0]


def test_ten_lines_are_ten() -> None:
    text = PAGES["README.md"].read_text(encoding="utf-8").split("## Ten lines of Python")[1]
    (example,) = [block for block in blocks_of("README.md", text) if block.language == "python"]
    assert len([line for line in example.body.splitlines() if line.strip()]) == 10


@pytest.mark.parametrize(
    ("data", "pattern"),
    [
        ("mnist", r"normalised mutual information of (0\.\d+)"),
        ("fashion-mnist", r"On Fashion-MNIST it is (0\.\d+)"),
    ],
)
def test_the_readme_quotes_the_measured_information(data: str, pattern: str) -> None:
    study = json.loads((ROOT / "docs" / "results" / f"{data}-study.json").read_text("utf-8"))
    measured = [
        each["evaluation"]["specialisation"]["normalised"]
        for each in study
        if each["variant"] == "default"
    ]
    (quoted,) = re.findall(pattern, " ".join(PAGES["README.md"].read_text("utf-8").split()))
    digits = len(quoted) - 2
    assert f"{np.mean(measured):.{digits}f}" == quoted


# -------------------------------------------------------------------------------------------------
# Blocks that are not run


def parse(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    """Parse a command line without running it; return the exit status."""
    read = tyro.extras.subcommand_cli_from_dict

    def without_effect(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def nothing(*_: Any, **__: Any) -> None:
            pass

        return nothing

    def parsed(commands: dict[str, Callable[..., None]], **options: Any) -> Any:
        return read({name: without_effect(each) for name, each in commands.items()}, **options)

    with monkeypatch.context() as patch:
        patch.setattr(tyro.extras, "subcommand_cli_from_dict", parsed)
        try:
            return main(arguments)
        except SystemExit as end:
            return int(end.code or 0)


class _ParsedError(Exception):
    """The options were parsed, and the program did not run."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options


def parse_benchmark(
    module: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> argparse.Namespace:
    """Parse the command line of a benchmark without running it."""
    read = argparse.ArgumentParser.parse_args

    def parsed(*given: Any, **options: Any) -> None:
        raise _ParsedError(read(*given, **options))

    program = importlib.import_module(module).main
    with monkeypatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", parsed)
        patch.setattr(sys, "argv", [module, *arguments])
        with pytest.raises(_ParsedError) as found:
            program(*([arguments] if inspect.signature(program).parameters else []))
    return found.value.options


def check_benchmark(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that the options of a benchmark exist, if the command runs one."""
    module = next(
        (index for index, word in enumerate(words) if word.startswith("benchmarks.")), None
    )
    if module is None:
        return
    assert words[module - 2 : module] == ["python", "-m"], shlex.join(words)
    options = parse_benchmark(words[module], words[module + 1 :], monkeypatch)
    names = {
        "benchmarks.study": CLASSES if getattr(options, "classes", False) else STUDY,
        "benchmarks.criteria": criteria.STUDY,
        "benchmarks.colour": colour.STUDY,
        "benchmarks.transformations": transformations.STUDY,
    }.get(words[module])
    if names is not None and options.only:
        # A line that is continued within the quotes begins with a blank here.
        assert {name.strip() for name in options.only.split(";")} <= {*names}, options.only


@pytest.mark.parametrize("block", MARKED, ids=str)
def test_blocks_that_are_not_run_state_the_reason_and_are_valid(
    block: Block, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert MARK.fullmatch(block.mark or ""), f"{block}: write <!-- not run: REASON -->"
    if block.language == "python":
        block.code()
        return
    assert block.language == "sh"
    for words in block.commands():
        ours = next((index for index, word in enumerate(words) if word == "poecaps"), None)
        if ours is not None:
            assert parse(words[ours + 1 :], monkeypatch) == 0, shlex.join(words)
        else:
            check_benchmark(words, monkeypatch)


@pytest.mark.parametrize(
    ("command", "error"),
    [
        ('python -m benchmarks.study --onlyy "no routing"', SystemExit),
        ("python -m benchmarks.baselines --samples many", SystemExit),
        ("python -m benchmarks.gone --json FILE", ModuleNotFoundError),
        ('python -m benchmarks.study --only "no routing;no such row"', AssertionError),
        ('python -m benchmarks.study --classes --only "no routing"', AssertionError),
        ('python -m benchmarks.criteria --only "no such row"', AssertionError),
        ("python benchmarks.study", AssertionError),
    ],
)
def test_missing_benchmarks_and_options_are_detected(
    command: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    valid = 'python -m benchmarks.study --only "no routing;CD-3" --json FILE'
    check_benchmark(shlex.split(valid), monkeypatch)
    with pytest.raises(error):
        check_benchmark(shlex.split(command), monkeypatch)


def test_missing_options_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse(["train", "--encoder.epochs", "3"], monkeypatch) == 0
    assert parse(["train", "--encoder.epoch", "3"], monkeypatch) != 0


@pytest.mark.parametrize("page", PAGES)
def test_commands_within_a_line_are_valid(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = FENCE.sub("", PAGES[page].read_text(encoding="utf-8"))
    for command in sorted(set(re.findall(r"`poecaps ([a-z][^`…]*)`", text))):
        assert parse(shlex.split(command), monkeypatch) == 0, command


@pytest.mark.parametrize("page", PAGES)
def test_every_fence_is_a_block(page: str) -> None:
    """Every fence is one of the blocks above, in a language that is run or is not a program."""
    text = PAGES[page].read_text(encoding="utf-8")
    blocks = [block for block in BLOCKS if block.page == page]
    assert 2 * len(blocks) == len(re.findall(r"^\s*(?:```|~~~)", text, re.M))
    assert {block.language for block in blocks} <= LANGUAGES
    marks = [block for block in blocks if block.mark is not None]
    assert len(marks) == len(re.findall("<!-- *not run", text))  # each is above a block


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_of_files_outside_the_site_exist(name: str) -> None:
    for link in re.findall(r"\]\(([^)#]+)[^)]*\)", (ROOT / name).read_text(encoding="utf-8")):
        assert link.startswith("https://") or (ROOT / link).exists(), link


@pytest.mark.parametrize("name", [*PAGES, "CONTRIBUTING.md", "CHANGELOG.md"])
def test_prose_has_at_most_100_columns(name: str) -> None:
    """Tables, images and links without a space may be wider; so may blocks, tested elsewhere."""
    text = FENCE.sub("", (ROOT / name).read_text(encoding="utf-8"))
    text = GENERATED.sub("", text)
    wide = [
        line
        for line in text.splitlines()
        if len(line) > 100 and not line.lstrip().startswith(("|", "![")) and " " in line.strip()
    ]
    assert wide == []


def test_the_citation_of_the_readme_is_that_of_the_citation_file() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    (paper,) = cited["references"]
    (block,) = [block for block in BLOCKS if block.language == "bibtex"]
    software, article = block.body.split("@article")
    assert f"title   = {{{cited['title']}}}" in software
    assert f"version = {{{cited['version']}}}" in software
    assert cited["authors"][0]["name"] in software
    (author,) = paper["authors"]
    assert f"{{{author['family-names']}, {author['given-names']}}}" in article
    assert f"{{{paper['title']}}}" in article
    assert f"{{{paper['year']}}}" in article
    assert paper["identifiers"][0]["value"] in article
    assert paper["url"] in article


# -------------------------------------------------------------------------------------------------
# The site


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy everything that the site is built from to a new folder."""
    if (
        importlib.util.find_spec("zensical") is None
        or importlib.util.find_spec("mkdocstrings_handlers") is None
    ):
        pytest.skip("the extra docs is not installed")
    folder = tmp_path_factory.mktemp("project")
    shutil.copy(ROOT / "zensical.toml", folder)
    shutil.copytree(ROOT / "docs", folder / "docs")
    for name in ("src", "tools"):
        shutil.copytree(
            ROOT / name,
            folder / name,
            ignore=shutil.ignore_patterns("*.safetensors", "*.gz", "__pycache__"),
        )
    return folder


def build(project: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "zensical", "build", "--clean", "--strict"]
    return subprocess.run(command, cwd=project, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def site(project: Path) -> Path:
    result = build(project)
    assert result.returncode == 0, result.stdout + result.stderr
    return project / "site"


def test_the_site_has_no_broken_links_and_loads_nothing_from_other_hosts(site: Path) -> None:
    assert faults(site) == []


def test_every_page_is_in_the_site_and_in_its_navigation(site: Path) -> None:
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    named_there = re.findall(
        r'= "([^"]+\.md)"', (ROOT / "zensical.toml").read_text(encoding="utf-8")
    )
    assert sorted(named_there) == sorted(pages)
    for page in pages:
        assert (site / page).with_suffix(".html").is_file()


def test_equations_are_rendered(site: Path) -> None:
    page = (site / "mathematics.html").read_text(encoding="utf-8")
    source = PAGES["docs/mathematics.md"].read_text(encoding="utf-8")
    assert page.count("<math") == source.count("```math") + len(re.findall(r"\$`.+?`\$", source))
    assert "$<code>" not in page
    unknown_commands = [each for each in re.findall(r"<math.*?</math>", page, re.S) if "\\" in each]
    assert not unknown_commands


def test_the_reference_has_every_public_name(site: Path) -> None:
    inventory = (site / "objects.inv").read_bytes().split(b"\n", 4)[4]
    known = {line.split()[0] for line in zlib.decompress(inventory).decode().splitlines()}
    modules = [
        poecaps,
        poecaps.data,
        poecaps.functional,
        poecaps.sampling,
        poecaps.likelihood,
        applications,
        evaluation,
        export,
        sklearn,
        training,
    ]
    public = {
        f"{each.__name__}.{name}" for each in modules for name in getattr(each, "__all__", ())
    }
    # These modules have their own pages.
    public -= {f"poecaps.{name}" for name in ("data", "functional", "models")}
    public -= {"poecaps.sampling", "poecaps.likelihood"}
    public |= {
        "poecaps.sklearn.CapsuleExpertsTransformer",
        "poecaps.models.names",
        "poecaps.CapsuleNetwork.generate",
    }
    functions = inspect.getmembers(plotting, inspect.isfunction)
    public |= {
        f"poecaps.plotting.{name}"
        for name, each in functions
        if each.__module__ == plotting.__name__ and not name.startswith("_")
    }
    assert public <= known


def test_parameters_that_share_a_description_have_separate_types(site: Path) -> None:
    text = re.sub(r"<[^>]+>", "", (site / "reference" / "layer.html").read_text(encoding="utf-8"))
    assert re.search(r"iterations\s+\(\s*int, default:\s+3", text)
    assert re.search(r"sharpness\s+\(\s*float, default:\s+1\.0", text)


@pytest.fixture
def two_pages(project: Path, tmp_path: Path) -> Path:
    """A site with the options of the documentation, but with two pages only."""
    text = (project / "zensical.toml").read_text(encoding="utf-8")
    pages = 'nav = [{ "Start" = "index.md" }, { "Other" = "other.md" }]'
    text, count = re.subn(r"^nav = \[$.*?^\]$", pages, text, flags=re.M | re.S)
    assert count == 1
    (tmp_path / "zensical.toml").write_text(text, encoding="utf-8")
    for name in ("src", "tools"):
        (tmp_path / name).symlink_to(project / name)
    (tmp_path / "docs").mkdir()
    shutil.copy(project / "docs" / "site.css", tmp_path / "docs")
    (tmp_path / "docs" / "other.md").write_text("# Other\n\n::: poecaps.squash\n")
    return tmp_path


@needs_links
@pytest.mark.parametrize(
    ("faulty", "found"),
    [
        ("[a](other.md#other) [b][poecaps.squash]", ()),
        (
            "[a](gone.md) [b](other.md#gone) [c][poecaps.gone]",
            ("page does not exist", "anchor does not exist", "unresolved autoref"),
        ),
        ("::: poecaps.gone", ("poecaps.gone",)),
    ],
    ids=["none", "links", "names"],
)
def test_faults_stop_the_build(two_pages: Path, faulty: str, found: tuple[str, ...]) -> None:
    page = two_pages / "docs" / "index.md"
    page.write_text(f"# Start\n\n{faulty}\n", encoding="utf-8")
    result = build(two_pages)
    assert (result.returncode != 0) == bool(found), result.stdout + result.stderr
    for each in found:
        assert each in result.stdout + result.stderr


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ('<a href="gone.html">', "does not exist"),
        ('<a href="../gone.html">', "does not exist"),
        ('<a href="#gone">', "no such anchor"),
        ('<img src="gone.png">', "does not exist"),
        ('<script src="https://example.org/x.js"></script>', "fetches"),
        ('<link rel="stylesheet" href="//example.org/x.css">', "fetches"),
        (
            '<img srcset="here.png 1x,https://example.org/x.png 2x">',
            "fetches https://example.org/x.png",
        ),
        ('<img srcset="here.png, gone.png 2x">', "links to gone.png, which does not exist"),
        ('<video src="https://example.org/x.webm"></video>', "fetches"),
        ('<video poster="https://example.org/x.png"></video>', "fetches"),
        ('<video><source src="https://example.org/x.webm"></video>', "fetches"),
        ('<picture><source srcset="https://example.org/x.png"></picture>', "fetches"),
        ('<object data="https://example.org/x.svg"></object>', "fetches"),
        ('<svg><use href="https://example.org/x.svg#a"/></svg>', "fetches"),
        ('<base href="https://example.org/">', "fetches"),
        (
            '<style>p {} @import "https://example.org/x.css";</style>',
            "fetches https://example.org/x.css",
        ),
        (
            "<style>p { background: url(//example.org/x.png) }</style>",
            "fetches //example.org/x.png",
        ),
        ("""<p style="background: url('https://example.org/x.png')">""", "fetches"),
    ],
)
@pytest.mark.parametrize("name", ["index.html", "404.html"])
def test_faults_of_a_page_are_found(name: str, line: str, fault: str, tmp_path: Path) -> None:
    (tmp_path / "here.png").touch()
    (tmp_path / name).write_text(
        '<a href="#here">here</a><a href="https://example.org/">there</a>'
        '<p id="here">url(https://example.org/)'
        '<img srcset="here.png, here.png 2x,data:image/png;base64,AA== 3x">'
        "<style>p { fill: url(#here) }</style>"
    )
    assert faults(tmp_path) == []
    with (tmp_path / name).open("a") as page:
        page.write(line)
    (found,) = faults(tmp_path)
    assert fault in found


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ('@import "https://example.org/x.css";', "fetches https://example.org/x.css"),
        ("@import url(//example.org/x.css);", "fetches //example.org/x.css"),
        (
            "p { background: URL( 'https://example.org/x.png' ) }",
            "fetches https://example.org/x.png",
        ),
        ("@font-face { src: url(gone.woff2) }", "links to gone.woff2, which does not exist"),
        ("p { background: url(/here.png) }", "links to /here.png, which does not exist"),
    ],
)
def test_faults_of_a_style_sheet_are_found(line: str, fault: str, tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text("<p>")
    (tmp_path / "here.png").touch()
    sheet = tmp_path / "assets" / "site.css"
    sheet.parent.mkdir()
    sheet.write_text(
        "/* url(https://example.org/) */ "
        """p { background: url(../here.png), url("data:,<svg fill='url(x)'>") }"""
    )
    assert faults(tmp_path) == []
    with sheet.open("a") as file:
        file.write(line)
    (found,) = faults(tmp_path)
    assert fault in found
    assert "site.css" in found


def test_links_of_the_404_page_start_at_the_root(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text('<p id="here">')
    (tmp_path / "404.html").write_text('<a href="/"></a><a href="/index.html#here"></a>')
    assert faults(tmp_path) == []
    (tmp_path / "404.html").write_text(
        '<img src="/gone.png"><a href="/index.html#gone"></a><a href="/../x"></a>'
    )
    assert len(faults(tmp_path)) == 3
    (tmp_path / "404.html").unlink()
    # The address of the site is not known.
    (tmp_path / "index.html").write_text('<a href="/index.html"></a>')
    assert len(faults(tmp_path)) == 1
