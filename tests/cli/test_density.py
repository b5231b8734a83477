"""`poecaps sample`, `poecaps likelihood` and `poecaps generate --domain model`."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from PIL import Image

import poecaps
from poecaps import likelihood as likelihoods
from poecaps.cli.main import main
from poecaps.code_density import DENSITY_DOMAINS
from poecaps.sampling import Samples, tempering_ladder
from tests.cli.conftest import arrays
from tests.networks import shorten_chains, tiny_network

if TYPE_CHECKING:
    from torch import Tensor

SHORT = ["--chains", "5", "--steps", "12", "--device", "cpu"]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without a density."""
    folder = tmp_path_factory.mktemp("runs") / "plain"
    tiny_network(torch.Generator().manual_seed(0)).save(folder)
    return folder


def drawn(dense: Path, seed: int = 0, steps: int = 12, **options: Any) -> Samples:
    """Draw what the command draws, from Python."""
    generator = torch.Generator().manual_seed(seed)
    return poecaps.load(dense).sample_density(5, steps=steps, generator=generator, **options)


def decoded(dense: Path, capsules: Tensor, **options: Any) -> np.ndarray[Any, Any]:
    with torch.no_grad():
        return poecaps.load(dense).decode_whitened(capsules, **options).numpy()


def drawn_images(path: Path) -> np.ndarray[Any, Any]:
    images: np.ndarray[Any, Any] = arrays(path.with_suffix(".npz"))["images"]
    return images


# --------------------------------------------------------------------------------------------------
# sample


