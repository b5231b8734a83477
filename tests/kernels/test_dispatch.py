"""The choice of a backend, and the layers that run it."""

from __future__ import annotations

import platform
import re
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from poecaps import CapsuleExperts
from poecaps import functional as F
from poecaps.kernels import cpu, dispatch, operators, torch_routing
from poecaps.kernels.cpu import build
from poecaps.kernels.triton import support
from tests.kernels.problems import OPTIONS, problem, relative_error
from tests.systems import needs_unix

if TYPE_CHECKING:
    from poecaps.kernels.dispatch import Backend

needs_simd = pytest.mark.skipif(
    cpu.why_not_compiled() is not None, reason=f"cannot compile: {cpu.why_not_compiled()}"
)


def refuse(*_: Any, **__: Any) -> None:
    raise AssertionError("another backend was called")


# --------------------------------------------------------------------------------------------------
# The choice


def test_the_choice_by_device_dtype_and_size() -> None:
    x, weight = torch.zeros(1, 4, 3), torch.zeros(4, 2, 2, 3)
    assert dispatch.choose(x, weight) == "torch"
    assert dispatch.choose(x, weight, "reference") == "reference"
    assert dispatch.choose(x.double(), weight.double()) == "torch"
    assert dispatch.choose(x.half(), weight.half()) == "torch"
    assert dispatch.choose(x.to("meta"), weight.to("meta")) == "reference"
    assert dispatch.choose(x, weight.double()) == "reference"
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert dispatch.choose(x, weight) == "torch"
        assert dispatch.choose(x, weight.bfloat16()) == "torch"
        assert dispatch.choose(x.double(), weight) == "reference"
    assert dispatch.choose(x, weight, needs_grad=True) == "torch"


@needs_simd
def test_large_float32_calls_on_a_cpu_run_compiled_c() -> None:
    x, weight = torch.zeros(128, 64, 8), torch.zeros(64, 10, 16, 8)
    assert dispatch.choose(x, weight) == "simd"
    assert dispatch.choose(x, weight, needs_grad=True) == "simd"
    small = torch.zeros(1, 4, 8), torch.zeros(4, 2, 16, 8)
    assert dispatch.choose(*small) == "torch"
    assert dispatch.choose(*small, "simd") == "simd"  # forced, it runs although it does not pay
    assert dispatch.choose(x, weight, chain=x.clone()) == "simd"
    assert dispatch.choose(x, weight, chain=torch._neg_view(x)) == "torch"  # not plain memory


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton supports the call")
def test_a_forced_backend_that_cannot_run_says_why() -> None:
    layer = CapsuleExperts(4, 3, 2, 2, backend="triton")
    with pytest.raises(ValueError, match=r"CUDA device|pip install triton"), torch.no_grad():
        layer(torch.zeros(1, 4, 3))


@needs_simd
def test_a_forced_backend_raises_for_other_dtypes() -> None:
    layer = CapsuleExperts(4, 3, 2, 2, backend="simd", dtype=torch.float64)
    with pytest.raises(ValueError, match=r"needs float32 on a CPU, but x is torch\.float64"):
        layer(torch.zeros(1, 4, 3, dtype=torch.float64))


# The first dual level of a process makes torch script its decompositions.
@pytest.mark.filterwarnings("ignore:.torch.jit.script.:DeprecationWarning")
@pytest.mark.parametrize("backend", ["torch", "simd", "triton"])
def test_forward_mode_and_transformed_learning_are_left_to_the_reference(
    backend: Backend,
) -> None:
    x, weight = torch.zeros(2, 4, 3), torch.zeros(4, 2, 2, 3)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        assert dispatch.choose(dual, weight) == "reference"
        assert "forward-mode" in (dispatch.why_not(backend, dual, weight) or "")
    chosen: list[str] = []

    def note(each: Tensor) -> Tensor:
        chosen.append(dispatch.choose(each.unsqueeze(0), weight))
        return each

    torch.func.vmap(note)(x)
    assert chosen == ["reference"]
    chosen.clear()

    def note_routing(each: Tensor) -> Tensor:
        chosen.append(dispatch.choose(each.unsqueeze(0), weight, is_learning=False))
        return each

    torch.func.vmap(note_routing)(x)
    torch.func.jvp(note_routing, (x[0],), (x[0],))
    with forward_ad.dual_level():
        torch.func.vmap(note_routing)(x)
    assert chosen == ["torch", "reference", "reference"]


