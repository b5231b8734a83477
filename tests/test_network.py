"""Facts about the whole model: scaling, the decoder's rule, the domains of generation, and its files."""

from __future__ import annotations

import itertools
import json
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from poecaps import squash, unsquash
from poecaps._files import ModelError, read_tensors, write_tensors
from poecaps.network import (
    DOMAINS,
    Architecture,
    CapsuleDecoder,
    CapsuleNetwork,
    CodeDensity,
    Preprocessing,
    _by_iteration,
    _leading_eigenvectors,
)
from tests.networks import untrained

if TYPE_CHECKING:
    from pathlib import Path

TINY = Architecture(
    image_shape=(1, 20, 19),
    features=8,
    capsule_dim=4,
    experts=((3, 5),),
    joint_components=4,
    expert_components=2,
)


@pytest.fixture
def network(generator: torch.Generator) -> CapsuleNetwork:
    network = CapsuleNetwork(TINY, generator=generator).eval()
    network.code_density.fit(squash(torch.randn(200, 3, 5, generator=generator)), generator)
    return network


# ---------------------------------------------------------------------------------------------------------
# Scaling


@pytest.mark.parametrize("centre", [False, True])
@pytest.mark.parametrize("whiten", [False, True])
@pytest.mark.parametrize("scale", [None, 0.4])
def test_scaling_does_what_it_is_asked_and_is_undone(
    centre: bool, whiten: bool, scale: float | None, generator: torch.Generator
) -> None:
    turns = torch.linalg.qr(torch.randn(3, 4, 4, generator=generator)).Q
    spread = torch.tensor([1.0, 0.7, 0.5, 0.3])
    a = torch.einsum("bik,ikl->bil", torch.randn(600, 3, 4, generator=generator) * spread, turns)
    a = a + torch.tensor([2.0, -1.0, 0.5, 0.0])
    scaling = Preprocessing(3, 4, centre=centre, scale=scale, whiten=whiten)
    scaling.fit(a.split(100))
    x = scaling.to_capsules(a)
    torch.testing.assert_close(scaling.from_capsules(x), a, rtol=1e-3, atol=1e-3)
    z = unsquash(x)
    if centre:
        assert z.mean(0).abs().max() < 1e-3
    if scale is not None:
        assert z.norm(dim=-1).mean().item() == pytest.approx(scale, rel=1e-3)
    if whiten:
        for i in range(3):
            covariance = torch.cov(z[:, i].T, correction=0)
            torch.testing.assert_close(
                covariance / covariance.diagonal().mean(), torch.eye(4), rtol=0.02, atol=0.02
            )
    if not centre and not whiten and scale is None:
        torch.testing.assert_close(x, squash(a))


@pytest.mark.parametrize("centre", [True, False])
@pytest.mark.parametrize("whiten", [True, False])
def test_levelling_makes_the_leading_directions_equally_strong(
    centre: bool, whiten: bool, generator: torch.Generator
) -> None:
    """By numpy's eigenvalues of all numbers together: the first three come down to the third, the others stay."""
    shared = torch.randn(4000, 3, generator=generator) * torch.tensor([9.0, 6.0, 4.0])
    reach = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [0, 0, 0, 1, 1]]).repeat_interleave(
        4, 1
    )  # of 5 capsules
    a = (
        1.5
        + shared @ (reach * torch.randn(3, 20, generator=generator))
        + torch.randn(4000, 20, generator=generator)
    )
    a = a.view(-1, 5, 4)
    scaling = Preprocessing(5, 4, centre=centre, scale=0.3, whiten=whiten, equalized_components=3)
    plain = Preprocessing(5, 4, centre=centre, scale=0.3, whiten=whiten)
    for each in (scaling, plain):
        each.fit(a.split(900))
    before, after = (
        _spectrum(unsquash(each.to_capsules(a)).flatten(1)) for each in (plain, scaling)
    )
    assert before[0] > 1.5 * before[2]
    assert after[:3].std() < 0.02 * after[0]
    torch.testing.assert_close(after[3:] / after[2], before[3:] / before[2], rtol=0.05, atol=1e-3)
    assert unsquash(scaling.to_capsules(a)).norm(dim=-1).mean().item() == pytest.approx(
        0.3, rel=1e-3
    )
    torch.testing.assert_close(
        scaling.from_capsules(scaling.to_capsules(a)), a, rtol=1e-3, atol=1e-3
    )
    assert scaling.directions is not None
    torch.testing.assert_close(
        scaling.directions.T @ scaling.directions, torch.eye(3), rtol=1e-4, atol=1e-5
    )


