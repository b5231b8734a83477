"""The study of the density: every variant is valid, and a row has its numbers."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from benchmarks import variants
from benchmarks.density import (
    STEPS,
    STUDY,
    draw_from_base,
    energy_with,
    likelihood,
    main,
    measure_draws,
    measured,
    nearest_training_images,
    routing_table,
    story_table,
    table,
)
from benchmarks.internals import changed_options, command_for
from benchmarks.report import numbers
from poecaps import CapsuleNetwork
from poecaps.data import ImageSet, load
from poecaps.energy import GaussianBase
from poecaps.evaluation import load_classifier
from poecaps.options import Architecture, ModelOptions
from poecaps.training import train

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

SMALL: dict[str, Any] = {
    "model__features": 8,
    "model__capsule_dim": 4,
    "model__density__experts": (3, 5),
    "model__density__linear_dims": 2,
    "model__density__base_components": 4,
    "batch_size": 16,
    "autoencoder__epochs": 4,
    "density__epochs": 1,
    "density__chains": 16,
    "density__levels": 4,
    "density__partition_chains": 32,
    "density__partition_steps": 50,
    "encoder__epochs": 0,
    "decoder__epochs": 0,
    "pixel_decoder__epochs": 0,
}


@pytest.mark.parametrize("name", STUDY)
def test_a_variant_is_valid_and_changes_only_its_options(name: str) -> None:
    variant = STUDY[name]
    config = variant.config(data="mnist", seed=3)
    config.validate()
    changed = changed_options(config, variant.preset)
    asked = {"data": "mnist", "seed": 3, **variant.changes}
    assert changed.items() <= asked.items()  # options that all variants share may be the preset's


def test_no_two_variants_are_the_same() -> None:
    commands = [command_for(variant.config()) for variant in STUDY.values()]
    assert len(set(commands)) == len(commands)


@pytest.fixture
def few_digits(monkeypatch: pytest.MonkeyPatch) -> ImageSet:
    """The bundled digits, but only 200 of them."""
    data = load("mnist-sample")
    few = replace(data, images=data.images[:200], labels=None)
    monkeypatch.setattr(variants, "load", lambda *_, **__: few)
    return few


@pytest.mark.usefixtures("same_process", "few_digits")
@pytest.mark.parametrize(("held_out", "seeds"), [(0, [3]), (50, [0, 1])])
def test_a_variant_is_trained_and_measured(
    held_out: int,
    seeds: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(STUDY, "small", energy_with(**SMALL))
    rows = tmp_path / "rows.json"
    arguments = ["--data", "mnist-sample", "--device", "cpu", "--only", "small"]
    arguments += ["--samples", "20", "--steps", "30", "--temperatures", "5", "--levels", "3"]
    arguments += ["--held-out", str(held_out), "--pictures", str(tmp_path / "pictures")]
    main([*arguments, "--seeds", ",".join(map(str, seeds)), "--json", str(rows)])
    found = json.loads(rows.read_text())
    assert [row["seed"] for row in found] == seeds
    for row in found:
        nats = row["nats"]
        assert nats["upper"] - nats["lower"] == pytest.approx(abs(nats["bracket"]))
        assert 0 < nats["effective_chains"] <= 256
        assert row["seconds"]["density"] > 0
        assert row["draws"].keys() >= {"tied", "pixel_decoder", "seconds"}
        assert 0 <= row["draws"]["tied"]["recognisable"] <= 1
        assert row["base_draws"]["tied"] != row["draws"]["tied"]
        assert row["tempered_draws"].keys() >= {"seconds", "swap_rate", *row["base_draws"]}
        for chains in ("draws", "tempered_draws"):
            assert row[chains]["leading_rhat"] > 0.9
        assert row["reconstructions"]["tied"]["frechet"] < row["base_draws"]["tied"]["frechet"]
        assert row["component_reconstructions"] != row["reconstructions"]
        assert row["nearest"]["images"]["tied"] > 0
        assert row["held_out"] == held_out
        assert "--preset energy" in row["command"]
    pictures = list((tmp_path / "pictures").glob("mnist-sample-small-[013]-*.png"))
    assert len(pictures) == 6 * len(seeds)
    capsys.readouterr()
    main(["--table", str(rows)])
    assert f"| small | {len(seeds)} |" in capsys.readouterr().out


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> CapsuleNetwork:
    config = energy_with(**SMALL).config(data="mnist-sample", device="cpu")
    data = load("mnist-sample")
    few = replace(data, images=data.images[:200], labels=None)
    return train(config, tmp_path_factory.mktemp("run") / "run", data=few)


def test_nats_are_those_of_the_network(network: CapsuleNetwork, few_digits: ImageSet) -> None:
    found = likelihood(measured(network), few_digits, temperatures=50, seed=0)
    images = few_digits.batch(slice(None))
    mean = network.log_prob(images).mean().item()
    assert found["lower"] - 0.5 < mean < found["upper"] + 0.5
    density, x = network.require_density(), network.whitened(images)
    difference = (density.free_energy(-x) - density.free_energy(x)).mean().item()
    assert found["above_mirror_images"] == pytest.approx(difference, abs=1e-2)


@pytest.mark.parametrize("normalize", ["inputs", "outputs"])
def test_the_density_of_experts_has_their_free_energy(normalize: str, few_digits: ImageSet) -> None:
    """Trained by contrastive divergence, they have no density of their own."""
    options = ModelOptions(features=8, capsule_dim=4, experts=((3, 5),), normalize=normalize)  # type: ignore[arg-type]
    network = CapsuleNetwork(Architecture.of(options, few_digits.shape))
    with torch.no_grad():
        network.encoders[0].weight.mul_(30)  # type: ignore[operator]
    model = measured(network)
    images = few_digits.batch(range(20))
    energy = model.density.free_energy(model.inputs(images))
    assert energy.std() > 0
    torch.testing.assert_close(energy, network.free_energy(images), rtol=1e-4, atol=1e-5)
    decoded = model.decoders["tied"](model.inputs(images))
    torch.testing.assert_close(decoded, network.decode_capsules(network.capsules(images)))


def test_draws_are_compared_with_images(network: CapsuleNetwork, few_digits: ImageSet) -> None:
    """Images that are drawn as they are have a distance of 0, and none needs a mirror."""
    images = few_digits.batch(slice(None))
    x = network.whitened(images)
    # By position: the first part of the draws are the images, and mirrored draws are black.
    model = replace(
        measured(network),
        decoders={
            "right": lambda part: _matching(part, x, images),
            "wrong way round": lambda part: _matching(-part, x, images),
        },
    )
    found = measure_draws(model, x, few_digits, load_classifier("mnist"))
    assert found["right"]["frechet"] == pytest.approx(0, abs=1e-3)
    assert found["right"]["recognisable"] > 0.9
    assert found["right"]["classes"] > 9
    assert found["right"]["only_mirrored"] == 0
    assert found["wrong way round"]["frechet"] > 100
    assert found["wrong way round"]["only_mirrored"] > 0.9


def _matching(part: Tensor, x: Tensor, images: Tensor) -> Tensor:
    """Return the images whose capsules these are, and black images for all others."""
    exact = "donot_use_mm_for_euclid_dist"
    nearest = torch.cdist(part.flatten(1), x.flatten(1), compute_mode=exact).min(1)
    found = images[nearest.indices]
    return found * (nearest.values < 1e-3).view(-1, 1, 1, 1)


def test_copies_of_training_images_are_near_to_them(
    network: CapsuleNetwork, few_digits: ImageSet
) -> None:
    x = network.whitened(few_digits.batch(slice(None)))
    images = few_digits.batch(slice(None))
    # 10 of the 784 pixels are shifted by 0.5.
    shift = torch.zeros(images[0].numel()).index_fill_(0, torch.arange(10), 0.5)
    decoders = {
        "copies": lambda part: _matching(part, x, images),
        "shifted": lambda part: _matching(part, x, images) + shift.view_as(images[0]),
    }
    model = replace(measured(network), decoders=decoders)
    found = nearest_training_images(model, x, few_digits)
    assert found["copies"] == pytest.approx(0, abs=1e-2)
    assert found["shifted"] == pytest.approx((10 * 0.25) ** 0.5, abs=1e-2)


def test_draws_of_the_base_measure_have_its_variances(network: CapsuleNetwork) -> None:
    density = network.require_density()
    draws = draw_from_base(density, 4000, seed=0)
    assert isinstance(density.base, GaussianBase)
    directions, std = density.base.directions, density.base.std
    variances = (draws.flatten(1) @ directions).var(0)
    torch.testing.assert_close(variances, std.square(), rtol=0.15, atol=0)  # 6 standard errors


def test_a_table_has_a_line_for_each_variant() -> None:
    row = {"variant": "energy", "seed": 0, "nats": {"lower": 1234.4}, "draws": {"seconds": 1.0}}
    failed = {"variant": "Gaussian base", "seed": 0, "failed": "density diverged at step 7"}
    lines = table([row, failed]).splitlines()
    assert lines[2].startswith("| Gaussian base | 1 | density diverged at step 7 |")
    assert lines[3].startswith("| energy | 1 | 1,234 | – |")


def test_the_gain_of_routing_is_bounded_by_the_estimates() -> None:
    """Seed by seed; a seed that only one of the two has is left out."""

    def row(name: str, seed: int, lower: float, upper: float) -> dict[str, Any]:
        draws = {"tied": {"classes": 9.0 + seed, "frechet": 100.0}}
        nats = {"lower": lower, "upper": upper}
        return {"variant": name, "seed": seed, "nats": nats, "draws": draws}

    name = "4 linear coordinates"
    rows = [row(f"{name}, routing", 1, 90, 120), row(name, 0, 1, 2), row(name, 1, 100, 105)]
    (line,) = routing_table(rows).splitlines()[2:]
    assert line.startswith("| 1 | 100 to 105 | 90 to 120 | -15 to +20 | 10.00 |")


def test_the_steps_of_the_story_differ_by_one_option_each() -> None:
    """The densities before and after a step learn for as long, from chains of the same kind."""
    expected = {
        "base": set[str](),  # the base measure alone, and with its experts
        "strengths": {"model.density.strength", "density.strength_rate"},
        "mirror": {"model.density.linear_dims"},
        "routing": {"model.density.iterations"},
    }
    for step, names in expected.items():
        before, *_, after = (
            STUDY[variant].changes
            for _, variant, draws in STEPS[step]
            if draws != "reconstructions"
        )
        different = {
            name for name, value in {**before, **after}.items() if before.get(name) != value
        }
        different |= {name for name, value in before.items() if after.get(name) != value}
        assert different == names, step


def test_the_rows_of_the_story_have_the_current_commands() -> None:
    rows = numbers("mnist-sample", "story")
    assert {row["variant"] for row in rows} == {
        variant for lines in STEPS.values() for _, variant, _ in lines
    }
    for row in rows:
        config = STUDY[row["variant"]].config(data="mnist-sample", seed=0)
        assert row["command"] == command_for(config), row["variant"]
        assert (row["seed"], row["held_out"], row["on"]) == (0, 0, "test")


def test_a_table_of_the_story_has_a_line_for_each_density() -> None:
    def draws(share: float) -> dict[str, Any]:
        measured = {"recognisable": share, "classes": 9.0, "frechet": 99.6, "only_mirrored": 0.25}
        return {"tied": measured}

    (_, variant, _), *_ = STEPS["base"]
    row = {
        "variant": variant,
        "nats": {"lower": 59.96, "upper": 61.0, "base": 0.4},
        "base_draws": draws(0.001),
        "draws": draws(0.5),
        "tempered_draws": draws(0.125),
        "reconstructions": draws(1.0),
    }
    assert story_table([row], "base").splitlines()[2:] == [
        "| Gaussian base measure alone | 0 | 0.1 % | 9.00 | 100 | 25.0 % | – | – | – |",
        "| with experts of strength 1 | 60.0 to 61.0 | 50.0 % | 9.00 | 100 | 25.0 % "
        "| 12.5 % | 9.00 | 100 |",
        "| training images | – | 100.0 % | 9.00 | 100 | 25.0 % | – | – | – |",
    ]
