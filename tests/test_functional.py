"""Facts about squashing and routing, each checked against the equation or another route to the same
number.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from poecaps import check_capsules, routing_by_agreement, squash, unsquash
from poecaps import functional as F

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
SCALES = (0.0, 1e-30, 1e-6, 1e-3, 0.1, 1.0, 30.0, 1e6, 1e30)
OPTIONS = [(axis, agreement) for axis in F.AXES for agreement in F.AGREEMENTS]


def normal(generator: torch.Generator, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=generator).to(dtype)


def of_norm(
    generator: torch.Generator, norm: float, dtype: torch.dtype, dim: int = 5, count: int = 64
) -> Tensor:
    """Vectors of random direction and the given norm, as near as the dtype has them."""
    v = normal(generator, count, dim)
    return (norm * v / v.norm(dim=-1, keepdim=True)).to(dtype)


def representable(norm: float, dtype: torch.dtype) -> float:
    return min(norm, torch.finfo(dtype).max / 8)


# --------------------------------------------------------------------------------------------------
# squash and unsquash


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", SCALES)
def test_squash_is_its_equation(
    scale: float, dtype: torch.dtype, generator: torch.Generator
) -> None:
    z = of_norm(generator, representable(scale, dtype), dtype)
    exact = [[float(v) for v in row] for row in z.double()]
    expected = []
    for row in exact:
        n = math.hypot(*row)
        expected.append([(n / (1 + n * n)) * v if n < 1e100 else v / n for v in row])
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(
        squash(z).double(),
        torch.tensor(expected, dtype=torch.float64),
        rtol=8 * eps,
        atol=2 * torch.finfo(dtype).smallest_normal * eps,
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", SCALES)
def test_unsquash_undoes_squash(
    scale: float, dtype: torch.dtype, generator: torch.Generator
) -> None:
    """Exact up to what rounding the squashed vector must lose.

    Rounding a norm p = n²/(1+n²) by a relative ε moves n by a relative ε(1+n²)/2, and p below the
    smallest number of
    the dtype is 0. Where ε(1+n²) is large, all that is left of n is that it is large.
    """
    info = torch.finfo(dtype)
    z = of_norm(generator, representable(scale, dtype), dtype)
    norm = z.double().norm(dim=-1, keepdim=True)
    back = unsquash(squash(z)).double()
    assert back.isfinite().all()

    error = (back - z.double()).norm(dim=-1, keepdim=True)
    lost = info.eps * (1 + norm.square())
    tolerance = 4 * lost * norm + 4 * math.sqrt(info.smallest_normal * info.eps)
    saturated = lost > 0.1
    assert bool(((error <= tolerance) | saturated).all())
    if bool(saturated.any()):
        cosine = (back * z.double()).sum(-1, keepdim=True) / (
            norm * back.norm(dim=-1, keepdim=True)
        )
        assert bool((cosine > 1 - 4 * info.eps).all())
        assert bool((back.norm(dim=-1) > 0.2 / math.sqrt(info.eps)).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norm", [0.0, 1e-30, 1e-3, 0.1, 0.5, 0.9, 0.99, "1-16eps", "1-eps"])
def test_squash_undoes_unsquash(
    norm: float | str, dtype: torch.dtype, generator: torch.Generator
) -> None:
    info = torch.finfo(dtype)
    radius = norm if isinstance(norm, float) else 1 - info.eps * {"1-16eps": 16, "1-eps": 1}[norm]
    x = of_norm(generator, radius, dtype)
    atol = 4 * info.smallest_normal * info.eps
    torch.testing.assert_close(squash(unsquash(x)), x, rtol=0, atol=8 * info.eps * radius + atol)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [1, 2, 8, 16, 64])
def test_squash_stays_inside_the_open_ball(
    dim: int, dtype: torch.dtype, generator: torch.Generator
) -> None:
    for scale in SCALES:
        x = squash(of_norm(generator, representable(scale, dtype), dtype, dim=dim))
        check_capsules(x)
        check_capsules(squash(unsquash(x)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_are_finite_everywhere(dtype: torch.dtype, generator: torch.Generator) -> None:
    info = torch.finfo(dtype)
    smallest = info.smallest_normal * info.eps
    for norm in (*SCALES, smallest, info.smallest_normal, info.max / 8, 1 - info.eps, 1.0, 5.0):
        for function in (squash, unsquash):
            v = of_norm(generator, representable(norm, dtype), dtype).requires_grad_()
            function(v).sum().backward()
            assert v.grad is not None
            assert bool(v.grad.isfinite().all()), (function.__name__, norm)


@pytest.mark.parametrize("function", [squash, unsquash])
def test_zero_maps_to_zero_with_zero_gradient(function: object) -> None:
    v = torch.zeros(3, 4, requires_grad=True)
    out = function(v)  # type: ignore[operator]
    out.sum().backward()
    assert torch.equal(out, torch.zeros(3, 4))
    assert torch.equal(v.grad, torch.zeros(3, 4))  # type: ignore[arg-type]


def test_gradcheck(generator: torch.Generator) -> None:
    for scale in (1e-2, 1.0, 1e2):
        z = (scale * normal(generator, 4, 3)).requires_grad_()
        assert torch.autograd.gradcheck(squash, z)
        assert torch.autograd.gradgradcheck(squash, z)
    for norm in (1e-2, 0.5, 0.9):
        x = of_norm(generator, norm, torch.float64, dim=3, count=4).requires_grad_()
        assert torch.autograd.gradcheck(unsquash, x)
        assert torch.autograd.gradgradcheck(unsquash, x)


def test_rounding_near_one_does_not_flatten_the_gradient() -> None:
    """In bfloat16 ‖squash(z)‖ would round to 1 from ‖z‖ ≈ 16 on; its derivative 2n/(1+n²)² must
    survive.
    """
    n = torch.tensor([16.0, 20.0, 30.0], dtype=torch.bfloat16)[:, None].requires_grad_()
    squash(n).sum().backward()
    exact = n.detach().double()
    torch.testing.assert_close(n.grad.double(), 2 * exact / (1 + exact**2) ** 2, rtol=0.01, atol=0)  # type: ignore[union-attr]


def test_unsquash_clamps_just_below_norm_one() -> None:
    at_limit = unsquash(torch.tensor([1 - 1e-6, 1.0, 3.0], dtype=torch.float32)[:, None])
    assert bool(at_limit.isfinite().all())
    assert at_limit[1] == at_limit[2]
    assert 1000 < at_limit[2].item() < 4000


def test_dim_names_the_axis_of_the_vectors(generator: torch.Generator) -> None:
    v = normal(generator, 2, 5, 3)
    for function in (squash, lambda v, dim=-1: unsquash(v / 10, dim), F.direction):
        torch.testing.assert_close(function(v, 1), function(v.transpose(1, 2)).transpose(1, 2))


def test_norm_of_squash_is_the_firing_probability(generator: torch.Generator) -> None:
    z = normal(generator, 6, 4, 3)
    square = z.square().sum(-1)
    torch.testing.assert_close(squash(z).norm(dim=-1), F.firing_probability(z))
    torch.testing.assert_close(F.firing_probability(z), torch.sigmoid(square.log()))


# --------------------------------------------------------------------------------------------------
# Routing


def votes_of(x: Tensor, weight: Tensor) -> Tensor:
    return torch.einsum("ijdk,bik->bijd", weight, x)


@pytest.fixture
def x(generator: torch.Generator) -> Tensor:
    return squash(normal(generator, 3, 7, 4))


@pytest.fixture
def weight(generator: torch.Generator) -> Tensor:
    return normal(generator, 7, 5, 3, 4)


@pytest.mark.parametrize(("normalize", "agreement"), OPTIONS)
@pytest.mark.parametrize("iterations", [1, 2, 3, 8])
def test_coefficients_sum_to_one_along_the_named_axis_and_mix_the_votes(
    x: Tensor, weight: Tensor, normalize: F.Axis, agreement: F.Agreement, iterations: int
) -> None:
    routing = routing_by_agreement(
        x, weight, iterations=iterations, sharpness=5.0, normalize=normalize, agreement=agreement
    )
    c = routing.coefficients
    assert c.shape == (3, 7, 5)
    along, across = (1, 2) if normalize == "inputs" else (2, 1)
    torch.testing.assert_close(c.sum(along), torch.ones_like(c.sum(along)))
    assert not torch.allclose(c.sum(across), torch.ones_like(c.sum(across)), rtol=0.01)
    torch.testing.assert_close(
        routing.preactivation, (c.unsqueeze(-1) * votes_of(x, weight)).sum(1)
    )
    uniform = torch.full_like(c, 1 / 7 if normalize == "inputs" else 1 / 5)
    assert torch.allclose(c, uniform) == (iterations == 1)


def test_cosine_routing_is_the_papers_loop(x: Tensor, weight: Tensor) -> None:
    """The procedure written with plain loops over Python floats, for the paper's options."""
    sharpness, u = 4.0, votes_of(x, weight).tolist()
    for image, result in zip(
        u, routing_by_agreement(x, weight, sharpness=sharpness).coefficients.tolist(), strict=True
    ):
        inputs, experts = range(len(image)), range(len(image[0]))
        b = [[0.0 for _ in experts] for _ in inputs]
        for iteration in range(3):
            total = [sum(math.exp(b[i][j]) for i in inputs) for j in experts]
            c = [[math.exp(b[i][j]) / total[j] for j in experts] for i in inputs]
            z = [[sum(c[i][j] * image[i][j][d] for i in inputs) for d in range(3)] for j in experts]
            if iteration < 2:
                for i in inputs:
                    for j in experts:
                        dot = math.fsum(a * e for a, e in zip(image[i][j], z[j], strict=True))
                        b[i][j] += sharpness * dot / (math.hypot(*image[i][j]) * math.hypot(*z[j]))
        assert result == [pytest.approx(row, rel=1e-12) for row in c]