def _spectrum(points: Tensor) -> Tensor:
    return torch.linalg.eigvalsh(points.double().T.cov()).flip(0)


def test_levelling_can_be_undone_where_there_is_less_to_level_than_asked(
    generator: torch.Generator,
) -> None:
    a = torch.randn(200, 1, generator=generator) * torch.randn(20, generator=generator)  # a line
    scaling = Preprocessing(5, 4, centre=True, scale=0.3, whiten=False, equalized_components=3)
    scaling.fit([a.view(-1, 5, 4)])
    assert scaling.factors is not None
    assert scaling.factors[0].item() == pytest.approx(0.01, rel=0.01)  # not weakened more than that
    back = scaling.from_capsules(scaling.to_capsules(a.view(-1, 5, 4)))
    torch.testing.assert_close(back, a.view(-1, 5, 4), rtol=1e-3, atol=1e-3)
    with pytest.raises(ValueError, match=r"level must be at most 20"):
        Preprocessing(5, 4, centre=True, scale=None, whiten=False, equalized_components=21)


# ---------------------------------------------------------------------------------------------------------
# The decoder's rule


def test_gradient_of_the_decoding_loss_is_the_rule_written_with_loops(
    generator: torch.Generator,
) -> None:
    experts, d, inputs, k = 3, 4, 5, 2
    decoder = CapsuleDecoder(experts, d, inputs, k, sharpness=2.0, dtype=torch.float64)
    decoder.reset_parameters(std=1.0, generator=generator)
    y = squash(torch.randn(6, experts, d, dtype=torch.float64, generator=generator))
    x = squash(torch.randn(6, inputs, k, dtype=torch.float64, generator=generator))
    decoder.contrastive_divergence(y, x).backward()

    u, e = decoder.weight.detach(), decoder.route(y).coefficients.detach()
    torch.testing.assert_close(e.sum(1), torch.ones(6, inputs, dtype=torch.float64))

    def small(z: Tensor) -> Tensor:
        return z * z.norm() / (1 + z @ z)

    def g(z: Tensor) -> Tensor:
        return z / (1 + z @ z)

    delta = torch.zeros_like(u)
    for n in range(6):
        z_model = [
            sum(e[n, j, i] * u[j, i] @ y[n, j] for j in range(experts)) for i in range(inputs)
        ]
        x_model = [small(z) for z in z_model]  # type: ignore[arg-type]
        y_model = [
            small(sum(e[n, j, i] * u[j, i].T @ x_model[i] for i in range(inputs)))
            for j in range(experts)
        ]  # type: ignore[arg-type]
        for j, i in itertools.product(range(experts), range(inputs)):
            z = x[n, i] / x[n, i].norm() * (x[n, i].norm() / (1 - x[n, i].norm())).sqrt()
            step = torch.outer(g(z), y[n, j]) - torch.outer(g(z_model[i]), y_model[j])  # type: ignore[arg-type]
            delta[j, i] += 2 * e[n, j, i] * step / 6
    torch.testing.assert_close(decoder.weight.grad, -delta, rtol=1e-9, atol=1e-12)


def test_what_the_painter_learns_from_has_a_gradient_in_the_decoder_alone(
    generator: torch.Generator,
) -> None:
    decoder = CapsuleDecoder(3, 4, 5, 2, sharpness=2.0, dtype=torch.float64)
    decoder.reset_parameters(std=1.0, generator=generator)
    y = squash(torch.randn(6, 3, 4, dtype=torch.float64, generator=generator)).requires_grad_()
    pull = torch.randn(6, 5, 2, dtype=torch.float64, generator=generator)
    z = decoder.preactivation(y)
    torch.testing.assert_close(squash(z), decoder(y))
    (z * pull).sum().backward()
    assert y.grad is None
    e = decoder.route(y.detach()).coefficients
    expected = torch.einsum("nji,nik,njd->jikd", e, pull, y.detach())
    torch.testing.assert_close(decoder.weight.grad, expected)


