"""Facts about the density: its energies, its gradients and its base measures."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from poecaps import functional as F
from poecaps.energy import BallBase, CapsuleDensity, GaussianBase, energy_and_gradient
from poecaps.likelihood import LogPartition, exact_log_partition, fit_log_partition
from poecaps.sampling import DensityTarget
from tests.densities import ZOO, from_zoo, make_density

I, K, J, D = 3, 2, 4, 3  # noqa: E741
OPTIONS = [(axis, agreement) for axis in F.AXES for agreement in F.AGREEMENTS]
BASES: dict[str, dict[str, Any]] = {
    "independent": {},
    "gaussian": {"base_components": 3},
    "ball": {"base": "ball"},
}


def normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def capsules(generator: torch.Generator, count: int = 4) -> Tensor:
    """Capsules inside the unit ball, which both base measures accept."""
    return F.squash(normal(generator, count, I, K))


def density_of(generator: torch.Generator, **options: Any) -> CapsuleDensity:
    return make_density(generator, I, K, J, D, **options)


# --------------------------------------------------------------------------------------------------
# Energies, with plain loops over Python floats


def factor(z: list[float], linear_dims: int, origin: float, strength: float) -> float:
    """(1 + ‖s‖² + ‖max(t + o, 0)‖²)^α of one expert."""
    sphere, line = z[: len(z) - linear_dims], z[len(z) - linear_dims :]
    square = sum(s * s for s in sphere) + sum(max(t + origin, 0.0) ** 2 for t in line)
    return (1 + square) ** strength


def even_experts(x: list[list[float]], w: Any) -> list[list[float]]:
    """z_j = Σ_i W_ij x_i."""
    return [
        [sum(w[i][j][d][k] * x[i][k] for i in range(I) for k in range(K)) for d in range(D)]
        for j in range(J)
    ]


def routed_experts(
    x: list[list[float]], w: Any, sharpness: float, normalize: str, agreement: str
) -> list[list[float]]:
    """z_j = Σ_i (c_ij/c₀) W_ij x_i after three iterations."""
    inputs, experts, dims = range(I), range(J), range(D)
    u = [
        [[sum(w[i][j][d][k] * x[i][k] for k in range(K)) for d in dims] for j in experts]
        for i in inputs
    ]
    b = [[0.0 for _ in experts] for _ in inputs]
    z: list[list[float]] = []
    for iteration in range(3):
        c = [[math.exp(b[i][j]) for j in experts] for i in inputs]
        if normalize == "inputs":
            sums = [sum(c[i][j] for i in inputs) for j in experts]
            c = [[c[i][j] / sums[j] for j in experts] for i in inputs]
        else:
            c = [[value / sum(row) for value in row] for row in c]
        z = [[sum(c[i][j] * u[i][j][d] for i in inputs) for d in dims] for j in experts]
        for i, j in itertools.product(inputs, experts):
            if iteration == 2:
                continue
            dot, norm = sum(u[i][j][d] * z[j][d] for d in dims), math.hypot(*z[j])
            if agreement == "cosine":
                b[i][j] += sharpness * dot / (math.hypot(*u[i][j]) * norm)
            else:
                b[i][j] += sharpness * dot * norm / (1 + norm**2)
    count = I if normalize == "inputs" else J
    return [[count * value for value in row] for row in z]


def free_energies(density: CapsuleDensity, experts: list[list[list[float]]]) -> list[float]:
    strength, origin = density.strength.tolist(), density.origin.tolist()
    return [
        -sum(math.log(factor(z[j], density.linear_dims, origin[j], strength[j])) for j in range(J))
        for z in experts
    ]


@pytest.mark.parametrize("linear_dims", range(D + 1))
def test_the_free_energy_of_even_mixing_is_its_equation(
    linear_dims: int, generator: torch.Generator
) -> None:
    density, x = density_of(generator, linear_dims=linear_dims), 2 * normal(generator, 4, I, K)
    experts = [even_experts(image, density.weight.tolist()) for image in x.tolist()]
    assert density.free_energy(x).tolist() == pytest.approx(free_energies(density, experts))


@pytest.mark.parametrize("linear_dims", [0, 2])
@pytest.mark.parametrize(("normalize", "agreement"), OPTIONS)
def test_the_free_energy_of_routing_is_its_equation(
    normalize: F.Axis, agreement: F.Agreement, linear_dims: int, generator: torch.Generator
) -> None:
    density = density_of(
        generator,
        iterations=3,
        sharpness=2.0,
        normalize=normalize,
        agreement=agreement,
        linear_dims=linear_dims,
    )
    x = normal(generator, 4, I, K)
    experts = [
        routed_experts(image, density.weight.tolist(), 2.0, normalize, agreement)
        for image in x.tolist()
    ]
    assert density.free_energy(x).tolist() == pytest.approx(free_energies(density, experts))


@pytest.mark.parametrize("normalize", F.AXES)
def test_even_mixing_is_routing_without_sharpness(
    normalize: F.Axis, generator: torch.Generator
) -> None:
    """The coefficients are counted in units of the uniform one, which is 1/I or 1/J."""
    density = density_of(generator, normalize=normalize, linear_dims=1)
    x = normal(generator, 4, I, K)
    expected = density.free_energy(x)
    density.iterations, density.sharpness = 3, 1e-9
    assert not density.is_even
    torch.testing.assert_close(density.free_energy(x), expected)
    density.sharpness = 0.0
    assert density.is_even
    torch.testing.assert_close(density.free_energy(x), expected, rtol=0, atol=0)


@pytest.mark.parametrize("linear_dims", range(D + 1))
@pytest.mark.parametrize("iterations", [1, 3])
def test_enumerating_all_states_gives_free_energy_and_probabilities(
    iterations: int, linear_dims: int, generator: torch.Generator
) -> None:
    density = density_of(generator, iterations=iterations, linear_dims=linear_dims, std=2.0)
    assert bool((density.strength % 1 != 0).all())
    x = normal(generator, 5, I, K)
    states = torch.tensor(list(itertools.product([0, 1], repeat=J)))
    energies = torch.stack([density.energy(x, state.expand(5, -1)) for state in states], dim=1)
    torch.testing.assert_close(density.free_energy(x), -torch.logsumexp(-energies, dim=1))
    on = torch.softmax(-energies, dim=1) @ states.double()
    torch.testing.assert_close(density.on_probability(x), on)
    assert not torch.allclose(density.firing_probability(x), on, rtol=0.01)


def test_strength_n_is_that_of_n_experts_that_share_their_weights(
    generator: torch.Generator,
) -> None:
    """On means that at least one of them fires."""
    one, three = density_of(generator, linear_dims=1), make_density(generator, I, K, 3 * J, D)
    three.linear_dims = 1
    with torch.no_grad():
        one.log_strength.fill_(math.log(3))
        three.log_strength.zero_()
        three.weight.copy_(one.weight.repeat(1, 3, 1, 1))
        three.origin.copy_(one.origin.repeat(3))
    x = normal(generator, 5, I, K)
    torch.testing.assert_close(one.free_energy(x), three.free_energy(x))
    torch.testing.assert_close(one.firing_probability(x), three.firing_probability(x)[:, :J])
    silent = (1 - three.on_probability(x)).view(5, 3, J).prod(1)
    torch.testing.assert_close(one.on_probability(x), 1 - silent)


def test_the_strongest_experts_are_those_with_the_largest_strengths() -> None:
    density = CapsuleDensity(1, 2, 4, 3)
    with torch.no_grad():
        density.log_strength.copy_(torch.tensor([2.0, 1.0, 3.0, 1.5]))
    assert density.strongest_experts(3).tolist() == [2, 0, 3]
    assert density.strongest_experts(9).tolist() == [2, 0, 3, 1]
    with pytest.raises(ValueError, match="count must be a whole number of at least 1, but is 0"):
        density.strongest_experts(0)


def test_without_strengths_the_functions_are_those_of_strength_one(
    generator: torch.Generator,
) -> None:
    z, one = normal(generator, 5, J, D), torch.ones(J, dtype=torch.float64)
    on = torch.rand(5, J, generator=generator) < 0.5
    torch.testing.assert_close(F.energy(z, on, one), F.energy(z, on))
    torch.testing.assert_close(F.free_energy(z, strength=one), F.free_energy(z))
    torch.testing.assert_close(F.firing_probability(z, one), F.firing_probability(z))


def test_a_silent_expert_that_is_on_has_infinite_energy_and_none_if_it_is_off() -> None:
    density = CapsuleDensity(I, K, J, D, linear_dims=1, strength=2.5, dtype=torch.float64)
    x = torch.zeros(2, I, K, dtype=torch.float64)
    assert density.energy(x, torch.zeros(2, J)).tolist() == [0.0, 0.0]
    assert density.energy(x, torch.ones(2, J)).tolist() == [math.inf, math.inf]
    assert not density.on_probability(x).any()
    value, gradient = density.free_energy_and_gradient(x, torch.zeros(2, J))
    assert not value.any()
    assert not gradient.any()


def test_an_expert_is_squashed(generator: torch.Generator) -> None:
    density, x = density_of(generator, linear_dims=1), normal(generator, 5, I, K)
    norm = density(x).norm(dim=-1)
    torch.testing.assert_close(norm, density.firing_probability(x))
    assert bool((density(x)[..., -1] >= 0).all())


@pytest.mark.parametrize(("normalize", "agreement"), OPTIONS)
@pytest.mark.parametrize("iterations", [1, 3])
def test_the_free_energy_is_even_without_linear_coordinates_only(
    iterations: int, normalize: F.Axis, agreement: F.Agreement, generator: torch.Generator
) -> None:
    options: dict[str, Any] = {"iterations": iterations, "normalize": normalize}
    density = density_of(generator, agreement=agreement, **options)
    x = normal(generator, 5, I, K)
    torch.testing.assert_close(density.free_energy(-x), density.free_energy(x))
    for density.linear_dims in (1, D):
        difference = (density.free_energy(-x) - density.free_energy(x)).abs()
        assert bool((difference > 1e-6).all())


def test_only_the_forward_side_of_a_line_counts() -> None:
    z = torch.tensor([[[3.0, -1.0, 2.0], [-3.0, 1.0, -2.0]]])
    assert torch.equal(F.forward_side(z, 0), z)
    forward = F.forward_side(z, 2)
    assert forward.tolist() == [[[3.0, 0.0, 2.0], [-3.0, 1.0, 0.0]]]
    shifted = F.forward_side(z, 2, torch.tensor([1.5, -0.5]))
    assert shifted.tolist() == [[[3.0, 0.5, 3.5], [-3.0, 0.5, 0.0]]]


# --------------------------------------------------------------------------------------------------
# Gradients. Autograd through the reference is one route, finite differences another.


@pytest.mark.parametrize("iterations", [1, 3])
@pytest.mark.parametrize("base", BASES)
def test_the_energy_of_a_target_has_its_gradient(
    base: str, iterations: int, generator: torch.Generator
) -> None:
    options = {"iterations": iterations, "linear_dims": 1, "sharpness": 2.0}
    density = density_of(generator, **BASES[base] | options)
    u, on = normal(generator, 4, I * K), torch.rand(4, J, generator=generator) < 0.6
    for states in (None, on.double()):
        target, points = DensityTarget(density, states), u.clone().requires_grad_()
        x = density.base.from_white(points)
        density.backend = "reference"
        value = density.free_energy(x) if states is None else density.energy(x, states)
        (gradient,) = torch.autograd.grad(value.sum(), points)
        density.backend = None
        torch.testing.assert_close(target.energy(u)[0], value.detach())
        torch.testing.assert_close(target.energy(u)[1], gradient)
        assert_is_gradient(target.energy, u)


def assert_is_gradient(function: Any, u: Tensor) -> None:
    """A function gives a value and a gradient; compare it with differences of the value."""
    step, (_, gradient) = 1e-6, function(u)
    for n in range(u.shape[1]):
        change = torch.zeros_like(u)
        change[:, n] = step
        slope = (function(u + change)[0] - function(u - change)[0]) / (2 * step)
        torch.testing.assert_close(gradient[:, n], slope, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(("normalize", "agreement"), OPTIONS)
@pytest.mark.parametrize("iterations", [1, 3])
def test_the_gradient_of_the_free_energy_goes_through_the_routing(
    iterations: int, normalize: F.Axis, agreement: F.Agreement, generator: torch.Generator
) -> None:
    density = density_of(
        generator,
        iterations=iterations,
        sharpness=2.0,
        normalize=normalize,
        agreement=agreement,
        linear_dims=1,
    )
    x, points = normal(generator, 4, I, K), normal(generator, 2, I, K).requires_grad_()
    assert torch.autograd.gradcheck(density.free_energy, points)

    def with_gradient(flat: Tensor) -> tuple[Tensor, Tensor]:
        value, gradient = density.free_energy_and_gradient(flat.view(-1, I, K))
        return value, gradient.flatten(1)

    assert_is_gradient(with_gradient, x.flatten(1))
    torch.testing.assert_close(with_gradient(x.flatten(1))[0], density.free_energy(x).detach())


@pytest.mark.parametrize("iterations", [1, 3])
def test_the_free_energy_has_gradients_in_all_parameters(
    iterations: int, generator: torch.Generator
) -> None:
    density = make_density(generator, 2, 2, 2, 3, iterations=iterations, linear_dims=1)
    x, names = normal(generator, 3, 2, 2), [name for name, _ in density.named_parameters()]

    def free_energy(*parameters: Tensor) -> Tensor:
        result: Tensor = torch.func.functional_call(
            _FreeEnergy(density),
            {f"density.{n}": p for n, p in zip(names, parameters, strict=True)},
            x,
        )
        return result

    assert names == ["weight", "log_strength", "origin"]
    assert torch.autograd.gradcheck(free_energy, tuple(density.parameters()))


class _FreeEnergy(torch.nn.Module):
    def __init__(self, density: CapsuleDensity) -> None:
        super().__init__()
        self.density = density

    def forward(self, x: Tensor) -> Tensor:
        return self.density.free_energy(x)


@pytest.mark.parametrize("iterations", [1, 3])
@pytest.mark.parametrize("base", BASES)
def test_the_score_is_the_gradient_of_the_log_density(
    base: str, iterations: int, generator: torch.Generator
) -> None:
    options = {"iterations": iterations, "linear_dims": 2}
    density = density_of(generator, **BASES[base] | options)
    fit_log_partition(density, partition(-0.5))
    x = capsules(generator).requires_grad_()
    (gradient,) = torch.autograd.grad(density.log_prob(x).sum(), x)
    torch.testing.assert_close(density.score(x), gradient)
    assert not density.score(x).requires_grad


def test_given_states_the_gradient_is_that_of_the_energy(generator: torch.Generator) -> None:
    z = normal(generator, 5, J, D).requires_grad_()
    on = (torch.rand(5, J, generator=generator) < 0.5).double()
    strength = torch.rand(J, dtype=torch.float64, generator=generator) + 0.3
    value, gradient = energy_and_gradient(z.detach(), strength, on)
    (expected,) = torch.autograd.grad(F.energy(z, on, strength).sum(), z)
    torch.testing.assert_close(value, F.energy(z, on, strength).detach())
    torch.testing.assert_close(gradient, expected)


# --------------------------------------------------------------------------------------------------
# Base measures


@pytest.mark.parametrize("base", BASES)
def test_coordinates_of_the_base_measure_can_be_inverted(
    base: str, generator: torch.Generator
) -> None:
    measure = density_of(generator, **BASES[base]).base
    u, x = 3 * normal(generator, 50, I * K), capsules(generator, 50)
    torch.testing.assert_close(measure.to_white(measure.from_white(u)), u)
    torch.testing.assert_close(measure.from_white(measure.to_white(x)), x)


@pytest.mark.parametrize("base", BASES)
def test_the_density_of_the_coordinates_contains_the_determinant(
    base: str, generator: torch.Generator
) -> None:
    """−log base(x(u)) − log|det ∂x/∂u| is the potential, up to a constant."""
    measure = density_of(generator, **BASES[base]).base
    u = 2 * normal(generator, 6, I * K)
    jacobian = torch.stack(
        [
            torch.autograd.functional.jacobian(lambda v: measure.from_white(v).flatten(), v)
            for v in u
        ]
    )
    log_density = measure.log_prob(measure.from_white(u)) + torch.linalg.slogdet(jacobian)[1]
    constant = measure.potential(u)[0] + log_density
    torch.testing.assert_close(constant, constant[:1].expand(6))
    vector = normal(generator, 6, I, K)
    torch.testing.assert_close(
        measure.pull_back(u, vector), torch.einsum("bn,bnm->bm", vector.flatten(1), jacobian)
    )


@pytest.mark.parametrize("base", BASES)
def test_the_potential_has_its_gradient(base: str, generator: torch.Generator) -> None:
    measure = density_of(generator, **BASES[base]).base
    u = normal(generator, 6, I * K).requires_grad_()
    value, gradient = measure.potential(u)
    torch.testing.assert_close(gradient.detach(), torch.autograd.grad(value.sum(), u)[0])


@pytest.mark.parametrize("dim", [1, 2, 3, 8])
def test_the_ball_measure_is_uniform(dim: int, generator: torch.Generator) -> None:
    """‖x‖^K is uniform from 0 to 1, and the mean of x xᵀ is 1/(K+2)."""
    base, count = BallBase(2, dim), 20_000
    x = base.from_white(base.from_noise(normal(generator, count, 2 * dim)))
    share = x.norm(dim=-1) ** dim
    for power in (1, 2, 3):
        error = (share**power).std() / math.sqrt(2 * count)
        assert abs((share**power).mean() - 1 / (power + 1)) < 4 * error
    second = x.flatten(1).T @ x.flatten(1) / count
    expected = torch.eye(2 * dim, dtype=torch.float64) / (dim + 2)
    assert bool(((second - expected).abs() < 4 / math.sqrt(count) / (dim + 2) ** 0.5).all())
    assert bool((x.flatten(1).mean(0).abs() < 4 / math.sqrt(count * (dim + 2))).all())


def test_the_density_of_the_ball_is_one_over_its_volume() -> None:
    volumes = {1: 2.0, 2: math.pi, 3: 4 / 3 * math.pi}
    for dim, volume in volumes.items():
        x = torch.zeros(2, 3, dim, dtype=torch.float64)
        expected = [-3 * math.log(volume)] * 2
        assert BallBase(3, dim).log_prob(x).tolist() == pytest.approx(expected)
        assert BallBase(3, dim).log_ratio(x).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("dim", [1, 2, 8])
def test_no_draw_of_the_ball_leaves_it_by_rounding(
    dim: int, dtype: torch.dtype, generator: torch.Generator
) -> None:
    """Far out, ‖x‖ = ‖u‖/√(1+‖u‖²) would round to 1."""
    density = CapsuleDensity(1, dim, J, D, base="ball", dtype=dtype)
    for scale in (1e2, 1e4, 1e8, 1e15):
        u = (scale * normal(generator, 500, dim)).to(dtype)
        x = density.base.from_white(u)
        assert density.free_energy(x).isfinite().all()  # which refuses capsules outside the ball
        assert density.base.to_white(x).isfinite().all()
        assert bool((x.norm(dim=-1) > 1 - 1e-3).any())


def covariance_of(base: GaussianBase) -> Tensor:
    """V diag(λ) Vᵀ + σ² (1 − V Vᵀ)."""
    v, one = base.directions, torch.eye(len(base.directions), dtype=base.directions.dtype)
    return v @ torch.diag(base.std**2) @ v.T + base.rest_std**2 * (one - v @ v.T)


@pytest.mark.parametrize("components", [0, 1, 4, I * K])
def test_the_gaussian_measure_is_a_gaussian(components: int, generator: torch.Generator) -> None:
    base = density_of(generator, base_components=components).base
    assert isinstance(base, GaussianBase)
    x = normal(generator, 5, I, K)
    zero = torch.zeros(I * K, dtype=torch.float64)
    reference = torch.distributions.MultivariateNormal(zero, covariance_of(base))
    expected = reference.log_prob(x.flatten(1))
    torch.testing.assert_close(base.log_prob(x), expected)
    independent = torch.distributions.Normal(0.0, 1.0).log_prob(x).sum((1, 2))
    torch.testing.assert_close(base.log_ratio(x), expected - independent)
    root = base.from_white(torch.eye(I * K, dtype=torch.float64)).flatten(1)
    torch.testing.assert_close(root @ root.T, covariance_of(base))


def centred(generator: torch.Generator, count: int = 400) -> Tensor:
    """Points with a covariance of distinct variances."""
    scale = torch.tensor([3.0, 2.0, 1.2, 0.7, 0.4, 0.2], dtype=torch.float64)
    turn = torch.linalg.qr(normal(generator, I * K, I * K))[0]
    points = (normal(generator, count, I * K) * scale) @ turn
    return (points - points.mean(0)).view(count, I, K)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("components", [1, 3, I * K])
def test_the_fitted_measure_has_the_principal_variances_and_the_mean_of_the_rest(
    components: int, dtype: torch.dtype, generator: torch.Generator
) -> None:
    x = centred(generator)
    base = GaussianBase(I, K, components, dtype=dtype)
    base.fit(x.to(dtype).split(150))
    exact = x.flatten(1).T @ x.flatten(1) / len(x)
    values, vectors = torch.linalg.eigh(exact)
    values[: I * K - components] = values[: I * K - components].mean()
    expected = vectors @ torch.diag(values) @ vectors.T
    assert base.std.dtype == dtype
    tolerance = 1e-4 if dtype == torch.float32 else 1e-10
    torch.testing.assert_close(covariance_of(base).double(), expected, rtol=0, atol=tolerance)


def test_without_components_the_measure_is_not_fitted(generator: torch.Generator) -> None:
    base = GaussianBase(I, K, dtype=torch.float64)
    base.fit([centred(generator)])
    assert torch.equal(covariance_of(base), torch.eye(I * K, dtype=torch.float64))


def test_variances_are_bounded(generator: torch.Generator) -> None:
    x = centred(generator)
    free, bound = GaussianBase(I, K, 3), GaussianBase(I, K, 3, max_variance=2.0)
    free.fit([x.float()])
    bound.fit([x.float()])
    assert free.std[0] > 2
    torch.testing.assert_close(bound.std, free.std.clamp(max=math.sqrt(2)))
    assert torch.equal(bound.rest_std, free.rest_std)


def test_directions_without_variance_keep_a_small_one(generator: torch.Generator) -> None:
    x = torch.zeros(100, I, K)
    x[:, 0, 0] = torch.randn(100, generator=generator)
    base = GaussianBase(I, K, 2)
    base.fit([x - x.mean(0)])
    assert 0 < base.std[1] < 1e-2
    assert 0 < base.rest_std < 1e-2
    assert base.to_white(x).isfinite().all()


# --------------------------------------------------------------------------------------------------
# Log-likelihood


def partition(value: float) -> LogPartition:
    return LogPartition(value, value, 0.0, 0.0, 1.0, 2, 1)


@pytest.mark.parametrize("name", [name for name in ZOO if "ball" not in name])
def test_the_density_integrates_to_one(name: str, generator: torch.Generator) -> None:
    """Over a grid of Lebesgue measure, with log Z by Gauss–Hermite quadrature."""
    density = from_zoo(name, generator)
    fit_log_partition(density, partition(exact_log_partition(density, 40)))
    assert isinstance(density.base, GaussianBase)
    reach = 8 * max(1.0, *density.base.std.tolist(), 0.0)
    nodes = (np.arange(90) + 0.5) / 90 * 2 * reach - reach
    size = density.in_capsules * density.in_dim
    grid = torch.cartesian_prod(*[torch.from_numpy(nodes)] * size)
    with torch.no_grad():
        log_prob = density.log_prob(grid.view(-1, density.in_capsules, density.in_dim))
    total = torch.logsumexp(log_prob, 0) + size * math.log(2 * reach / 90)
    assert total.exp().item() == pytest.approx(1, abs=2e-3)


def test_the_log_ratio_is_relative_to_the_base_measure(generator: torch.Generator) -> None:
    density, x = density_of(generator, base_components=2), normal(generator, 5, I, K)
    fit_log_partition(density, LogPartition(1.0, 1.5, 0.1, 0.1, 3.0, 2, 1))
    assert density.log_partition == 1.25
    torch.testing.assert_close(density.log_ratio(x), -density.free_energy(x) - 1.25)
    torch.testing.assert_close(density.log_prob(x) - density.base.log_prob(x), density.log_ratio(x))


@pytest.mark.parametrize("linear_dims", [0, 2])
def test_experts_of_the_components_alone_are_a_smaller_density(
    linear_dims: int, generator: torch.Generator
) -> None:
    """P(x) is the density of the principal components times independent noise."""
    density = make_density(generator, 3, 2, 4, 3, linear_dims=linear_dims, base_components=2)
    base = density.base
    assert isinstance(base, GaussianBase)
    density.partition.copy_(torch.tensor([1.5, 2.5, 1.0]))
    density.extend(density.restrict())  # from here on, they read the components alone
    restricted = density.restrict()
    x = torch.randn(20, 3, 2, dtype=torch.float64, generator=generator)
    y = density.components(x)
    assert y.shape == (20, 1, 2)
    torch.testing.assert_close(restricted.free_energy(y), density.free_energy(x))
    assert restricted.log_partition == density.log_partition == 2
    noise = x.flatten(1) - y[:, 0] @ base.directions.T
    normal = torch.distributions.Normal(0.0, base.rest_std)
    # 4 of the 6 directions of the noise; in the other two it is 0, where the density is that at 0.
    density_of_noise = normal.log_prob(noise).sum(1) - 2 * normal.log_prob(torch.tensor(0.0))
    expected = restricted.log_prob(y) + density_of_noise
    torch.testing.assert_close(density.log_prob(x), expected)
    torch.testing.assert_close(
        restricted.base.log_prob(y) - restricted.base.log_ratio(y),
        torch.distributions.Normal(0.0, 1.0).log_prob(y).sum((1, 2)),
    )


def test_restricting_leaves_other_directions_out_and_extending_is_its_inverse(
    generator: torch.Generator,
) -> None:
    density = make_density(generator, 3, 2, 4, 3, linear_dims=1, base_components=2)
    assert isinstance(density.base, GaussianBase)
    v, before = density.base.directions, density.even_matrix().detach()
    restricted = density.restrict()
    density.extend(restricted)
    torch.testing.assert_close(density.even_matrix().detach(), v @ (v.T @ before))
    again = density.restrict()
    torch.testing.assert_close(again.weight, restricted.weight)
    with torch.no_grad():
        for parameter in again.parameters():
            parameter.add_(1)
    assert not torch.allclose(density.strength, again.strength)  # they are copies
    density.extend(again)
    for name, parameter in again.named_parameters():
        torch.testing.assert_close(density.restrict().get_parameter(name), parameter)


@pytest.mark.parametrize("options", [{}, {"base_components": 2, "iterations": 3}, {"base": "ball"}])
def test_only_even_experts_can_be_restricted_to_components(
    options: dict[str, Any], generator: torch.Generator
) -> None:
    density = make_density(generator, 3, 2, 4, 3, **options)
    assert not density.has_components
    for call in (density.restrict, lambda: density.components(torch.zeros(1, 3, 2))):
        with pytest.raises(ValueError, match=r"even mixing .* and base_components above 0"):
            call()


def test_new_parameters_forget_the_partition_function(generator: torch.Generator) -> None:
    density = density_of(generator, strength=2.0)
    fit_log_partition(density, partition(1.0))
    density.reset_parameters()
    with pytest.raises(ValueError, match=r"log Z is not known yet; estimate it with"):
        density.log_ratio(normal(generator, 5, I, K))
    torch.testing.assert_close(density.strength, torch.full((J,), 2.0, dtype=torch.float64))
    assert not density.origin.any()


# --------------------------------------------------------------------------------------------------
# What a caller can get wrong


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"strength": 0.0}, ValueError, "strength must be above 0, but is 0.0"),
        ({"strength": -1.0}, ValueError, "strength must be above 0, but is -1.0"),
        ({"strength": math.nan}, ValueError, "strength must be a finite number of at least 0"),
        ({"strength": "5"}, TypeError, "strength must be a number of at least 0, but is '5'"),
        ({"linear_dims": -1}, ValueError, f"linear_dims must be .* from 0 to {D}, but is -1"),
        ({"linear_dims": D + 1}, ValueError, f"linear_dims must be .* from 0 to {D}, but is 4"),
        ({"linear_dims": 1.5}, TypeError, "linear_dims must be a whole number"),
        ({"base": "bal"}, ValueError, "base must be one of .*; did you mean 'ball'"),
        (
            {"base": "ball", "base_components": 2},
            ValueError,
            "base_components must be 0 with base='ball', but is 2; only the Gaussian",
        ),
        ({"base_components": I * K + 1}, ValueError, "components must be .* from 0 to 6"),
        ({"base_max_variance": 0.0}, ValueError, "max_variance must be above 0"),
        ({"iterations": 0}, ValueError, "iterations must be"),
    ],
)
def test_invalid_options_are_an_error(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        CapsuleDensity(I, K, J, D, **options)


def test_invalid_capsules_are_an_error(generator: torch.Generator) -> None:
    density, x = density_of(generator), normal(generator, 5, I, K)
    wrong = x.clone()
    wrong[1, 2, 0] = math.nan
    for function in (
        density.free_energy,
        density.preactivation,
        density.firing_probability,
        density.on_probability,
        density.score,
        density,
        lambda x: density.energy(x, torch.ones(5, J)),
    ):
        with pytest.raises(ValueError, match=r"x must be finite, but x\[1, 2\]"):
            function(wrong)
        with pytest.raises(ValueError, match=r"x must have shape \(B, I=3, K=2\)"):
            function(x[:, :2])
        with pytest.raises(TypeError, match=r"x is torch.float32 but the layer's weight is"):
            function(x.float())


def test_capsules_outside_the_ball_are_an_error_on_the_ball_only(
    generator: torch.Generator,
) -> None:
    x = 3 + normal(generator, 5, I, K)
    assert density_of(generator).free_energy(x).isfinite().all()
    ball = density_of(generator, base="ball")
    for function in (ball.free_energy, ball.score):
        with pytest.raises(ValueError, match="x must hold squashed capsules, of norm below 1"):
            function(x)


def test_invalid_states_are_an_error(generator: torch.Generator) -> None:
    density, x = density_of(generator), normal(generator, 5, I, K)
    with pytest.raises(ValueError, match=r"on must have shape \(B=5, J=4\)"):
        density.energy(x, torch.ones(5, J - 1))
    with pytest.raises(ValueError, match=r"on must be 0 \(off\) or 1 \(on\).*but holds 0.5"):
        density.energy(x, torch.full((5, J), 0.5))
    with pytest.raises(TypeError, match=r"on must be a torch.Tensor"):
        density.energy(x, [[1] * J] * 5)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"strength": -torch.ones(J)}, ValueError, "strength must hold .* above 0, but holds -1.0"),
        ({"strength": torch.zeros(5, J)}, ValueError, "strength must hold .* above 0, but holds 0"),
        ({"strength": torch.ones(J - 1)}, ValueError, r"strength must have shape \(J=4\)"),
        ({"strength": torch.ones(4, J)}, ValueError, r"strength must have shape \(B=5, J=4\)"),
        ({"strength": torch.tensor(1.0)}, ValueError, r"strength must have shape \(J=4\)"),
        ({"strength": 1.0}, TypeError, "strength must be a torch.Tensor"),
        ({"on": torch.ones(5, J - 1)}, ValueError, r"on must have shape \(B=5, J=4\)"),
        ({"on": torch.full((5, J), 0.5)}, ValueError, r"on must be 0 \(off\) or 1 \(on\)"),
    ],
)
def test_invalid_arguments_of_the_gradient_are_an_error(
    options: dict[str, Any], error: type[Exception], message: str, generator: torch.Generator
) -> None:
    density, x = density_of(generator), normal(generator, 5, I, K)
    with pytest.raises(error, match=message):
        density.free_energy_and_gradient(x, **options)


def test_invalid_components_are_an_error(generator: torch.Generator) -> None:
    density, x = density_of(generator, base_components=2), normal(generator, 5, I, K)
    with pytest.raises(ValueError, match=r"x must have shape \(B, I=3, K=2\), but has"):
        density.components(x[:, :2])
    with pytest.raises(ValueError, match="x must be finite"):
        density.components(x * math.nan)
    y = density.components(x)
    for wrong in (y[..., :1], y[:, 0], y.repeat(1, 2, 1)):
        with pytest.raises(ValueError, match=r"y must have shape \(B, I=1, K=2\), but has"):
            density.from_components(wrong)
    with pytest.raises(TypeError, match=r"y is torch.float32 but weight is"):
        density.from_components(y.float())


@pytest.mark.parametrize(
    ("batches", "error", "message"),
    [
        ([], ValueError, "batches must hold at least one vector of capsules, but are empty"),
        ([torch.zeros(0, I, K)], ValueError, "batches must hold at least one vector"),
        ([torch.zeros(5, I, K + 1)], ValueError, r"batches must have shape \(B, I=3, K=2\)"),
        ([torch.zeros(5, I * K)], ValueError, r"batches must have shape \(B, I=3, K=2\)"),
        ([torch.ones(5, I, K), torch.full((1, I, K), math.nan)], ValueError, "norm is nan; look"),
        ([torch.full((1, I, K), math.inf)], ValueError, "must hold finite capsules, but"),
        ([torch.zeros(5, I, K).long()], TypeError, "batches must be a floating-point tensor"),
    ],
)
def test_invalid_data_of_a_base_measure_are_an_error(
    batches: list[Tensor], error: type[Exception], message: str
) -> None:
    base = GaussianBase(I, K, 2)
    with pytest.raises(error, match=message):
        base.fit(batches)
    assert torch.equal(base.std, torch.ones(2))