def test_outputs_and_inner_are_sabours_procedure_1(x: Tensor, weight: Tensor) -> None:
    """Procedure 1 of "Dynamic routing between capsules", with plain loops over Python floats."""
    u = votes_of(x, weight).tolist()
    ours = squash(
        routing_by_agreement(
            x, weight, iterations=3, normalize="outputs", agreement="inner"
        ).preactivation
    )
    for image, result in zip(u, ours.tolist(), strict=True):
        capsules_l, capsules_next = range(len(image)), range(len(image[0]))
        b = [[0.0 for _ in capsules_next] for _ in capsules_l]
        v: list[list[float]] = []
        for _ in range(3):
            c = []
            for i in capsules_l:
                total = sum(math.exp(logit) for logit in b[i])
                c.append([math.exp(logit) / total for logit in b[i]])
            v = []
            for j in capsules_next:
                s = [sum(c[i][j] * image[i][j][d] for i in capsules_l) for d in range(3)]
                norm = math.hypot(*s)
                v.append([norm**2 / (1 + norm**2) * each / norm for each in s])
            for i in capsules_l:
                for j in capsules_next:
                    b[i][j] += sum(p * q for p, q in zip(image[i][j], v[j], strict=True))
        assert result == [pytest.approx(row, rel=1e-12) for row in v]