@needs_simd
def test_all_mapped_images_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether compiled C pays depends on the images of all elements."""
    x, weight = torch.zeros(4, 2, 4, 3), torch.zeros(4, 2, 2, 3)
    monkeypatch.setattr(cpu.routing, "MIN_MULTIPLICATIONS", 8 * weight.numel())
    chosen: list[str] = []

    def note(each: Tensor) -> Tensor:
        chosen.append(dispatch.choose(each, weight, is_learning=False))
        return each

    torch.func.vmap(note)(x)
    torch.func.vmap(note)(x[:3])
    assert chosen == ["simd", "torch"]


@pytest.mark.filterwarnings("ignore:.torch.jit.script.:DeprecationWarning")
def test_slow_transforms_are_announced_once(
    generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By one warning for large calls, compiled or not; none if the reference is asked for."""
    monkeypatch.setattr(operators, "_has_warned", [])
    layer = CapsuleExperts(7, 3, 5, 4, generator=generator)
    x, _ = problem((2, 7, 3, 5, 4), generator)

    def slopes() -> Tensor:
        slope = torch.func.jacfwd(lambda image: layer.free_energy(image[None]).sum())
        found: Tensor = torch.func.vmap(slope)(x)
        return found

    slopes()  # a small call, without a warning
    monkeypatch.setattr(cpu.routing, "MIN_MULTIPLICATIONS", 0)
    layer.backend = "reference"
    slopes()
    layer.backend = None
    with pytest.warns(UserWarning, match=r"torch\.func .* computed by poecaps\.functional"):
        slopes()
    slopes()
    with forward_ad.dual_level():
        layer.free_energy(forward_ad.make_dual(x, torch.ones_like(x)))


@pytest.mark.parametrize("backend", [None, *dispatch.BACKENDS])
def test_wrong_capsules_give_the_same_error_on_every_backend(backend: Backend | None) -> None:
    layer = CapsuleExperts(7, 3, 5, 4, backend=backend)
    x = torch.zeros(2, 7, 3)
    wrong: list[tuple[Any, type[Exception], str]] = [
        (x.tolist(), TypeError, "x must be a torch.Tensor, but is list"),
        (x.long(), TypeError, "x must be a floating-point tensor, but its dtype is torch.int64"),
        (x.double(), TypeError, "x is torch.float64 but the layer's weight is torch.float32"),
        (x.half(), TypeError, "x is torch.float16 but the layer's weight is torch.float32"),
        (x[0], ValueError, "x must have shape (B, I=7, K=3), but has shape (7, 3)"),
        (x[:, :6], ValueError, "x must have shape (B, I=7, K=3), but has shape (2, 6, 3)"),
        (x[..., :2], ValueError, "x must have shape (B, I=7, K=3), but has shape (2, 7, 2)"),
        (x.to("meta"), ValueError, "x is on 'meta' but the layer's weight is on 'cpu'"),
        (torch.full_like(x, torch.nan), ValueError, "x must be finite"),
    ]
    methods = (layer.forward, layer.reconstruct, layer.free_energy, layer.contrastive_divergence)
    for given, error, message in wrong:
        for method in methods:
            with pytest.raises(error, match=re.escape(message)):
                method(given)