# ---------------------------------------------------------------------------------------------------------
# The whole


def test_a_painter_draws_in_place_of_the_autoencoder(generator: torch.Generator) -> None:
    plain = CapsuleNetwork(TINY, generator=generator).eval()
    network = CapsuleNetwork(replace(TINY, pixel_decoder=True)).eval()
    network.load_state_dict(plain.state_dict(), strict=False)
    assert network.pixel_decoder is not None
    network.pixel_decoder.copy_from(network.autoencoder)
    code = plain.sample(5, "complete", generator=generator)
    torch.testing.assert_close(network.decode(code), plain.decode(code))
    with torch.no_grad():
        network.pixel_decoder.conv2_weight.mul_(2)
    assert not torch.allclose(network.decode(code), plain.decode(code), atol=1e-4)
    images = torch.rand(2, *TINY.image_shape, generator=generator)
    torch.testing.assert_close(network.encode(images), plain.encode(images))


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32), (1, 28, 20)])
def test_images_of_any_kind_go_through(
    shape: tuple[int, int, int], generator: torch.Generator
) -> None:
    network = CapsuleNetwork(
        replace(TINY, image_shape=shape, experts=((6, 5), (3, 4))), generator=generator
    ).eval()
    images = torch.rand(2, *shape, generator=generator)
    assert network.encode(images).shape == (2, 3, 4)
    assert network.reconstruct(images).shape == images.shape
    assert network.free_energy(images).shape == (2,)
    for domain in DOMAINS:
        assert network.generate(2, domain, generator=generator).shape == images.shape


def test_each_position_holds_its_own_capsules(
    network: CapsuleNetwork, generator: torch.Generator
) -> None:
    """Capsule i lies at position i // 2 here (8 features make 2 capsules of 4), channels in order; `draw` undoes it."""
    images = torch.rand(1, 1, 20, 19, generator=generator)
    features = network.autoencoder.encode(images)
    a = network.activations(images)
    rows, columns = features.shape[2:]
    for row, column, half in itertools.product(range(rows), range(columns), range(2)):
        expected = features[0, 4 * half : 4 * half + 4, row, column]
        torch.testing.assert_close(a[0, (row * columns + column) * 2 + half], expected)
    drawn = network.draw(network.capsules(images))
    torch.testing.assert_close(
        drawn, network.autoencoder.decode(features, (20, 19)), rtol=1e-3, atol=1e-4
    )


def test_domains(network: CapsuleNetwork, generator: torch.Generator) -> None:
    for domain in ("complete", "restricted", "learned"):
        code = network.sample(300, domain, expert=1, generator=generator)
        assert bool((code[:, [0, 2]] == 0).all())
        assert bool((code[:, 1].norm(dim=-1) > 0).all())
    agreement = network.code_density.mean_direction[1]
    restricted = network.sample(300, "restricted", expert=1, generator=generator)[:, 1] @ agreement
    complete = network.sample(300, "complete", expert=1, generator=generator)[:, 1] @ agreement
    assert bool((restricted >= 0).all())
    assert 0.3 < (complete > 0).float().mean().item() < 0.7
    assert bool((network.sample(50, "joint", generator=generator).norm(dim=-1) > 0).all())
    anyone = network.sample(300, "learned", generator=generator).norm(dim=-1) > 0
    assert bool((anyone.sum(1) == 1).all())
    assert bool((anyone.sum(0) > 50).all())