def test_the_last_states_of_the_chains_are_drawn_with_their_diagnostics(
    dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(dense, copy)
    before = set(copy.rglob("*"))
    assert main(["sample", str(copy), *SHORT]) == 0
    *lines, path = capsys.readouterr().out.splitlines()
    assert Path(path) == copy / "figures" / "samples.png"
    made = {"figures", "figures/samples.png", "figures/samples.npz"}
    assert set(copy.rglob("*")) - before == {copy / name for name in made}
    samples = drawn(dense)
    np.testing.assert_allclose(
        drawn_images(Path(path)), decoded(dense, samples.capsules), atol=1e-6
    )
    assert lines == [
        f"acceptance             {samples.acceptance:.2f} (step size {samples.step_size:.3f})",
        f"free energy            {samples.free_energy[-1].mean():.1f}",
        f"effective sample size  {samples.effective_sample_size:.0f} of 20",  # 4 steps at t = 1
        f"split R-hat            {samples.split_rhat:.3f}",
        f"leading R-hat          {samples.leading_rhat:.3f} of 10 coordinates",
        f"autocorrelation time   {samples.autocorrelation_time:.1f} steps of a chain",
    ]


@pytest.mark.parametrize("command", [["sample"], ["generate", "--domain", "model", "--rows", "1"]])
def test_the_same_seed_gives_the_same_picture(
    command: list[str], dense: Path, tmp_path: Path
) -> None:
    options = ["--steps", "6", "--device", "cpu"]
    for name, seed in (("a", "5"), ("b", "5"), ("c", "6")):
        out = ["--seed", seed, "--out", str(tmp_path / f"{name}.png")]
        assert main([*command, str(dense), *options, *out]) == 0
    first, second, other = ((tmp_path / f"{name}.png").read_bytes() for name in "abc")
    assert first == second
    assert first != other


def test_the_options_of_a_sample_are_those_of_the_chains(dense: Path, tmp_path: Path) -> None:
    path = tmp_path / "s.png"
    plain = decoded(dense, drawn(dense).capsules)
    assert main(["sample", str(dense), *SHORT, "--temperature", "4", "--out", str(path)]) == 0
    hot = decoded(dense, drawn(dense, temperature=4.0).capsules)
    np.testing.assert_allclose(drawn_images(path), hot, atol=1e-6)
    assert np.abs(hot - plain).max() > 0.01
    assert main(["sample", str(dense), *SHORT, "--tied", "--out", str(path)]) == 0
    tied = decoded(dense, drawn(dense).capsules, tied=True)
    np.testing.assert_allclose(drawn_images(path), tied, atol=1e-6)
    assert np.abs(tied - plain).max() > 0.01


def test_chains_may_start_at_an_image(dense: Path, noise: Path, tmp_path: Path) -> None:
    options = ["--image", "4", "--data", str(noise), "--show", "--out", str(tmp_path / "s.png")]
    assert main(["sample", str(dense), *SHORT, *options]) == 0
    image = poecaps.data.load(str(noise), split="test").batch([4])
    start = poecaps.load(dense).whitened(image)
    strip = drawn_images(tmp_path / "s-strip.png")
    for chain in range(5):
        np.testing.assert_allclose(strip[0, chain], decoded(dense, start)[0], atol=1e-5)
    last = decoded(dense, drawn(dense, start=start.repeat(5, 1, 1)).capsules)
    np.testing.assert_allclose(drawn_images(tmp_path / "s.png"), last, atol=1e-6)
    assert np.abs(last[0] - last[1]).max() > 0.01  # each chain has random numbers of its own


def test_tempering_prints_how_often_states_were_exchanged(
    dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ["--out", str(tmp_path / "s.png")]
    assert main(["sample", str(dense), *SHORT, *out]) == 0
    assert "exchanges" not in capsys.readouterr().out
    assert main(["sample", str(dense), *SHORT, "--steps", "30", "--temper", "4", *out]) == 0
    (line,) = re.findall(r"^exchanges accepted +(.*)$", capsys.readouterr().out, re.M)
    samples = drawn(dense, steps=30, ladder=tempering_ladder(4))
    assert line.split() == [f"{rate:.2f}" for rate in samples.swap_rates]
    assert len(line.split()) == 3  # pairs of neighbours
    assert any(float(rate) > 0 for rate in line.split())


@pytest.mark.parametrize(("steps", "every"), [(12, 1), (60, 4), (600, 32)])
def test_show_draws_the_chains_over_time(
    steps: int, every: int, dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "s.png"
    assert main(["sample", str(dense), *SHORT, "--steps", str(steps), "--show", "--out", str(path)
                 ]) == 0  # fmt: skip
    strip, animated = (tmp_path / f"s-{name}.png" for name in ("strip", "animation"))
    assert capsys.readouterr().out.splitlines()[-3:] == [str(path), str(strip), str(animated)]
    shown = arrays(strip.with_suffix(".npz"))
    times = list(range(0, steps + 1, every))
    assert shown["steps"].tolist() == times
    assert len(times) <= 20
    assert shown["images"].shape == (len(times), 5, 1, 20, 19)
    if times[-1] == steps:
        np.testing.assert_allclose(shown["images"][-1], drawn_images(path), atol=1e-6)
    with Image.open(animated) as picture:
        assert getattr(picture, "n_frames", 1) == len(times)


def test_a_strip_has_at_most_eight_chains(dense: Path, tmp_path: Path) -> None:
    path = tmp_path / "s.png"
    many = ["--chains", "11", "--steps", "3", "--device", "cpu", "--show", "--out", str(path)]
    assert main(["sample", str(dense), *many]) == 0
    assert len(drawn_images(path)) == 11
    strip = drawn_images(tmp_path / "s-strip.png")
    np.testing.assert_allclose(strip[-1], drawn_images(path)[:8], atol=1e-6)


# --------------------------------------------------------------------------------------------------
# generate --domain model


def test_images_are_generated_from_the_density(
    dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(dense, copy)
    common = ["--domain", "model", "--rows", "1", "--steps", "12", "--device", "cpu"]
    cases: dict[str, tuple[list[str], dict[str, Any]]] = {
        "model": ([], {}),
        "model-2": (["--expert", "2"], {"expert": 2}),
        "tied": (["--tied", "--out", str(copy / "figures" / "tied.png")], {"tied": True}),
        "annealed": (
            ["--temper", "0", "--out", str(copy / "figures" / "annealed.png")],
            {"levels": 0},
        ),
        "tempered": (
            ["--temper", "3", "--out", str(copy / "figures" / "tempered.png")],
            {"levels": 3},
        ),
        "tempered-2": (
            ["--expert", "2", "--temper", "3", "--out", str(copy / "figures" / "tempered-2.png")],
            {"expert": 2, "levels": 3},
        ),
    }
    found = []
    for name, (options, same) in cases.items():
        assert main(["generate", str(copy), *common, *options]) == 0
        path = Path(capsys.readouterr().out.splitlines()[-1])
        assert path == copy / "figures" / f"{name}.png"
        generator = torch.Generator().manual_seed(0)
        images = poecaps.load(dense).generate_from_density(
            20, steps=12, generator=generator, **same
        )
        np.testing.assert_allclose(drawn_images(path), images, atol=1e-6)
        found.append(images)
    assert all((found[0] - other).abs().max() > 0.01 for other in found[1:])


@pytest.mark.parametrize("domain", ["model", "model-experts"])
@pytest.mark.parametrize("low", [0.0, 1.1])
def test_tempered_draws_tell_the_lowest_rate_of_exchange(
    domain: str,
    low: float,
    dense: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("poecaps.cli.generate.LOW_SWAP_RATE", low)
    out = str(tmp_path / "draws.png")
    common = ["--domain", domain, "--rows", "2", "--steps", "30", "--device", "cpu", "--out", out]
    assert main(["generate", str(dense), *common, "--temper", "0"]) == 0
    assert capsys.readouterr().out == f"{out}\n"
    assert main(["generate", str(dense), *common, "--temper", "4"]) == 0
    experts = {"expert": torch.arange(3).repeat(2)} if domain == "model-experts" else {}
    samples = poecaps.load(dense).draw_from_density(
        6 if experts else 40,
        steps=30,
        levels=4,
        generator=torch.Generator().manual_seed(0),
        **experts,
    )
    line = f"lowest swap rate {min(samples.swap_rates):.2f}, between neighbours of 4 temperatures"
    if low:
        line += "; use a --temper above 4"
    assert min(samples.swap_rates) < max(samples.swap_rates)
    assert capsys.readouterr().out == f"{line}\n{out}\n"


def test_a_figure_has_a_column_for_each_of_the_strongest_experts_of_the_density(
    dense: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    network = poecaps.load(dense)
    with torch.no_grad():
        network.require_density().log_strength.copy_(torch.tensor([0.4, 0.1, 0.3]))
    network.save(tmp_path / "run")
    common = ["--domain", "model-experts", "--rows", "2", "--steps", "12", "--device", "cpu"]
    for columns, experts in ((20, [0, 1, 2]), (2, [0, 2])):
        monkeypatch.setattr("poecaps.cli.generate.COLUMNS", columns)
        assert main(["generate", str(tmp_path / "run"), *common]) == 0
        path = Path(capsys.readouterr().out.strip())
        assert path == tmp_path / "run" / "figures" / "model-experts.png"
        assert arrays(path.with_suffix(".npz"))["experts"].tolist() == experts
        images = network.generate_from_density(
            2 * len(experts),
            steps=12,
            expert=torch.tensor(experts * 2),
            generator=torch.Generator().manual_seed(0),
        )
        expected = images.view(2, len(experts), *images.shape[1:])
        np.testing.assert_allclose(drawn_images(path), expected, atol=1e-6)


# --------------------------------------------------------------------------------------------------
# likelihood


@pytest.fixture(scope="module")
def measured(
    dense: Path, noise: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], str]:
    """The JSON file, and what was printed."""
    copy = tmp_path_factory.mktemp("measured") / "run"
    shutil.copytree(dense, copy)
    options = ["--chains", "60", "--steps", "40", "--images", "9", "--device", "cpu"]
    with pytest.MonkeyPatch.context() as patch:
        lines: list[str] = []
        patch.setattr("builtins.print", lambda *words, **_: lines.append(" ".join(map(str, words))))
        assert main(["likelihood", str(copy), "--data", str(noise), *options]) == 0
    assert lines[-1] == f"written to {copy / 'likelihood.json'}"
    return json.loads((copy / "likelihood.json").read_text()), "\n".join(lines)


@pytest.fixture
def network(dense: Path) -> poecaps.CapsuleNetwork:
    return poecaps.load(dense)


@pytest.fixture(scope="module")
def images(noise: Path) -> Tensor:
    """The images of `measured`."""
    return poecaps.data.load(str(noise), split="test").batch(range(9))


def test_the_likelihood_is_the_mean_under_the_estimated_partition_function(
    measured: tuple[dict[str, Any], str], network: poecaps.CapsuleNetwork, images: Tensor
) -> None:
    result, _ = measured
    density = network.require_density()
    generator = torch.Generator().manual_seed(0)
    estimate = likelihoods.estimate_log_partition(density, chains=60, steps=40, generator=generator)
    for name in ("forward", "reverse", "forward_error", "reverse_error", "effective_sample_size"):
        assert result[name] == pytest.approx(getattr(estimate, name), rel=1e-5), name
    assert (result["chains"], result["steps"], result["images"]) == (60, 40, 9)
    stored = network.log_prob(images)  # with the log Z of the file
    likelihoods.fit_log_partition(density, estimate)
    value = network.log_prob(images)
    assert result["log_likelihood"] == pytest.approx(value.mean().item(), rel=1e-4)
    assert result["standard_error"] == pytest.approx(value.std().item() / 3, rel=1e-4)
    log_z = (result["forward"] + result["reverse"]) / 2
    torch.testing.assert_close(value, stored + 1.5 - log_z, rtol=0, atol=1e-3)
    assert abs(log_z - 1.5) > 1


def test_base_measure_and_experts_add_up_to_the_likelihood(
    measured: tuple[dict[str, Any], str], network: poecaps.CapsuleNetwork, images: Tensor
) -> None:
    """With all experts off, what is left of the likelihood is the share of the base measure."""
    result, _ = measured
    density = network.require_density()
    experts = -density.free_energy(network.whitened(images)).mean().item()
    log_z = (result["forward"] + result["reverse"]) / 2
    assert result["base"] + experts - log_z == pytest.approx(result["log_likelihood"], abs=1e-3)
    density.weight.zero_()
    density.origin.zero_()
    density.partition.copy_(torch.tensor([0.0, 0.0, 1.0]))
    assert result["base"] == pytest.approx(network.log_prob(images).mean().item(), abs=1e-3)
    assert abs(result["base"]) > 0.02


def test_the_printed_numbers_are_those_of_the_file(measured: tuple[dict[str, Any], str]) -> None:
    result, text = measured
    half, mean = abs(result["reverse"] - result["forward"]) / 2, result["log_likelihood"]
    for line in (
        f"log Z            {result['forward']:.1f} forward, {result['reverse']:.1f} in reverse",
        f"effective chains {result['effective_sample_size']:.0f} of 60",
        f"log-likelihood   {mean - half:.1f} to {mean + half:.1f} nats above independent capsules",
        f"standard error over 9 images {result['standard_error']:.1f}",
        f"of these         {result['base']:.1f} by the base measure, the others by the experts",
    ):
        assert line in text
    assert "warning" not in text


def test_an_uncertain_partition_function_is_a_printed_warning(
    dense: Path,
    noise: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(likelihoods, "WIDE_BRACKET", -1e6)  # any two estimates are too far apart
    options = [
        "--data",
        str(noise),
        "--chains",
        "4",
        "--steps",
        "3",
        "--out",
        str(tmp_path / "l.json"),
    ]
    assert main(["likelihood", str(dense), *options, "--device", "cpu"]) == 0
    assert "\nwarning: log Z is uncertain: the two estimates are" in capsys.readouterr().out


def test_few_effective_chains_are_a_printed_warning(
    dense: Path, noise: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "l.json"
    for chains, few in ((15, True), (60, False)):
        options = ["--chains", str(chains), "--steps", "40", "--out", str(out), "--device", "cpu"]
        assert main(["likelihood", str(dense), "--data", str(noise), *options]) == 0
        assert (json.loads(out.read_text())["effective_sample_size"] < 16) == few
        warned = "warning: log Z rests on fewer than 16 effective chains" in capsys.readouterr().out
        assert warned == few


def test_the_likelihood_of_all_images_is_measured_if_there_are_fewer_than_asked_for(
    dense: Path, noise: Path, tmp_path: Path
) -> None:
    out = tmp_path / "l.json"
    options = ["--data", str(noise), "--chains", "4", "--steps", "3", "--out", str(out)]
    assert main(["likelihood", str(dense), *options, "--split", "train", "--device", "cpu"]) == 0
    assert json.loads(out.read_text())["images"] == 60


def test_the_likelihood_of_one_image_has_no_standard_error(dense: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "one.npy", np.zeros((1, 20, 19), np.uint8))
    out = tmp_path / "l.json"
    options = ["--data", str(tmp_path / "one.npy"), "--chains", "4", "--steps", "3"]
    assert main(["likelihood", str(dense), *options, "--out", str(out), "--device", "cpu"]) == 0

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    result = json.loads(out.read_text(), parse_constant=refuse)
    assert result["standard_error"] is None
    assert result["log_likelihood"] is not None


# --------------------------------------------------------------------------------------------------
# evaluate


def test_a_model_with_a_density_is_evaluated_on_its_draws(
    dense: Path,
    noise: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shorten_chains(monkeypatch)
    out = tmp_path / "e.json"
    options = ["--data", str(noise), "--samples", "4", "--device", "cpu", "--out", str(out)]
    assert main(["evaluate", str(dense), *options]) == 0
    assert json.loads(out.read_text())["domains"].keys() >= set(DENSITY_DOMAINS)
    text = capsys.readouterr().out
    assert "samples from the energy, domain model\n" in text
    assert "samples from the energy, tied filters, domain model-tied\n" in text
    assert "samples from the energy with one expert on, domain model-experts\n" in text


# --------------------------------------------------------------------------------------------------
# Errors


OTHER_DOMAIN = "--steps, --temper and --tied are options of --domain model and model-experts; add"
OF_IMAGE = "--data, --data-path and --split select the data of --image; add --image as well"
NO_DENSITY = "this model has no density; train one with the preset energy, or with the option"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("generate {dense} --steps 5", OTHER_DOMAIN),
        ("generate {dense} --domain learned --temper 3", OTHER_DOMAIN),
        ("generate {dense} --domain all --tied", OTHER_DOMAIN),
        ("generate {dense} --domain model --expert 3", "expert must be a whole number from 0 to 2"),
        ("generate {dense} --domain model --steps 0", "steps must be a whole number of at least 5"),
        (
            "generate {dense} --domain model --temper 1",
            "temper must be 0, or a whole number of at least 2, but is 1",
        ),
        ("generate {dense} --domain model --temper -2", "temper must be a whole number of at"),
        ("generate {dense} --domain model --rows 0", "rows must be"),
        ("generate {dense} --domain model --steps 2 --out x.jpg", "let it end in .png"),
        (
            "generate {dense} --domain model-experts --expert 1",
            "a column for each; add --domain mod",
        ),
        ("generate {dense} --domain model-experts --rows 0", "rows must be"),
        ("generate {plain} --domain model", NO_DENSITY),
        ("generate {plain} --domain model-experts", NO_DENSITY),
        ("sample {plain}", NO_DENSITY),
        ("sample {plain} --image 0 --data {noise}", NO_DENSITY),
        ("sample {dense} --chains 0", "chains must be a whole number of at least 1"),
        ("sample {dense} --steps 1", "steps must be a whole number of at least 2"),
        ("sample {dense} --seed -1", "seed must be"),
        ("sample {dense} --temper 1", "temper must be a whole number of at least 2, but is 1"),
        ("sample {dense} --temperature 0", "temperature must be above 0"),
        ("sample {dense} --steps 2 --out x.jpg", "let it end in .png"),
        ("sample {dense} --data {noise}", OF_IMAGE),
        ("sample {dense} --split train", OF_IMAGE),
        ("sample {dense} --image 0", "are unknown; give images with --data"),
        ("sample {dense} --image 12 --data {noise}", "image must be a whole number from 0 to 11"),
        ("likelihood {plain} --data {noise}", NO_DENSITY),
        ("likelihood {dense}", "are unknown; give images with --data"),
        ("likelihood {dense} --data {noise} --images 1", "images must be a whole number of at"),
        ("likelihood {dense} --data {noise} --chains 1", "chains must be a whole number of at"),
        ("likelihood {dense} --data {noise} --steps 0", "steps must be a whole number of at least"),
        ("likelihood {dense} --data {noise} --seed -1", "seed must be"),
        ("likelihood {dense} --data {noise} --out x.txt", "--out must name a .json file, but is x"),
    ],
)
def test_misuse_has_status_2_and_one_line_that_names_the_remedy(
    arguments: str,
    message: str,
    dense: Path,
    plain: Path,
    noise: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    before = {*dense.rglob("*"), *plain.rglob("*")}
    paths = {"dense": dense, "plain": plain, "noise": noise}
    assert main([word.format(**paths) for word in arguments.split()]) == 2
    shown = capsys.readouterr()
    (line,) = shown.err.splitlines()
    assert line.startswith("poecaps: ")
    assert message in line
    assert shown.out == ""
    assert {*dense.rglob("*"), *plain.rglob("*")} == before
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "command",
    [
        "sample {dense}",
        "generate {dense} --domain model",
        "generate {dense} --domain model-experts",
    ],
)
def test_a_wrong_name_of_the_picture_is_found_before_the_chains_run(
    command: str, dense: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("the chains run")

    monkeypatch.setattr(poecaps.CapsuleNetwork, "sample_density", forbidden)
    assert main([*command.format(dense=dense).split(), "--out", "x.jpg"]) == 2
    assert "let it end in .png" in capsys.readouterr().err