@pytest.mark.parametrize(
    ("name", "implemented"),
    [("IMPLEMENTED_AGREEMENTS", ("inner",)), ("IMPLEMENTED_AXES", ("outputs",))],
)
def test_routing_that_only_the_reference_implements(
    name: str,
    implemented: tuple[str, ...],
    generator: torch.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dispatch, name, implemented)
    monkeypatch.setattr(torch_routing, "contrastive_divergence", refuse)
    layer = CapsuleExperts(7, 3, 5, 4, generator=generator)
    x, _ = problem((2, 7, 3, 5, 4), generator)
    layer.contrastive_divergence(x).backward()
    layer.backend = "torch"
    with pytest.raises(ValueError, match="does not implement agreement='cosine'"):
        layer.contrastive_divergence(x)


@pytest.mark.parametrize("backend", ["torch", "simd", "triton"])
def test_a_forced_backend_raises_on_another_kind_of_device(backend: Backend) -> None:
    x, weight = torch.zeros(1, 4, 3, device="meta"), torch.zeros(4, 2, 2, 3, device="meta")
    with pytest.raises(ValueError, match="CPUs and CUDA devices, not on 'meta'"):
        dispatch.choose(x, weight, backend)


@pytest.mark.parametrize("backend", ["torch", "simd", "triton"])
def test_a_forced_backend_raises_if_dtypes_differ(backend: Backend) -> None:
    x, weight = torch.zeros(1, 4, 3), torch.zeros(4, 2, 2, 3, dtype=torch.float64)
    with pytest.raises(ValueError, match="bring both to the same dtype and device"):
        dispatch.choose(x, weight, backend)


def test_an_unknown_backend_raises_an_error() -> None:
    with pytest.raises(ValueError, match="backend must be one of"):
        dispatch.choose(torch.zeros(1, 4, 3), torch.zeros(4, 2, 2, 3), "cpu")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="did you mean 'triton'"):
        CapsuleExperts(4, 3, 2, 2, backend="tritn")  # type: ignore[arg-type]
    layer = CapsuleExperts(4, 3, 2, 2)
    with pytest.raises(ValueError, match="backend must be one of"):
        layer.backend = "gpu"  # type: ignore[assignment]


@needs_unix
def test_the_description_names_the_backend_and_the_obstacle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reason = cpu.why_not_compiled()
    expected = f"torch: vote-free PyTorch, because {reason}"
    if reason is None:
        name = build.target().name
        expected = f"simd: vote-free C for {name}, compiled by {build.compiler_version()}"
    assert dispatch.describe("cpu") == expected
    monkeypatch.setenv(build.VARIABLE, "mmx")
    line = dispatch.describe("cpu")
    assert line.startswith("torch: vote-free PyTorch, because $POECAPS_SIMD is 'mmx', but")
    monkeypatch.setattr(support, "installed", lambda: False)
    assert dispatch.describe("cuda") == "torch: vote-free PyTorch, because Triton is not installed"


@needs_unix
def test_without_a_compiler_layers_learn_by_plain_pytorch(
    generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    monkeypatch.setattr(cpu.routing, "MIN_MULTIPLICATIONS", 0)
    layer = CapsuleExperts(13, 8, 3, 16, generator=generator)
    x, _ = problem((5, 13, 8, 3, 16), generator)
    loss = layer.contrastive_divergence(x)
    layer.backend = "torch"
    assert torch.equal(loss, layer.contrastive_divergence(x))
    layer.backend = "simd"
    with pytest.raises(ValueError, match="riscv64"):
        layer.contrastive_divergence(x)


# --------------------------------------------------------------------------------------------------
# Layers


@pytest.mark.parametrize("backend", [None, "torch", pytest.param("simd", marks=needs_simd)])
@pytest.mark.parametrize("winners", [None, 2])
@pytest.mark.parametrize("experts", [5, 9])
def test_layers_learn_by_every_backend_as_by_the_reference(
    experts: int, winners: int | None, backend: Backend | None, generator: torch.Generator
) -> None:
    layer = CapsuleExperts(7, 3, experts, 4, winners=winners, sharpness=5.0, backend=backend)
    exact = CapsuleExperts(
        7,
        3,
        experts,
        4,
        winners=winners,
        sharpness=5.0,
        backend="reference",
        dtype=torch.float64,
    )
    layer.reset_parameters(std=1.0, generator=generator)
    exact.load_state_dict(layer.state_dict())
    x, _ = problem((5, 7, 3, 1, 1), generator)
    loss = layer.contrastive_divergence(x, 2)
    (3 * loss).backward()
    expected = exact.contrastive_divergence(x.double(), 2)
    (3 * expected).backward()
    assert layer.weight.grad is not None
    assert exact.weight.grad is not None
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4, abs=1e-6)
    assert relative_error(layer.weight.grad, exact.weight.grad) < 1e-5
    torch.testing.assert_close(layer.balance, exact.balance.float())
    with torch.no_grad():
        assert relative_error(layer(x), exact(x.double())) < 1e-5
        assert relative_error(layer.reconstruct(x), exact.reconstruct(x.double())) < 1e-5


