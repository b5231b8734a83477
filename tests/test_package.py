"""The package as a whole: its public names, its imports, its metadata and a guide."""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
import sys
import types
from importlib.metadata import metadata, version
from pathlib import Path
from typing import Any

import pytest
import yaml

import poecaps
from benchmarks import report
from poecaps.cli.main import main

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "poecaps"


def test_every_public_name_is_there_and_documented() -> None:
    for name in poecaps.__all__:
        assert (getattr(poecaps, name).__doc__ or "").strip(), name


def test_the_version_is_stated_once() -> None:
    assert version("poecaps") == poecaps.__version__


def test_the_package_is_typed() -> None:
    assert (Path(poecaps.__file__).parent / "py.typed").exists()


def test_importing_is_light() -> None:
    """Importing poecaps loads no packages except torch and NumPy, and the commands only a few.

    The arguments of commands can be written without the commands, so that the model card, which
    `poecaps train` writes, can use them.
    """
    program = """if True:
        import sys, numpy, torch

        before = set(sys.modules)

        def loaded():
            names = {name.split(".")[0] for name in set(sys.modules) - before}
            return names - set(sys.stdlib_module_names)

        import poecaps
        assert loaded() == {"poecaps"}, loaded()
        assert "poecaps.export" not in sys.modules

        import poecaps.cli.arguments, poecaps.hub
        from poecaps.kernels.triton import launch, support
        assert loaded() == {"poecaps"}, loaded()
        assert "poecaps.cli.main" not in sys.modules

        import poecaps.cli.main
        heavy = {"fastapi", "huggingface_hub", "matplotlib", "onnx", "pydantic", "sklearn"}
        heavy |= {"triton", "uvicorn"}
        assert not heavy & loaded(), heavy & loaded()
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_citation_states_this_version_and_the_paper() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert cited["cff-version"] == "1.2.0"
    assert cited["version"] == poecaps.__version__
    licence = metadata("poecaps")["License-Expression"]
    assert " AND ".join(cited["license"]) == licence
    (paper,) = cited["references"]
    assert paper["title"] in " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())


def test_the_paper_cites_what_its_bibliography_has_and_its_table_is_that_of_the_results() -> None:
    text = (ROOT / "paper" / "paper.md").read_text(encoding="utf-8")
    entries = (ROOT / "paper" / "paper.bib").read_text(encoding="utf-8")
    assert set(re.findall(r"@([a-z]+\d{4})", text)) == set(
        re.findall(r"^@\w+\{(\w+),", entries, re.M)
    )
    _, header, _ = text.split("---\n", 2)
    assert yaml.safe_load(header)["authors"][0]["name"] == "The poecaps authors"
    assert "<!-- table: paper -->" in text
    assert report.fill(text) == text


def test_the_issue_forms_are_valid() -> None:
    """GitHub silently ignores a form without a name, a description or a valid body."""
    forms = [
        file
        for file in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")
        if file.name != "config.yml"
    ]
    assert {file.stem for file in forms} == {"bug", "feature"}
    for file in forms:
        form = yaml.safe_load(file.read_text(encoding="utf-8"))
        assert form["name"]
        assert form["description"]
        assert {part["type"] for part in form["body"]} <= {
            "markdown",
            "textarea",
            "input",
            "dropdown",
            "checkboxes",
        }
        assert len({part["id"] for part in form["body"]}) == len(form["body"])
        assert all(part["attributes"]["label"] for part in form["body"])


@pytest.fixture
def build_metadata(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """`hatch_build.py`, whose base class is that of the build tool and is not needed here."""
    interface = types.ModuleType("interface")
    interface.MetadataHookInterface = object  # type: ignore[attr-defined]
    name = "hatchling.metadata.plugin.interface"
    monkeypatch.setitem(sys.modules, name, interface)
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("url", ["", "https://host.example/me/poecaps/"])
def test_a_release_makes_the_links_of_the_readme_absolute(
    url: str, build_metadata: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POECAPS_SOURCE_URL", url)
    monkeypatch.setenv("POECAPS_SOURCE_REF", "v1")
    hook = build_metadata.SourceMetadata()
    found: dict[str, Any] = {}
    hook.root = ROOT
    hook.update(found)
    assert found["urls"]["Paper"].startswith("https://arxiv.org/")
    text, own = found["readme"]["text"], (ROOT / "README.md").read_text(encoding="utf-8")
    if not url:
        assert text == own
        assert list(found["urls"]) == ["Paper"]
        return
    links = re.findall(r"\]\(([^)]+)\)", own)
    addresses = re.findall(r"\]\(([^)]+)\)", text)
    assert len(addresses) == len(links)
    for link, address in zip(links, addresses, strict=True):
        if link.startswith("https://"):
            assert address == link
        else:
            base, _, file = address.partition("/v1/")
            file = file.partition("#")[0]
            assert (ROOT / file).is_file()
            kind = "raw" if file.endswith(".png") else "blob"
            assert base == f"https://host.example/me/poecaps/{kind}"


def test_the_workflows_test_every_promised_python_and_publish_nothing_by_themselves() -> None:
    tests, release = (
        yaml.safe_load((ROOT / ".github" / "workflows" / name).read_text(encoding="utf-8"))
        for name in ("tests.yml", "release.yml")
    )
    matrix = tests["jobs"]["tests"]["strategy"]["matrix"]
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    promised = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', text)
    assert matrix["python"] == promised
    assert {each.partition("-")[0] for each in matrix["system"]} == {"ubuntu", "macos", "windows"}
    commands = [step["run"] for step in tests["jobs"]["change"]["steps"] if "run" in step]
    assert [(ROOT / command).is_file() for command in commands] == [True]
    assert "make test-neon" in [step.get("run") for step in tests["jobs"]["neon"]["steps"]]
    jobs = release["jobs"]
    assert (jobs["publish"]["needs"], jobs["build"]["needs"]) == ("build", "change")
    assert commands[0] in [step.get("run") for step in jobs["change"]["steps"]]
    publish = release["jobs"]["publish"]
    assert publish["if"] == "vars.PUBLISH == 'true'"
    assert publish["permissions"] == {"id-token": "write"}
    for workflow in (tests, release):
        assert workflow["permissions"] == {"contents": "read"}


def test_git_ignores_the_output_of_the_documentation_but_no_tracked_files() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git clone")
    made = [
        "mnist-joint.png",
        "mnist-joint.npz",
        "mnist-evaluation.json",
        "digits.png",
        "first.py",
        "runs/demo/x.npz",
    ]
    for names, ignored in (
        (made, made),
        (["docs/images/joint.png", "examples/first.py", "src/poecaps/new.npz"], []),
    ):
        check = ["git", "check-ignore", "--no-index", *names]
        found = subprocess.run(check, cwd=ROOT, capture_output=True, text=True, check=False)
        assert found.stdout.split() == ignored, found.stderr


def test_the_guide_to_own_images_runs_from_end_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its program and its commands, with one epoch and a small model."""
    text = (ROOT / "docs" / "own-images.md").read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("poecaps.evaluation.judge.MAX_EPOCHS", 1)
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    monkeypatch.setattr(
        "poecaps.explorer.server.serve", lambda *_, ready, **__: ready("http://page", "http://page")
    )
    names: dict[str, object] = {}
    for program in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(program, names)
    few = "--batch-size 100 --model.features 8 --model.capsule-dim 4 --device cpu " + " ".join(
        f"--{stage}.epochs 1" for stage in ("autoencoder", "encoder", "decoder", "pixel-decoder")
    )
    lines = [
        line
        for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
        for line in block.replace("\\\n", " ").splitlines()
    ]
    first = [line.split("#")[0].split() for line in lines[:3]]  # on pictures of the reader
    assert [words[1] for words in first] == ["install", "train", "generate"]
    assert first[1][2:] == ["--data", "my/pictures", "--size", "32", "32"]
    assert first[2][2:] == ["runs/pictures"]
    lines = lines[3:]
    assert [line.split()[1] for line in lines] == [
        "train", "train", "train", "train", "generate", "generate", "reconstruct",
        "traverse", "traverse", "explore", "encode", "encode", "evaluate", "info",
    ]  # fmt: skip
    for line in lines:
        words = shlex.split(line, comments=True)[1:]
        if words[0] == "train":
            words += few.split() + ["--no-figures"] * ("--out" not in words)
        assert main(words) == 0
    assert opened == ["http://page"]
    (claimed,) = re.findall(r"```text\n(found .*)\n```", text)
    assert claimed.replace("/home/me", str(tmp_path)) in capsys.readouterr().err.splitlines()
    for name in ("joint", "learned", "reconstructions", "expert-2"):
        assert (tmp_path / "runs" / "shapes" / "figures" / f"{name}.png").is_file()
    assert "linear probe" in (tmp_path / "runs" / "shapes" / "README.md").read_text(
        encoding="utf-8"
    )