def test_densities_have_the_moments_of_the_codes(generator: torch.Generator) -> None:
    """Two clusters of codes, each of them with an expert of its own: both mixtures find them."""
    density = CodeDensity(2, 3, components=2, parts=1)
    z = torch.randn(2000, 2, 3, generator=generator) * torch.tensor([0.5, 0.2, 0.1])
    z[:1000, 0] += 4
    z[1000:, 1] += 4
    density.fit(squash(z), generator)
    drawn = density.sample(20_000, "joint", None, generator)
    first = drawn[:, 0, 0] > 2
    assert 0.47 < first.float().mean().item() < 0.53
    torch.testing.assert_close(drawn[first].mean(0), z[:1000].mean(0), rtol=0.1, atol=0.05)
    torch.testing.assert_close(drawn[first].std(0), z[:1000].std(0), rtol=0.1, atol=0.01)
    learned = density.sample(20_000, "learned", 1, generator)[:, 1]
    own = z[1000:, 1]  # where expert 1 is the strongest
    torch.testing.assert_close(learned.mean(0), own.mean(0), rtol=0.1, atol=0.05)
    torch.testing.assert_close(torch.cov(learned.T), torch.cov(own.T), rtol=0.1, atol=0.05)
    torch.testing.assert_close(density.mean[1], own.mean(0), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(density.deviation[1], own.std(0), rtol=1e-2, atol=1e-3)


def test_the_density_of_one_expert_may_have_several_parts(generator: torch.Generator) -> None:
    density = CodeDensity(1, 2, components=1, parts=2)
    z = torch.randn(1000, 1, 2, generator=generator) * 0.1 + 1
    z[:300] += 3
    density.fit(squash(z), generator)
    drawn = density.sample(4000, "learned", 0, generator)[:, 0, 0]
    high = drawn > 2.5
    assert 0.25 < high.float().mean().item() < 0.35
    assert drawn[high].mean().item() == pytest.approx(4, abs=0.05)
    assert drawn[~high].mean().item() == pytest.approx(1, abs=0.05)


def test_an_expert_that_is_never_the_strongest_is_judged_by_the_images_it_fires_for(
    generator: torch.Generator,
) -> None:
    density = CodeDensity(2, 3, components=2, parts=2)
    z = torch.randn(1000, 2, 3, generator=generator) * 0.1 + 2
    z[:, 0] += 5
    z[:700, 1] = 0
    density.fit(squash(z), generator)
    torch.testing.assert_close(density.mean[1], torch.full((3,), 2.0), rtol=0.05, atol=0)
    z[:, 1] = 0
    density.fit(squash(z), generator)
    assert not density.sample(10, "learned", 1, generator)[:, 1].any()


def test_a_traversal_goes_from_its_start_in_standard_deviations(
    network: CapsuleNetwork, generator: torch.Generator
) -> None:
    offsets = torch.tensor([-1.5, 0.0, 2.0])
    start = squash(torch.randn(3, 5, generator=generator))
    images = network.traverse(2, offsets, start=start)
    assert images.shape == (5, 3, 1, 20, 19)
    z = unsquash(start)
    z[2, 4] += 2.0 * network.code_density.std[2, 4]
    torch.testing.assert_close(
        images[4, 2], network.decode(squash(z).unsqueeze(0))[0], rtol=1e-4, atol=1e-5
    )
    torch.testing.assert_close(
        images[:, 1], network.decode(start.unsqueeze(0)).expand(5, -1, -1, -1)
    )
    assert torch.equal(network.traverse(2, [-1.5, 0, 2], start=start), images)
    assert torch.equal(network.traverse(2), network.traverse(2, (-3, -2, -1, 0, 1, 2, 3)))
    with pytest.raises(ValueError, match=r"offsets must have shape \(S\), but has shape \(\)"):
        network.traverse(2, 1.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expert must be a whole number from 0 to 2"):
        network.traverse(3, offsets)
    with pytest.raises(ValueError, match="start must have shape"):
        network.traverse(0, offsets, start=start[:2])


def test_the_same_seed_gives_the_same_images(network: CapsuleNetwork) -> None:
    first, second, other = (
        network.generate(3, "joint", generator=torch.Generator().manual_seed(seed))
        for seed in (1, 1, 2)
    )
    assert torch.equal(first, second)
    assert not torch.equal(first, other)


def test_drawing_has_no_gradient(network: CapsuleNetwork) -> None:
    assert all(parameter.requires_grad for parameter in network.parameters())
    assert not network.generate(2).requires_grad
    assert not network.traverse(0, torch.zeros(1)).requires_grad
    assert network.decode(network.sample(2)).requires_grad


def test_mistakes_are_named(network: CapsuleNetwork) -> None:
    with pytest.raises(
        ValueError, match=r"domain must be one of .*, but is 'joined'; did you mean 'joint'"
    ):
        network.generate(1, "joined")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expert must be a whole number from 0 to 2, but is 3"):
        network.generate(1, "learned", expert=3)
    with pytest.raises(ValueError, match="expert must be None in the domain 'joint'"):
        network.generate(1, "joint", expert=1)
    with pytest.raises(ValueError, match="features must be a multiple of capsule_dim"):
        CapsuleNetwork(replace(TINY, capsule_dim=3))


@pytest.mark.parametrize("method", ["encode", "reconstruct", "free_energy"])
def test_images_of_another_size_are_refused(network: CapsuleNetwork, method: str) -> None:
    see = getattr(network, method)
    for height, width in ((32, 32), (19, 20), (5, 5)):
        with pytest.raises(ValueError, match=f"^images must be 20×19, but are {height}×{width}$"):
            see(torch.rand(2, 1, height, width))
    with pytest.raises(ValueError, match="C must be that of the model"):
        see(torch.rand(2, 20, 19, 1))
    with pytest.raises(ValueError, match=r"images\.unsqueeze\(0\)"):
        see(torch.rand(1, 20, 19))
    with pytest.raises(TypeError, match=r"must be a torch\.Tensor, but is list"):
        see([0.0])


@pytest.mark.parametrize("method", ["encode", "reconstruct", "free_energy"])
def test_pixels_outside_0_to_1_are_refused(network: CapsuleNetwork, method: str) -> None:
    see, pixels = getattr(network, method), torch.linspace(0, 1, 380).view(1, 1, 20, 19)
    with pytest.raises(
        ValueError, match=r"^images must be from 0 to 1, but reach from 0 to 255; .* images / 255$"
    ):
        see(255 * pixels)
    with pytest.raises(ValueError, match="but reach from -1 to 1; bring them to that range"):
        see(2 * pixels - 1)
    with pytest.raises(ValueError, match="but reach from nan to nan"):
        see(pixels / pixels)
    with pytest.raises(TypeError, match=r"dtype is torch\.uint8; .* images\.float\(\) / 255"):
        see((255 * pixels).to(torch.uint8))
    see(1.0005 * pixels)  # rounding
    assert len(network.activations(255 * pixels)) == 1  # training pays for no check


# ---------------------------------------------------------------------------------------------------------
# Files


def test_what_was_saved_is_loaded(
    network: CapsuleNetwork, tmp_path: Path, generator: torch.Generator
) -> None:
    network.save(tmp_path / "model")
    loaded = CapsuleNetwork.load(tmp_path / "model")
    assert loaded.architecture == network.architecture
    images = torch.rand(2, 1, 20, 19, generator=generator)
    assert torch.equal(loaded.reconstruct(images), network.reconstruct(images))
    assert not any(parameter.requires_grad for parameter in loaded.parameters())
    loaded.reconstruct(images).numpy()  # at once: nothing has a gradient
    loaded.requires_grad_().reconstruct(images).sum().backward()
    assert loaded.encoders[0].weight.grad is not None
    assert not loaded.training


@pytest.fixture
def saved(network: CapsuleNetwork, tmp_path: Path) -> Path:
    network.save(tmp_path)
    return tmp_path


@pytest.fixture
def lively(generator: torch.Generator) -> CapsuleNetwork:
    """A network that answers one image unlike another, as a trained one does."""
    images = torch.rand(200, 1, 20, 19, generator=generator)
    return untrained(replace(TINY, whiten=True), images, generator)


def test_a_model_in_half_precision_is_the_same_to_the_eye(
    lively: CapsuleNetwork, tmp_path: Path, generator: torch.Generator
) -> None:
    """Codes move by less than 0.5 %, no pixel by five grey levels of 255, the mean pixel by less than a quarter."""
    lively.save(tmp_path, half=True)
    loaded = CapsuleNetwork.load(tmp_path)
    assert {tensor.dtype for tensor in loaded.state_dict().values()} == {torch.float32}
    images = torch.rand(50, 1, 20, 19, generator=generator)

    def compare(ours: Tensor, theirs: Tensor) -> None:
        assert not torch.equal(ours, theirs)  # something was rounded
        assert ours.std(0).mean() > 0.02  # and there was something to get wrong
        assert (ours - theirs).abs().max() < 5 / 255
        assert (ours - theirs).abs().mean() < 0.25 / 255

    with torch.no_grad():
        code = lively.encode(images)
        assert (loaded.encode(images) - code).norm() < 0.005 * code.norm()
        compare(lively.reconstruct(images), loaded.reconstruct(images))
        for domain in DOMAINS:
            ours, theirs = (
                each.generate(50, domain, generator=torch.Generator().manual_seed(3))
                for each in (lively, loaded)
            )
            compare(ours, theirs)


def test_half_precision_halves_the_large_and_spares_the_delicate(
    lively: CapsuleNetwork, tmp_path: Path
) -> None:
    lively.save(tmp_path / "whole")
    lively.save(tmp_path / "half", half=True)
    whole, half = (
        (tmp_path / name / "model.safetensors").stat().st_size for name in ("whole", "half")
    )
    assert 0.5 < half / whole < 0.65  # this one is small; a full one comes to 0.51
    written, _ = read_tensors(tmp_path / "half" / "model.safetensors")
    rounded = {name for name, tensor in written.items() if tensor.dtype == torch.float16}
    assert {
        "autoencoder.conv2_weight",
        "encoders.0.weight",
        "decoders.0.weight",
        "density.together.mixture.factor",
    } <= rounded
    exact = lively.state_dict()
    for name in written.keys() - rounded:
        assert torch.equal(written[name], exact[name])
    delicate = {
        name
        for name in exact
        if name.startswith("scaling.") or name.endswith((".mean", ".share", ".balance"))
    }
    assert len(delicate) > 6
    assert not delicate & rounded


def test_numbers_too_large_for_half_precision_are_refused(
    network: CapsuleNetwork, tmp_path: Path
) -> None:
    with torch.no_grad():
        network.decoders[0].weight[1, 2, 3, 4] = -70_000.0  # type: ignore[operator]
    with pytest.raises(
        ValueError, match=r"decoders\.0\.weight reaches 7e\+04, but float16 ends at 65504"
    ):
        network.save(tmp_path / "model", half=True)
    assert not (tmp_path / "model").exists()
    network.save(tmp_path / "model")


def test_numbers_too_small_for_half_precision_stay_as_they_are(
    network: CapsuleNetwork, tmp_path: Path
) -> None:
    with torch.no_grad():
        network.encoders[0].weight.mul_(1e-6)  # type: ignore[operator]
    network.save(tmp_path, half=True)
    loaded = CapsuleNetwork.load(tmp_path)
    assert torch.equal(
        loaded.state_dict()["encoders.0.weight"], network.state_dict()["encoders.0.weight"]
    )
    assert not torch.equal(
        loaded.state_dict()["decoders.0.weight"], network.state_dict()["decoders.0.weight"]
    )


def test_half_precision_is_refused_where_it_was_not_written(
    saved: Path, network: CapsuleNetwork
) -> None:
    """A model that does not say so has lost something, and so has a checkpoint."""
    tensors, about = read_tensors(saved / "model.safetensors")
    lost = tensors | {"encoders.0.weight": tensors["encoders.0.weight"].half()}
    write_tensors(saved / "model.safetensors", lost, about)
    with pytest.raises(
        ModelError, match=r"encoders\.0\.weight is .* of float16, where .* of float32 is due"
    ):
        CapsuleNetwork.load(saved)
    with pytest.raises(
        ModelError, match=r"encoders\.0\.weight is .* of float16, where .* of float32 is due"
    ):
        network.load_tensors(lost, saved / "checkpoint.safetensors")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_missing_or_cut_file_is_one_clear_error(saved: Path, name: str) -> None:
    content = (saved / name).read_bytes()
    for length in (0, 1, 7, 100, len(content) // 2, len(content) - 2):
        (saved / name).write_bytes(content[:length])
        with pytest.raises(ModelError, match=name):
            CapsuleNetwork.load(saved)
    (saved / name).unlink()
    with pytest.raises(FileNotFoundError, match=f"holds no trained model: there is no {name}"):
        CapsuleNetwork.load(saved)


def test_an_altered_weight_is_noticed(saved: Path) -> None:
    content = bytearray((saved / "model.safetensors").read_bytes())
    content[-5] ^= 1
    (saved / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match="do not match their checksum"):
        CapsuleNetwork.load(saved)


def test_foreign_and_newer_files_are_refused(saved: Path) -> None:
    tensors, about = read_tensors(saved / "model.safetensors")
    write_tensors(saved / "model.safetensors", tensors, about | {"version": 99})
    with pytest.raises(
        ModelError, match="has format version 99, but this poecaps knows versions up to 1; upgrade"
    ):
        CapsuleNetwork.load(saved)
    write_tensors(saved / "model.safetensors", tensors, {"format": "other"})
    with pytest.raises(ModelError, match="was not written by poecaps"):
        CapsuleNetwork.load(saved)
    write_tensors(saved / "model.safetensors", {"scaling.mean": tensors["scaling.mean"]}, about)
    with pytest.raises(ModelError, match=r"does not fit its architecture: .* is missing"):
        CapsuleNetwork.load(saved)


@pytest.mark.parametrize("about", ["[]", "null", "{", "3"])
def test_a_file_that_says_nothing_of_itself_is_refused(saved: Path, about: str) -> None:
    import safetensors.torch

    content = (saved / "model.safetensors").read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    tensors = safetensors.torch.load(content)
    metadata = header["__metadata__"] | {"about": about}
    (saved / "model.safetensors").write_bytes(safetensors.torch.save(tensors, metadata))
    with pytest.raises(ModelError, match="none that poecaps wrote"):
        CapsuleNetwork.load(saved)


def test_weights_that_no_model_has_are_refused(saved: Path) -> None:
    tensors, about = read_tensors(saved / "model.safetensors")
    for wrong in (
        tensors["scaling.mean"].double(),
        tensors["scaling.mean"].int(),
        tensors["scaling.mean"] * torch.nan,
    ):
        write_tensors(saved / "model.safetensors", tensors | {"scaling.mean": wrong}, about)
        with pytest.raises(ModelError, match=r"scaling.mean is (.* of (float64|int32)|not finite)"):
            CapsuleNetwork.load(saved)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"features": 10**9}, "does not fit its architecture|no possible architecture"),
        ({"features": "many"}, "no possible architecture"),
        ({"image_shape": 5}, "must be lists"),
        ({"image_shape": [1, 2, 3]}, "no possible architecture"),
        ({"normalize": "sideways"}, "no possible architecture"),
        ({"surprise": 1}, "must describe an architecture by"),
        ({"experts": []}, "no possible architecture"),
        ({"components": 0}, "no possible architecture"),
        ({"scale": "x"}, "no possible architecture"),
    ],
)
def test_a_hostile_config_is_refused_before_anything_is_built(
    saved: Path, changes: dict[str, Any], message: str
) -> None:
    config = json.loads((saved / "config.json").read_text())
    config["architecture"] |= changes
    (saved / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=message):
        CapsuleNetwork.load(saved)


