"""The Triton backend computes the same as the reference.

On a GPU, or else in Triton's interpreter, which `test_triton_facts` starts.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from poecaps import CapsuleExperts, squash
from poecaps import functional as F
from poecaps.kernels.triton import backend, learning, routing_forward
from poecaps.kernels.triton.coefficients import Coefficients
from poecaps.kernels.triton.reconstruction import reconstruction
from poecaps.kernels.triton.routing_forward import preactivation, route
from poecaps.kernels.triton.weight_gradient import gradient_term, weight_gradient
from poecaps.layer import CapsuleDecoder
from tests.kernels import problems
from tests.kernels.problems import OPTIONS

if TYPE_CHECKING:
    from collections.abc import Callable

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ODD = (2, 7, 3, 5, 4)
SMALL = (2, 3, 2, 3, 2)  # the interpreter is slow
SIZES = [(1, 1, 1, 1, 1), (18, 3, 3, 6, 9), (3, 9, 8, 3, 16), (4, 3, 6, 11, 2), (2, 3, 33, 2, 40)]


def problem(sizes: tuple[int, ...], generator: torch.Generator) -> tuple[Tensor, Tensor]:
    x, weight = problems.problem(sizes, generator)
    return x.to(DEVICE), weight.to(DEVICE)


def routing_options(axis: F.Axis, agreement: F.Agreement, iterations: int = 3) -> F.RoutingOptions:
    # Inner products are unbounded: sharper, and eight iterations would magnify rounding errors
    # beyond any fixed bound.
    sharpness = 4.0 if agreement == "cosine" else 0.5
    return F.RoutingOptions(iterations, sharpness, axis, agreement)


def assert_close(ours: Tensor | None, exact: Tensor | None, bound: float = 1e-5) -> None:
    assert ours is not None
    assert exact is not None
    assert ours.shape == exact.shape
    assert ((ours.double() - exact).norm() / exact.norm()).item() < bound


def assert_same_step(ours: F.LearningStep, exact: F.LearningStep, bound: float = 1e-5) -> None:
    assert_close(ours.loss.unsqueeze(0), exact.loss.unsqueeze(0), bound)
    assert_close(ours.grad_weight, exact.grad_weight, bound)
    assert (ours.on is None) == (exact.on is None)
    if ours.on is not None and exact.on is not None:
        assert ours.on.equal(exact.on)
    assert (ours.x_model is None) == (exact.x_model is None)
    if exact.x_model is not None:
        assert_close(ours.x_model, exact.x_model, bound)


def assert_same_routing(x: Tensor, weight: Tensor, routing: F.RoutingOptions) -> None:
    """Values, and gradients through the iterations, against float64."""
    generator = torch.Generator().manual_seed(0)
    options = asdict(routing)
    exact_x, exact_weight = x.double().requires_grad_(), weight.double().requires_grad_()
    exact = F.routing_by_agreement(exact_x, exact_weight, **options)
    with torch.no_grad():
        bare = backend.routing_by_agreement(x, weight, **options)
    assert_close(bare.preactivation, exact.preactivation)
    assert_close(bare.coefficients, exact.coefficients)
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    ours = backend.routing_by_agreement(x, weight, **options)
    assert_close(ours.preactivation, exact.preactivation)
    grad_z = torch.randn(exact.preactivation.shape, generator=generator).to(x.device)
    (ours.preactivation * grad_z).sum().backward()
    (exact.preactivation * grad_z).sum().backward()
    assert_close(x.grad, exact_x.grad)
    assert_close(weight.grad, exact_weight.grad)


# --------------------------------------------------------------------------------------------------
# Routing


@pytest.mark.parametrize(
    ("normalize", "agreement", "iterations"),
    [
        *((*each, iterations) for each in OPTIONS for iterations in (1, 3)),
        ("inputs", "inner", 2),
        ("outputs", "cosine", 8),
    ],
)
def test_routing_and_its_gradient(
    normalize: F.Axis, agreement: F.Agreement, iterations: int, generator: torch.Generator
) -> None:
    sizes = ODD if iterations < 8 else SMALL
    options = routing_options(normalize, agreement, iterations)
    assert_same_routing(*problem(sizes, generator), options)


@pytest.mark.parametrize(
    ("normalize", "agreement", "is_alone"),
    [
        ("inputs", "cosine", True),
        ("inputs", "inner", False),
        ("outputs", "cosine", False),
        ("outputs", "inner", True),
    ],
)
def test_the_gradient_of_the_coefficients(
    normalize: F.Axis, agreement: F.Agreement, is_alone: bool, generator: torch.Generator
) -> None:
    """Alone, and beside that of the preactivations."""
    x, weight = problem(ODD, generator)
    grad_c = torch.randn(2, 7, 5, generator=generator).to(DEVICE)
    grad_z = torch.randn(2, 5, 4, generator=generator).to(DEVICE)
    options = asdict(routing_options(normalize, agreement))
    slopes = []
    for module, dtype in ((backend, torch.float32), (F, torch.float64)):
        leaves = [each.to(dtype, copy=True).requires_grad_() for each in (x, weight)]
        routed = module.routing_by_agreement(*leaves, **options)
        loss = (routed.coefficients * grad_c).sum()
        if not is_alone:
            loss = loss + (routed.preactivation * grad_z).sum()
        slopes.append(torch.autograd.grad(loss, leaves))
    for ours, exact in zip(*slopes, strict=True):
        assert_close(ours, exact)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("normalize", F.AXES)
def test_any_size(sizes: tuple[int, ...], normalize: F.Axis, generator: torch.Generator) -> None:
    assert_same_routing(*problem(sizes, generator), routing_options(normalize, "cosine"))


def test_any_layout(generator: torch.Generator) -> None:
    x, weight = problem(ODD, generator)
    x = x.transpose(0, 2).contiguous().transpose(0, 2)
    weight = weight.repeat_interleave(2, dim=-1)[..., ::2]
    assert not x.is_contiguous()
    assert not weight.is_contiguous()
    assert_same_routing(x, weight, routing_options("outputs", "cosine"))


@pytest.mark.parametrize("normalize", F.AXES)
def test_an_empty_batch(normalize: F.Axis, generator: torch.Generator) -> None:
    x, weight = problem((0, 3, 2, 3, 2), generator)
    x.requires_grad_()
    weight.requires_grad_()
    routing = routing_options(normalize, "cosine")
    routed = backend.routing_by_agreement(x, weight, **asdict(routing))
    assert routed.preactivation.shape == (0, 3, 2)
    routed.preactivation.sum().backward()
    assert x.grad is not None
    assert x.grad.shape == x.shape
    assert weight.grad is not None
    assert not weight.grad.any()
    with torch.no_grad():
        bare = backend.routing_by_agreement(x, weight, **asdict(routing))
        assert bare.coefficients.shape == (0, 3, 3)
        assert backend.encode(x, weight, routing).shape == (0, 3, 2)
        assert backend.reconstruct(x, weight, routing).shape == (0, 3, 2)
        assert backend.held_preactivation(x, weight, routing).shape == (0, 3, 2)


@pytest.mark.parametrize(("normalize", "agreement"), OPTIONS)
def test_zero_capsules_and_zero_weights(
    normalize: F.Axis, agreement: F.Agreement, generator: torch.Generator
) -> None:
    x, weight = problem(ODD, generator)
    x[:, 2] = 0
    x[1] = 0
    weight[:, 1] = 0
    assert_same_routing(x, weight, routing_options(normalize, agreement))


def test_logits_too_large_for_a_plain_exponential(generator: torch.Generator) -> None:
    """e^(2·200) overflows float32: the softmax must subtract the maximum."""
    x, weight = problem(ODD, generator)
    options = asdict(F.RoutingOptions(3, 200.0, "inputs", "cosine"))
    with torch.no_grad():
        ours = backend.routing_by_agreement(x, weight, **options)
    exact = F.routing_by_agreement(x.double(), weight.double(), **options)
    # The bound is the rounding error of a logit of 400.
    assert_close(ours.preactivation, exact.preactivation, 1e-4)


def test_an_integer_sharpness(generator: torch.Generator) -> None:
    assert_same_routing(*problem(ODD, generator), F.RoutingOptions(sharpness=3))


@pytest.mark.parametrize("keep_logits", [True, False], ids=["logits kept", "logits recomputed"])
@pytest.mark.parametrize("sizes", [ODD, (4, 3, 6, 11, 2), (3, 2, 4, 70, 4)])
def test_forward_and_backward_routing_with_held_coefficients(
    sizes: tuple[int, ...], keep_logits: bool, generator: torch.Generator
) -> None:
    x, weight = problem(sizes, generator)
    routing = routing_options("inputs", "cosine")
    routed = route(x, weight, routing, keep_logits=keep_logits)
    c = routed.coefficients
    exact_weight = weight.double().requires_grad_()
    with torch.no_grad():
        exact_c = F.routing_by_agreement(x.double(), exact_weight, **asdict(routing)).coefficients
    v = squash(torch.randn(x.shape, generator=generator)).to(DEVICE)
    y = squash(torch.randn(routed.preactivation.shape, generator=generator)).to(DEVICE)
    assert_close(c.tensor(weight), exact_c)
    assert_close(
        reconstruction(y, weight, c), F.reconstruction(y.double(), weight.double(), exact_c)
    )
    exact = F.preactivation(v.double(), exact_weight, exact_c)
    assert_close(preactivation(v, weight, c), exact)
    grad_weight = torch.empty_like(weight)
    weight_gradient(weight, c, gradient_term(y, v, weight, c), out=grad_weight)
    (exact * y).sum().backward()
    assert_close(grad_weight, exact_weight.grad)


@pytest.mark.parametrize(
    ("normalize", "agreement", "iterations"),
    [("inputs", "cosine", 3), ("outputs", "inner", 3), ("inputs", "cosine", 1)],
)
def test_the_held_preactivation_and_its_gradient(
    normalize: F.Axis, agreement: F.Agreement, iterations: int, generator: torch.Generator
) -> None:
    x, weight = problem(ODD, generator)
    grad_z = torch.randn(2, 5, 4, generator=generator).to(DEVICE)
    routing = routing_options(normalize, agreement, iterations)
    exact_weight = weight.double().requires_grad_()
    exact = F.held_preactivation(x.double(), exact_weight, routing)
    (exact * grad_z).sum().backward()
    x, weight = x.requires_grad_(), weight.requires_grad_()
    ours = backend.held_preactivation(x, weight, routing)
    (ours * grad_z).sum().backward()
    assert_close(ours, exact)
    assert_close(weight.grad, exact_weight.grad)
    assert x.grad is None
    with torch.no_grad():
        assert not backend.held_preactivation(x, weight, routing).requires_grad


@pytest.mark.parametrize(
    ("normalize", "agreement", "winners"),
    [("inputs", "cosine", None), ("outputs", "cosine", None), ("inputs", "inner", 2)],
)
def test_reconstruct_and_its_gradient(
    normalize: F.Axis, agreement: F.Agreement, winners: int | None, generator: torch.Generator
) -> None:
    """With a gradient, the coefficients have one as well."""
    x, weight = problem(ODD, generator)
    balance = torch.randn(5, generator=generator).to(DEVICE)
    competition: dict[str, Any] = {"winners": winners, "balance": balance}
    routing = routing_options(normalize, agreement)
    exact_x, exact_weight = x.double().requires_grad_(), weight.double().requires_grad_()
    exact = F.reconstruct(exact_x, exact_weight, routing, **competition)
    exact.square().sum().backward()
    assert_close(backend.reconstruct(x, weight, routing, **competition), exact)
    x, weight = x.requires_grad_(), weight.requires_grad_()
    ours = backend.reconstruct(x, weight, routing, **competition)
    ours.square().sum().backward()
    assert_close(ours, exact)
    assert_close(x.grad, exact_x.grad)
    assert_close(weight.grad, exact_weight.grad)


@pytest.mark.parametrize("winners", [None, 2])
def test_encode_and_its_gradient(winners: int | None, generator: torch.Generator) -> None:
    x, weight = problem(ODD, generator)
    balance = torch.randn(5, generator=generator).to(DEVICE)
    competition: dict[str, Any] = {"winners": winners, "balance": balance}
    routing = routing_options("outputs", "cosine")
    exact_x, exact_weight = x.double().requires_grad_(), weight.double().requires_grad_()
    exact = F.encode(exact_x, exact_weight, routing, **competition)
    exact.square().sum().backward()
    assert_close(backend.encode(x, weight, routing, **competition), exact)
    x, weight = x.requires_grad_(), weight.requires_grad_()
    ours = backend.encode(x, weight, routing, **competition)
    ours.square().sum().backward()
    assert_close(ours, exact)
    assert_close(x.grad, exact_x.grad)
    assert_close(weight.grad, exact_weight.grad)


# --------------------------------------------------------------------------------------------------
# Learning


KEPT, RECOMPUTED, BLOCKS = "logits kept", "logits recomputed", "in blocks"
STEPS: list[tuple[F.Axis, F.Agreement, dict[str, Any], tuple[str, ...]]] = [
    ("inputs", "cosine", {"block": 1}, (KEPT, RECOMPUTED, BLOCKS)),
    # More experts than inputs.
    ("inputs", "cosine", {"block": 5, "sizes": (18, 3, 5, 4, 3)}, (KEPT, RECOMPUTED, BLOCKS)),
    ("outputs", "cosine", {"block": 1, "sizes": (2, 20, 3, 2, 18)}, (KEPT, RECOMPUTED, BLOCKS)),
    ("inputs", "inner", {"chained": True}, (KEPT, RECOMPUTED)),
    ("outputs", "cosine", {"winners": 2, "chained": True, "mixing": "bernoulli"}, (KEPT,)),
    ("outputs", "inner", {"block": 1, "winners": 1, "k": 2}, (KEPT, RECOMPUTED, BLOCKS)),
    # Random numbers are those of the whole batch, so that these steps do not go in blocks.
    ("inputs", "cosine", {"block": 1, "iterations": 1, "mixing": "bernoulli"}, (KEPT, BLOCKS)),
    ("inputs", "cosine", {"mixing": "bernoulli", "k": 2, "sizes": (40, 3, 3, 5, 4)}, (KEPT,)),
    ("inputs", "cosine", {"block": 14, "sizes": (40, 5, 3, 4, 4)}, (KEPT, RECOMPUTED, BLOCKS)),
    ("inputs", "cosine", {"block": 1, "winners": 3, "balanced": True}, (KEPT, BLOCKS)),
    (
        "outputs",
        "cosine",
        {"winners": 2, "balanced": True, "chained": True, "k": 2},
        (KEPT, RECOMPUTED),
    ),
    (
        "outputs",
        "cosine",
        {"block": 5, "winners": 1, "views": 3, "sizes": (18, 5, 3, 4, 4)},
        (KEPT, BLOCKS),
    ),
    ("inputs", "cosine", {"winners": 1, "views": 2, "chained": True}, (KEPT,)),
]


@pytest.mark.parametrize(
    ("normalize", "agreement", "options", "way"),
    [(*step, way) for *step, ways in STEPS for way in ways],
)
def test_contrastive_divergence(
    normalize: F.Axis,
    agreement: F.Agreement,
    options: dict[str, Any],
    way: str,
    generator: torch.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    b, i, dim, j, d = sizes = options.get("sizes", ODD)
    if way == RECOMPUTED:
        monkeypatch.setattr(routing_forward, "KEEP_LOGITS_BYTES", 0)
    if way == BLOCKS:
        monkeypatch.setattr(learning, "MIN_BLOCK_IMAGES", 1)
        monkeypatch.setattr(learning, "BLOCK_LOGITS_BYTES", options["block"] * 4 * i * j)
    x, weight = problem(sizes, generator)
    start, _ = problem((3, i, dim, j, d), generator)
    chain = start if "chained" in options else None
    k, mixing = options.get("k", 1), options.get("mixing", "deterministic")
    uniform = torch.rand(k, b if chain is None else 3, j, generator=generator).to(DEVICE)
    balance = torch.randn(j, generator=generator).to(DEVICE) if "balanced" in options else None
    shared = {"k": k, "mixing": mixing, "winners": options.get("winners"), "balance": balance}
    shared["uniform"] = uniform if mixing == "bernoulli" else None
    shared["views"] = options.get("views", 1)
    routing = routing_options(normalize, agreement, options.get("iterations", 3))
    exact = F.contrastive_divergence(
        x.double(),
        weight.double(),
        routing,
        chain=None if chain is None else chain.double(),
        **shared,
    )
    before = start.clone()
    strided = x.transpose(0, 1).contiguous().transpose(0, 1)
    ours = backend.contrastive_divergence(
        strided, weight.requires_grad_(), routing, chain=chain, **shared
    )
    assert_same_step(ours, exact)
    assert ours.grad_weight is not None
    assert not ours.loss.requires_grad
    assert not ours.grad_weight.requires_grad
    assert start.equal(before)


@pytest.mark.parametrize("chained", [True, False])
def test_bernoulli_draws_by_torch_where_none_are_given(
    chained: bool, generator: torch.Generator
) -> None:
    x, weight = problem(ODD, generator)
    steps = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        steps.append(
            backend.contrastive_divergence(
                x,
                weight.requires_grad_(),
                F.RoutingOptions(),
                mixing="bernoulli",
                chain=x.clone() if chained else None,
            ).grad_weight
        )
    first, again, other = steps
    assert first is not None
    assert again is not None
    assert other is not None
    torch.testing.assert_close(again, first)
    assert not other.equal(first)


@pytest.mark.parametrize("chained", [True, False])
def test_no_gradient_is_computed_unless_one_is_required(
    chained: bool, generator: torch.Generator
) -> None:
    x, weight = problem(SMALL, generator)
    y = squash(torch.randn(2, 3, 2, generator=generator)).to(DEVICE)
    options: dict[str, Any] = {"chain": x.clone() if chained else None, "winners": 2}
    routing = F.RoutingOptions()
    rules: list[Callable[[], F.LearningStep]] = [
        lambda: backend.contrastive_divergence(x, weight, routing, **options),
        lambda: backend.decoder_contrastive_divergence(x, y, weight, routing),
    ]
    for rule in rules:
        weight.requires_grad_(True)
        learned = rule()
        assert learned.grad_weight is not None
        with torch.no_grad():
            disabled = rule()
        weight.requires_grad_(False)
        frozen = rule()
        for step in (disabled, frozen):
            assert step.grad_weight is None
            torch.testing.assert_close(step.loss, learned.loss)


def test_the_energy_of_small_preactivations(generator: torch.Generator) -> None:
    """log(1 + s) for an s that is lost in 1 + s."""
    data, model = (3e-5 * torch.randn(7, 3, 5, generator=generator).to(DEVICE) for _ in range(2))
    parts, *_ = learning.free_energy_gap_parts(data, 2 * model, None, None, (7, 7))
    exact = F.free_energy(data.double()).mean() - F.free_energy(2 * model.double()).mean()
    assert_close(parts.sum(), exact)


@pytest.mark.parametrize(
    ("sizes", "normalize", "agreement"),
    [
        ((3, 4, 5, 12, 4), "inputs", "cosine"),
        ((3, 4, 5, 12, 4), "outputs", "inner"),
        ((3, 9, 2, 3, 5), "inputs", "cosine"),
    ],
)
def test_the_rule_of_the_decoder(
    sizes: tuple[int, ...], normalize: F.Axis, agreement: F.Agreement, generator: torch.Generator
) -> None:
    y, weight = problem(sizes, generator)
    b, _, _, i, dim = sizes
    x = squash(torch.randn(b, i, dim, generator=generator)).to(DEVICE)
    x[0, 1] = 0
    routing = routing_options(normalize, agreement)
    ours = backend.decoder_contrastive_divergence(y, x, weight.requires_grad_(), routing)
    with torch.no_grad():
        exact = F.decoder_contrastive_divergence(y.double(), x.double(), weight.double(), routing)
    assert_same_step(ours, exact)
    assert not ours.loss.requires_grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(dtype: torch.dtype, generator: torch.Generator) -> None:
    x, weight = (value.to(dtype) for value in problem((3, 7, 8, 3, 16), generator))
    y = squash(torch.randn(3, 3, 16, generator=generator)).to(DEVICE, dtype)
    routing = F.RoutingOptions(sharpness=4.0)
    options = asdict(routing)
    wide = (x.double(), weight.double())
    with torch.no_grad():
        code = squash(backend.routing_by_agreement(x, weight, **options).preactivation)
    assert code.dtype == dtype
    assert_close(code, squash(F.routing_by_agreement(*wide, **options).preactivation), 1e-2)
    assert backend.reconstruct(x, weight, routing).dtype == dtype
    weight.requires_grad_()
    for chain in (None, x.clone()):
        ours = backend.contrastive_divergence(x, weight, routing, chain=chain)
        exact_chain = None if chain is None else chain.double()
        exact = F.contrastive_divergence(*wide, routing, chain=exact_chain)
        assert_close(ours.grad_weight, exact.grad_weight, 1e-2)
        assert chain is None or (ours.x_model is not None and ours.x_model.dtype == dtype)
    ours = backend.decoder_contrastive_divergence(x, y, weight, routing)
    exact = F.decoder_contrastive_divergence(wide[0], y.double(), wide[1], routing)
    assert_close(ours.grad_weight, exact.grad_weight, 1e-2)


@pytest.mark.parametrize("chained", [True, False])
def test_small_gradients_survive_half_precision(chained: bool, generator: torch.Generator) -> None:
    """The gradient is float32, so that a scaled loss can lift it above the underflow of float16."""
    x, weight = problem(ODD, generator)
    x, weight = x.half(), (1e-3 * weight).half().requires_grad_()
    chain = x.flip(0) if chained else None
    routing = F.RoutingOptions()
    ours = backend.contrastive_divergence(x, weight, routing, chain=chain)
    with torch.no_grad():
        exact = F.contrastive_divergence(
            x.double(),
            weight.double(),
            routing,
            chain=None if chain is None else chain.double(),
        )
    assert ours.grad_weight is not None
    assert ours.grad_weight.dtype == torch.float32
    assert exact.grad_weight is not None
    assert exact.grad_weight.abs().median().item() < torch.finfo(torch.float16).tiny
    assert_close(ours.grad_weight, exact.grad_weight, 1e-2)


# --------------------------------------------------------------------------------------------------
# Memory


def test_no_votes_and_no_coefficients_are_computed(
    generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Learning, encoding and the gradient of an encoding never write them to memory."""

    def never(*_: Any) -> Tensor:
        raise AssertionError("written to memory")

    monkeypatch.setattr(F, "votes", never)
    monkeypatch.setattr(Coefficients, "tensor", never)
    monkeypatch.setattr(routing_forward, "KEEP_LOGITS_BYTES", 0)
    x, weight = problem(SMALL, generator)
    y = squash(torch.randn(2, 3, 2, generator=generator)).to(DEVICE)
    weight.requires_grad_()
    routing = F.RoutingOptions()
    backend.contrastive_divergence(x, weight, routing, mixing="bernoulli", chain=x.clone())
    backend.contrastive_divergence(x, weight, routing)
    backend.decoder_contrastive_divergence(x, y, weight, routing)
    backend.held_preactivation(x, weight, routing).sum().backward()
    routed = backend.routing_by_agreement(x, weight, **asdict(routing))
    routed.preactivation.sum().backward()
    with torch.no_grad():
        backend.reconstruct(x, weight, routing)
        bare = backend.routing_by_agreement(x, weight, **asdict(routing))
    for each in (routed, bare):
        with pytest.raises(AssertionError, match="written to memory"):
            each.coefficients  # noqa: B018