@pytest.mark.parametrize(("normalize", "agreement"), OPTIONS)
def test_the_loss_without_gradients(
    normalize: F.Axis, agreement: F.Agreement, generator: torch.Generator
) -> None:
    x, weight = problem((9, 13, 3, 5, 4), generator)
    options: dict[str, Any] = {"normalize": normalize, "agreement": agreement}
    layer = CapsuleExperts(13, 3, 5, 4, **options)
    layer.load_state_dict({"weight": weight, "balance": torch.zeros(5)})
    with torch.no_grad():
        loss = layer.contrastive_divergence(x)
    assert not loss.requires_grad
    assert torch.equal(loss, layer.contrastive_divergence(x).detach())


@pytest.mark.parametrize("experts", [5, 9])
@torch.no_grad()
def test_an_empty_batch(experts: int) -> None:
    layer = CapsuleExperts(7, 3, experts, 4)
    x = torch.zeros(0, 7, 3)
    assert layer(x).shape == (0, experts, 4)
    assert layer.reconstruct(x).shape == (0, 7, 3)
    assert layer.free_energy(x).shape == (0,)


@pytest.mark.parametrize("experts", [5, 9])
def test_learning_on_a_cpu_computes_no_votes(
    experts: int, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a learning step nor an encoding nor its gradient calls the reference."""

    def no_votes(*_: Tensor) -> Tensor:
        raise AssertionError("votes were computed")

    layer = CapsuleExperts(7, 3, experts, 4, winners=2, generator=generator).eval()
    x, _ = problem((2, 7, 3, 5, 4), generator)
    expected = layer(x).detach()
    monkeypatch.setattr(F, "votes", no_votes)
    layer.contrastive_divergence(
        x, 2, mixing="bernoulli", chain=x.clone(), generator=generator
    ).backward()
    layer(x).sum().backward()
    layer.free_energy(x.requires_grad_()).sum().backward()
    torch.testing.assert_close(layer(x), expected)


@needs_simd
@pytest.mark.parametrize("experts", [5, 30])
def test_large_layers_learn_and_encode_by_compiled_c(
    experts: int, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With fewer experts than inputs, and with more."""
    layer = CapsuleExperts(13, 8, experts, 16, winners=2, sharpness=5.0, generator=generator)
    layer.reset_parameters(std=1.0, generator=generator)
    x, _ = problem((18, 13, 8, 1, 1), generator)
    monkeypatch.setattr(cpu.routing, "MIN_MULTIPLICATIONS", 0)
    for name in ("routing_by_agreement", "contrastive_divergence"):
        monkeypatch.setattr(torch_routing, name, refuse)
        monkeypatch.setattr(F, name, refuse)
    layer.contrastive_divergence(x, 2).backward()
    layer(x).sum().backward()
    with torch.no_grad():
        layer.reconstruct(x)