@given(content=st.binary(max_size=200))
def test_random_bytes_are_refused(content: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_bytes(content)
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError):
        CapsuleNetwork.load(folder)
    (folder / "config.json").write_text(
        json.dumps({"format": "poecaps", "version": 1, "architecture": asdict(TINY)})
    )
    with pytest.raises(ModelError):
        CapsuleNetwork.load(folder)


def test_a_failing_write_leaves_the_old_model_whole(
    saved: Path, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = CapsuleNetwork.load(saved).state_dict()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        CapsuleNetwork(TINY, generator=generator).save(saved)
    monkeypatch.undo()
    after = CapsuleNetwork.load(saved).state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert sorted(file.name for file in saved.iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize("points", [5, 26, 60, 200])
def test_leading_eigenvectors_by_iteration_are_those_of_lapack(
    points: int, generator: torch.Generator
) -> None:
    """Of covariances of as many points as a cluster has, some of lower rank, and one that is 0."""
    deviation = torch.linspace(0, 3, 128).exp()
    centred = torch.randn(20, points, 128, generator=generator, dtype=torch.float64) * deviation
    covariance = centred.mT @ centred / points
    covariance[0] = 0
    results = []
    for find in (_by_iteration, _leading_eigenvectors):
        values, vectors = find(covariance, 8)
        results.append((values, vectors * values.clamp(min=0).unsqueeze(1) @ vectors.mT))
    for ours, exact in zip(*results, strict=True):
        torch.testing.assert_close(ours, exact, rtol=1e-3, atol=1e-3 * float(exact.abs().max()))