def test_a_learning_step_does_not_depend_on_its_tensors_afterwards(
    generator: torch.Generator,
) -> None:
    """Its gradient is computed at once: capsules and chain may be overwritten."""
    x, weight = problem(ODD, generator)
    chain = x.flip(0).clone()
    exact = F.contrastive_divergence(x.double(), weight.double(), chain=chain.double())
    ours = backend.contrastive_divergence(
        x, weight.requires_grad_(), F.RoutingOptions(), chain=chain
    )
    x.mul_(0.5)
    chain.zero_()
    assert_same_step(ours, exact)


def test_capsules_overwritten_before_the_backward_pass_are_noticed(
    generator: torch.Generator,
) -> None:
    x, weight = problem(ODD, generator)
    weight.requires_grad_()
    held = backend.held_preactivation(x, weight, F.RoutingOptions())
    routed = backend.routing_by_agreement(x, weight).preactivation
    x.mul_(0.5)
    for z in (held, routed):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            z.sum().backward()


# --------------------------------------------------------------------------------------------------
# Layers


@pytest.mark.parametrize("scale", [3.0, 2.0**16])
def test_layers_learn_as_by_the_reference(scale: float, generator: torch.Generator) -> None:
    """Weight, chain and balance after a scaled step, with experts that compete."""
    options: dict[str, Any] = {"winners": 2, "sharpness": 4.0, "device": DEVICE}
    layer = CapsuleExperts(7, 3, 5, 4, backend="triton", **options)
    exact = CapsuleExperts(7, 3, 5, 4, backend="reference", dtype=torch.float64, **options)
    x, weight = problem(ODD, generator)
    start = squash(torch.randn(3, 7, 3, generator=generator)).to(DEVICE)
    chains = {}
    for each in (layer, exact):
        each.load_state_dict({"weight": weight, "balance": torch.zeros(5)})
        chains[each] = start.to(each.weight.dtype, copy=True)
        loss = each.contrastive_divergence(x.to(each.weight.dtype), 2, chain=chains[each])
        (scale * loss).backward()
    assert_close(layer.weight.grad, exact.weight.grad)
    assert_close(chains[layer], chains[exact])
    assert layer.balance.equal(exact.balance)
    x.requires_grad_()
    exact_x = x.detach().double().requires_grad_()
    layer.reconstruct(x).square().sum().backward()
    exact.reconstruct(exact_x).square().sum().backward()
    assert_close(x.grad, exact_x.grad)


def test_decoders_learn_as_by_the_reference(generator: torch.Generator) -> None:
    x, weight = problem(ODD, generator)
    target = squash(torch.randn(2, 5, 4, generator=generator)).to(DEVICE)
    gradients = []
    for dtype, name in ((torch.float32, "triton"), (torch.float64, "reference")):
        layer = CapsuleDecoder(7, 3, 5, 4, backend=name, dtype=dtype, device=DEVICE)  # type: ignore[arg-type]
        layer.load_state_dict({"weight": weight})
        (3 * layer.contrastive_divergence(x.to(dtype), target.to(dtype))).backward()
        gradients.append(layer.weight.grad)
    assert_close(gradients[0], gradients[1])