@pytest.mark.parametrize(("normalize", "agreement"), OPTIONS)
class TestSymmetries:
    def test_permuting_inputs_or_experts_permutes_the_results(
        self,
        x: Tensor,
        weight: Tensor,
        normalize: F.Axis,
        agreement: F.Agreement,
        generator: torch.Generator,
    ) -> None:
        options = {"sharpness": 5.0, "normalize": normalize, "agreement": agreement}
        plain = routing_by_agreement(x, weight, **options)  # type: ignore[arg-type]
        inputs, experts = (
            torch.randperm(7, generator=generator),
            torch.randperm(5, generator=generator),
        )
        mixed = routing_by_agreement(x[:, inputs], weight[inputs][:, experts], **options)  # type: ignore[arg-type]
        torch.testing.assert_close(mixed.coefficients, plain.coefficients[:, inputs][:, :, experts])
        torch.testing.assert_close(mixed.preactivation, plain.preactivation[:, experts])

    def test_rotating_an_experts_space_rotates_its_output_and_changes_no_coefficient(
        self,
        x: Tensor,
        weight: Tensor,
        normalize: F.Axis,
        agreement: F.Agreement,
        generator: torch.Generator,
    ) -> None:
        options = {"sharpness": 5.0, "normalize": normalize, "agreement": agreement}
        turns = torch.linalg.qr(normal(generator, 5, 3, 3)).Q
        plain = routing_by_agreement(x, weight, **options)  # type: ignore[arg-type]
        turned = routing_by_agreement(x, torch.einsum("jed,ijdk->ijek", turns, weight), **options)  # type: ignore[arg-type]
        torch.testing.assert_close(turned.coefficients, plain.coefficients)
        torch.testing.assert_close(
            turned.preactivation, torch.einsum("jed,bjd->bje", turns, plain.preactivation)
        )

    @pytest.mark.parametrize("zero", ["capsule", "weight", "everything"])
    def test_zeros_give_no_nan(
        self, x: Tensor, weight: Tensor, normalize: F.Axis, agreement: F.Agreement, zero: str
    ) -> None:
        if zero != "weight":
            x[:, 2] = 0
        if zero != "capsule":
            weight[:, 1] = 0
        if zero == "everything":
            x, weight = torch.zeros_like(x), torch.zeros_like(weight)
        x.requires_grad_()
        weight.requires_grad_()
        routing = routing_by_agreement(x, weight, normalize=normalize, agreement=agreement)
        (routing.coefficients.square().sum() + squash(routing.preactivation).sum()).backward()
        for tensor in (routing.coefficients, routing.preactivation, x.grad, weight.grad):
            assert tensor is not None
            assert bool(tensor.isfinite().all())

    def test_gradients_flow_through_all_iterations(
        self, x: Tensor, weight: Tensor, normalize: F.Axis, agreement: F.Agreement
    ) -> None:
        def route(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
            routing = routing_by_agreement(
                x, weight, sharpness=2.0, normalize=normalize, agreement=agreement
            )
            return routing.coefficients, routing.preactivation

        assert torch.autograd.gradcheck(
            route, (x[:1, :3].requires_grad_(), weight[:3, :2].requires_grad_())
        )


def test_a_zero_vote_agrees_with_nothing(x: Tensor, weight: Tensor) -> None:
    """Its cosine is 0, so its weight is below that of every vote that agrees and above every one
    that does not.
    """
    x[:, 2] = 0
    routing = routing_by_agreement(x, weight, iterations=2, sharpness=1.0)
    first = routing_by_agreement(x, weight, iterations=1).preactivation
    cosine = torch.nn.functional.cosine_similarity(votes_of(x, weight), first.unsqueeze(1), dim=-1)
    c = routing.coefficients
    assert torch.equal(c > c[:, 2:3], cosine > 0)


def test_zero_sharpness_keeps_the_coefficients_uniform(x: Tensor, weight: Tensor) -> None:
    c = routing_by_agreement(x, weight, sharpness=0.0, iterations=5).coefficients
    torch.testing.assert_close(c, torch.full_like(c, 1 / 7))


def test_reconstruction_is_the_transpose_of_preactivation(x: Tensor, weight: Tensor) -> None:
    """⟨y, forward(x)⟩ = ⟨backward(y), x⟩ for the linear maps, so the unsquashed reconstruction is
    the adjoint.
    """
    c = routing_by_agreement(x, weight).coefficients
    y = squash(F.preactivation(x, weight, c))
    up = (y * F.preactivation(x, weight, c)).sum()
    down = (unsquash(F.reconstruction(y, weight, c)) * x).sum()
    torch.testing.assert_close(up, down)


# --------------------------------------------------------------------------------------------------
# What a caller can get wrong


@pytest.mark.parametrize(
    ("strength", "error", "message"),
    [
        (torch.tensor([1.0, 0.0]), ValueError, "must hold finite numbers above 0, but holds 0.0"),
        (torch.tensor([-1.0, 2.0]), ValueError, "must hold finite numbers above 0, but holds -1.0"),
        (torch.tensor([1.0, math.nan]), ValueError, "must hold .* above 0, but holds nan"),
        (torch.ones(3), ValueError, r"must have shape \(J=2\), but has shape \(3,\); give"),
        (torch.ones(5, 2), ValueError, r"must have shape \(J=2\), but has shape \(5, 2\)"),
        (2.0, TypeError, "must be a torch.Tensor, but is float"),
    ],
)
def test_invalid_strengths_are_an_error(
    strength: Any, error: type[Exception], message: str
) -> None:
    z = torch.ones(5, 2, 3)
    with pytest.raises(error, match=f"strength {message}"):
        F.free_energy(z, strength=strength)
    with pytest.raises(error, match=f"strength {message}"):
        F.energy(z, torch.ones(5, 2), strength)
    with pytest.raises(error, match=f"strength {message}"):
        F.firing_probability(z, strength)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((-1,), ValueError, "linear_dims must be a whole number from 0 to 3, but is -1"),
        ((4,), ValueError, "linear_dims must be a whole number from 0 to 3, but is 4"),
        ((1.5,), TypeError, "linear_dims must be a whole number from 0 to 3, but is 1.5"),
        ((1, torch.zeros(3)), ValueError, r"origin must have shape \(J=2\), but has shape \(3,\)"),
        ((0, torch.zeros(2, 3)), ValueError, r"origin must have shape \(J=2\), but has"),
        ((1, 0.5), TypeError, "origin must be a torch.Tensor, but is float"),
    ],
)
def test_invalid_linear_coordinates_are_an_error(
    arguments: tuple[Any, ...], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        F.forward_side(torch.ones(5, 2, 3), *arguments)


def test_errors_name_the_argument_the_value_and_the_remedy(x: Tensor, weight: Tensor) -> None:
    def fails(error: type[Exception], pattern: str, *tensors: Tensor, **options: object) -> None:
        with pytest.raises(error, match=pattern):
            routing_by_agreement(*(tensors or (x, weight)), **options)  # type: ignore[arg-type]

    fails(
        ValueError,
        r"x must have shape \(B, I=7, K=4\).*has shape \(7, 4\); add the batch axis",
        x[0],
        weight,
    )
    fails(ValueError, r"x must have shape \(B, I=7, K=4\).*has shape \(3, 6, 4\)", x[:, :6], weight)
    fails(ValueError, r"weight must have shape \(I, J, D, K\).*\(7, 5, 3\)", x, weight[..., 0])
    fails(
        TypeError,
        r"x must be a floating-point tensor, but its dtype is torch.int64",
        x.long(),
        weight,
    )
    fails(TypeError, r"x is torch.float32 but weight is torch.float64; convert", x.float(), weight)
    fails(TypeError, r"x must be a torch.Tensor, but is list", x.tolist(), weight)  # type: ignore[arg-type]
    fails(ValueError, r"iterations must be .* at least 1, but is 0", iterations=0)
    fails(TypeError, r"iterations must be a whole number .*, but is 2.5", iterations=2.5)
    fails(
        ValueError,
        r"sharpness must be a finite number of at least 0, but is nan",
        sharpness=math.nan,
    )
    fails(ValueError, r"sharpness must be a finite number of at least 0, but is -1", sharpness=-1)
    fails(
        ValueError,
        r"sharpness must be a finite number of at least 0, but is inf",
        sharpness=math.inf,
    )
    fails(TypeError, r"sharpness must be a number of at least 0, but is '5'", sharpness="5")
    fails(
        ValueError,
        r"normalize must be one of 'inputs', 'outputs', but is 'input'; did you mean 'inputs'",
        normalize="input",
    )
    fails(ValueError, r"agreement must be one of 'cosine', 'inner', but is None", agreement=None)
    with pytest.raises(
        TypeError, match=r"z must be a floating-point tensor, but its dtype is torch.int64"
    ):
        squash(torch.tensor([1, 2]))


def test_every_function_checks_its_shapes(x: Tensor, weight: Tensor) -> None:
    c = routing_by_agreement(x, weight).coefficients
    y = squash(F.preactivation(x, weight, c))
    with pytest.raises(
        ValueError, match=r"coefficients must have shape \(B=3, I=7, J=5\).*take those of routing"
    ):
        F.preactivation(x, weight, c[:, :6])
    with pytest.raises(ValueError, match=r"y must have shape \(B, J=5, D=3\).*those of the weight"):
        F.reconstruction(y[:, :4], weight, c)
    with pytest.raises(
        ValueError, match=r"z must have shape \(B, J, D\).*preactivation of routing"
    ):
        F.free_energy(y[0, 0])
    with pytest.raises(ValueError, match=r"on must have shape \(B=3, J=5\)"):
        F.free_energy(y, torch.ones(3, 1))
    with pytest.raises(ValueError, match=r"on must have shape \(B=3, J=5\)"):
        F.energy(y, torch.ones(3, 4))
    with pytest.raises(TypeError, match=r"z must be a floating-point tensor"):
        F.firing_probability(torch.ones(3, 5, 2, dtype=torch.int64))


def test_nan_is_never_swallowed() -> None:
    for function in (squash, unsquash, F.direction):
        assert bool(function(torch.tensor([math.nan, 1.0])).isnan().any())


def test_check_capsules_says_which_capsule_is_wrong() -> None:
    x = torch.zeros(2, 3, 4)
    check_capsules(x)
    x[1, 2, 0] = 1.0
    with pytest.raises(ValueError, match=r"codes\[1, 2\] has norm 1; apply poecaps.squash"):
        check_capsules(x, "codes")
    x[1, 2, 0] = math.nan
    with pytest.raises(
        ValueError, match=r"x must be finite, but x\[1, 2\] = \[nan, 0.0, 0.0, 0.0\]"
    ):
        check_capsules(x)


def test_check_capsules_is_not_fooled_by_rounding_or_overflow() -> None:
    check_capsules(squash(torch.full((4, 1000), 100.0)))
    check_capsules(squash(torch.full((4, 1000), 100.0, dtype=torch.bfloat16)))
    x = torch.zeros(2, 3, 4)
    x[0, 0] = 3e38
    x[1, 1, 1] = math.nan
    with pytest.raises(ValueError, match=r"x must hold squashed capsules|x must be finite"):
        check_capsules(x)


def test_coefficients_of_half_precision_capsules_are_float32(x: Tensor, weight: Tensor) -> None:
    assert routing_by_agreement(x.half(), weight.half()).coefficients.dtype == torch.float32


# --------------------------------------------------------------------------------------------------
# Learning


def test_g_is_half_the_gradient_of_an_expert(generator: torch.Generator) -> None:
    z = normal(generator, 3, 5, 4).requires_grad_()
    (gradient,) = torch.autograd.grad(torch.log1p(z.square().sum(-1)).sum(), z)
    torch.testing.assert_close(F.g(z), gradient / 2)
    x = squash(z.detach())
    torch.testing.assert_close(F.g_of_squashed(x), F.g(unsquash(x)))
    assert not F.g_of_squashed(torch.zeros(2, 3)).any()


@pytest.mark.parametrize("winners", [None, 2])
@pytest.mark.parametrize("chained", [False, True])
@pytest.mark.parametrize(("normalize", "agreement"), OPTIONS)
def test_the_closed_form_of_the_learning_rule_is_the_gradient_of_its_loss(
    normalize: F.Axis,
    agreement: F.Agreement,
    chained: bool,
    winners: int | None,
    x: Tensor,
    weight: Tensor,
    generator: torch.Generator,
) -> None:
    routing = F.RoutingOptions(3, 2.0, normalize, agreement)
    weight = weight.clone().requires_grad_()
    balance = normal(generator, weight.shape[1])
    chain = squash(normal(generator, 5, *x.shape[1:])).to(x.dtype) if chained else None
    given: dict[str, Any] = {"k": 2, "chain": chain, "winners": winners, "balance": balance}
    differentiable = F.contrastive_divergence(x, weight, routing, **given)
    closed_form = F.contrastive_divergence(x, weight.detach(), routing, **given)
    assert differentiable.grad_weight is None
    assert closed_form.grad_weight is not None
    torch.testing.assert_close(closed_form.loss, differentiable.loss.detach())
    (gradient,) = torch.autograd.grad(differentiable.loss, weight)
    torch.testing.assert_close(closed_form.grad_weight, gradient)
    y = F.encode(x, weight.detach(), routing)
    maps = normal(generator, weight.shape[1], weight.shape[0], *weight.shape[:1:-1])
    maps = maps.to(x.dtype).requires_grad_()
    step = F.decoder_contrastive_divergence(y, x, maps, routing)
    assert step.grad_weight is not None
    torch.testing.assert_close(step.grad_weight, torch.autograd.grad(step.loss, maps)[0])


def test_winners_are_the_strongest_experts_with_their_head_start(
    generator: torch.Generator,
) -> None:
    z, balance = normal(generator, 20, 6, 3), normal(generator, 6)
    on = F.winning_experts(z, 2, balance)
    assert on is not None
    score = z.square().sum(-1).log() + balance
    assert bool((on.sum(1) == 2).all())
    assert bool((score.where(on, torch.inf).amin(1) >= score.where(~on, -torch.inf).amax(1)).all())
    assert F.winning_experts(z, None, balance) is None


def test_views_of_an_image_have_the_winners_of_their_mean(generator: torch.Generator) -> None:
    z, balance = normal(generator, 20, 6, 3), normal(generator, 6)
    on = F.winning_experts(z, 2, balance, views=4)
    assert on is not None
    score = z.square().sum(-1).log() + balance
    for image in range(5):
        rows = slice(4 * image, 4 * image + 4)
        best = score[rows].mean(0).topk(2).indices
        expected = torch.zeros(6, dtype=torch.bool).index_fill(0, best, True)
        assert torch.equal(on[rows], expected.expand(4, 6))
    assert F.winning_experts(z, None, balance, views=4) is None


def test_bernoulli_states_are_unit_vectors_of_the_experts_that_fire(
    generator: torch.Generator,
) -> None:
    z = normal(generator, 20, 6, 3)
    uniform = torch.rand(20, 6, generator=generator)
    y = F.expert_states(z, None, "bernoulli", uniform)
    fires = uniform < squash(z).norm(dim=-1).float()
    torch.testing.assert_close(y, F.direction(z) * fires.unsqueeze(-1))
    assert 0 < fires.sum() < fires.numel()


def test_encoding_and_reconstruction_are_their_equations(x: Tensor, weight: Tensor) -> None:
    routed = routing_by_agreement(x, weight)
    torch.testing.assert_close(F.encode(x, weight), squash(routed.preactivation))
    c, y = routed.coefficients.to(x.dtype), F.encode(x, weight)
    expected = squash(torch.einsum("bij,ijdk,bjd->bik", c, weight, y))
    torch.testing.assert_close(F.reconstruct(x, weight), expected)


def test_the_distance_of_several_scales_is_that_of_each_level() -> None:
    """A constant counts once, in the coarsest level; a chequerboard once, in the finest."""
    zeros = torch.zeros(1, 1, 8, 8)
    assert F.laplacian_distance(zeros, zeros + 0.3) == pytest.approx(0.3)
    chequers = (torch.arange(8)[:, None] + torch.arange(8)).remainder(2).sub(0.5).expand(1, 1, 8, 8)
    assert F.laplacian_distance(chequers, zeros) == pytest.approx(0.5)
    blocks = chequers[..., :4, :4].repeat_interleave(2, 2).repeat_interleave(2, 3)
    assert F.laplacian_distance(blocks, zeros) == pytest.approx(0.5)
    assert F.laplacian_distance(blocks, zeros, levels=1) == pytest.approx(0.5)
    assert F.laplacian_distance(torch.ones(1, 1, 1, 5), torch.zeros(1, 1, 1, 5)) == 1


def test_a_blurred_edge_is_farther_than_a_faint_one() -> None:
    edge = torch.zeros(1, 1, 16, 16)
    edge[..., 8:] = 1
    blurred = torch.nn.functional.avg_pool2d(edge, 5, 1, 2)
    faint = edge + (blurred - edge).abs().mean() * torch.where(edge > 0, -1.0, 1.0)
    assert F.laplacian_distance(blurred, edge) > 1.2 * F.laplacian_distance(faint, edge)
