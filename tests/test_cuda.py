"""What holds on a GPU; skipped where there is none."""

from __future__ import annotations

import importlib
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import Tensor

from poecaps import (
    CapsuleDensity,
    CapsuleExperts,
    _graphs,
    check_capsules,
    graphed,
    likelihood,
    sampling,
    squash,
)
from poecaps import functional as F
from poecaps.autoencoder import ConvAutoencoder, Stem
from poecaps.kernels import convolution, dispatch
from poecaps.kernels.triton import launch, support
from poecaps.layer import CapsuleDecoder
from poecaps.options import DensityOptions, ModelOptions
from poecaps.training import (
    Config,
    DecoderStage,
    DensityStage,
    EncoderStage,
    PixelDecoderStage,
    Progress,
    Stage,
    optim,
    resume,
    stages,
    train,
    trainer,
)
from poecaps.views import ViewOptions
from tests.kernels import operator_calls
from tests.training.fused_adam_facts import assert_steps_of_torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")

OPTIONS = [(axis, agreement) for axis in F.AXES for agreement in F.AGREEMENTS]


@contextmanager
def no_waiting() -> Iterator[None]:
    """Make every wait of the host for the GPU an error."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def layer_and_capsules(
    dtype: torch.dtype, **options: object
) -> tuple[CapsuleExperts, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    layer = CapsuleExperts(40, 8, 6, 16, sharpness=3.0, dtype=torch.float64, **options)  # type: ignore[arg-type]
    layer.reset_parameters(std=1.0, generator=generator)
    x = squash(torch.randn(32, 40, 8, generator=generator, dtype=torch.float64))
    return layer.to("cuda", dtype), x.to("cuda", dtype)


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.float16, 1e-2), (torch.bfloat16, 5e-2)],
    ids=str,
)
@pytest.mark.parametrize(("normalize", "agreement"), OPTIONS)
def test_the_gpu_agrees_with_float64_on_the_cpu(
    normalize: F.Axis, agreement: F.Agreement, dtype: torch.dtype, tolerance: float
) -> None:
    layer, x = layer_and_capsules(dtype, normalize=normalize, agreement=agreement)
    exact = CapsuleExperts(
        40, 8, 6, 16, sharpness=3.0, normalize=normalize, agreement=agreement, dtype=torch.float64
    )
    exact.load_state_dict(
        {name: value.cpu().double() for name, value in layer.state_dict().items()}
    )
    layer.contrastive_divergence(x).backward()
    exact.contrastive_divergence(x.cpu().double()).backward()
    assert layer.weight.grad is not None
    assert exact.weight.grad is not None
    for ours, reference in (
        (layer(x), exact(x.cpu().double())),
        (layer.weight.grad, exact.weight.grad),
    ):
        error = (ours.cpu().double() - reference).norm() / reference.norm()
        assert error.item() < tolerance * (3 if ours is layer.weight.grad else 1)


@pytest.mark.parametrize("keep", [True, False], ids=["logits kept", "logits made again"])
@pytest.mark.parametrize(
    "sizes", [(256, 576, 8, 20, 16), (130, 20, 16, 577, 8)], ids=["encoder", "decoder"]
)
@pytest.mark.parametrize(("normalize", "agreement"), OPTIONS)
def test_the_kernels_at_full_size(
    normalize: F.Axis,
    agreement: F.Agreement,
    sizes: tuple[int, ...],
    keep: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Codes, learning steps and gradients through routing, to 1e-5 of float64."""
    pytest.importorskip("triton")
    from poecaps.kernels.triton import routing_forward

    if not keep:
        monkeypatch.setattr(routing_forward, "KEEP_LOGITS_BYTES", 0)
    b, i, k, j, d = sizes
    generator = torch.Generator("cuda").manual_seed(2)
    capsules = squash(torch.randn(b, i, k, generator=generator, device="cuda"))
    weight = torch.randn(i, j, d, k, generator=generator, device="cuda") / 3
    pull = torch.randn(b, j, d, generator=generator, device="cuda")
    results = []
    for backend, dtype in (("triton", torch.float32), ("reference", torch.float64)):
        layer = CapsuleExperts(
            i,
            k,
            j,
            d,
            sharpness=5.0 if agreement == "cosine" else 0.5,
            normalize=normalize,
            agreement=agreement,
            backend=backend,  # type: ignore[arg-type]
            device="cuda",
            dtype=dtype,
        )
        with torch.no_grad():
            layer.weight.copy_(weight)
        x = capsules.to(dtype, copy=True).requires_grad_()
        layer.contrastive_divergence(x).backward()
        assert layer.weight.grad is not None
        learned = layer.weight.grad.clone()
        layer.zero_grad()
        code = layer(x)
        (code * pull).sum().backward()
        results.append((code, learned, x.grad, layer.weight.grad))
    for ours, exact in zip(*results, strict=True):
        assert ours is not None
        assert exact is not None
        assert ((ours.double() - exact).norm() / exact.norm()).item() < 1e-5


@pytest.mark.parametrize("winners", [None, 3])
def test_a_large_batch_learns_block_by_block(winners: int | None) -> None:
    pytest.importorskip("triton")
    from poecaps.kernels.triton import learning

    generator = torch.Generator("cuda").manual_seed(2)
    x = squash(torch.randn(1100, 576, 8, generator=generator, device="cuda"))
    weight = torch.randn(576, 20, 16, 8, generator=generator, device="cuda") / 3
    assert learning.images_per_block(len(x), weight) == 384
    gradients = []
    backends: list[tuple[torch.dtype, dispatch.Backend | None]] = [
        (torch.float32, None),
        (torch.float64, "reference"),
    ]
    for dtype, backend in backends:
        layer = CapsuleExperts(
            576, 8, 20, 16, winners=winners, backend=backend, device="cuda", dtype=dtype
        )
        with torch.no_grad():
            layer.weight.copy_(weight)
        layer.contrastive_divergence(x.to(dtype)).backward()
        assert layer.weight.grad is not None
        gradients.append(layer.weight.grad.double())
    ours, exact = gradients
    assert (ours - exact).norm() < 1e-5 * exact.norm()


@pytest.mark.parametrize("reuse", [True, False], ids=["reused", "by Triton"])
def test_compiled_kernels_take_any_batch_size(reuse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton would compile a kernel for a size of 1 or a multiple of 16; also for aligned
    addresses.
    """
    pytest.importorskip("triton")
    from poecaps.kernels.triton import backend

    monkeypatch.setattr(launch, "REUSE_COMPILED", reuse)
    generator = torch.Generator("cuda").manual_seed(2)
    capsules = squash(torch.randn(64, 9, 5, generator=generator, device="cuda"))
    weight = torch.randn(9, 4, 6, 5, generator=generator, device="cuda").requires_grad_()
    for images in (slice(0, 64), slice(0, 33), slice(0, 1), slice(0, 16), slice(1, 34)):
        x = capsules[images]
        ours = backend.contrastive_divergence(x, weight, F.RoutingOptions())
        with torch.no_grad():
            exact = F.contrastive_divergence(x.double(), weight.double()).grad_weight
        assert ours.grad_weight is not None
        assert exact is not None
        assert ((ours.grad_weight - exact).norm() / exact.norm()).item() < 1e-5


@pytest.mark.parametrize("mode", ["launched", "repeated", "replayed"])
@pytest.mark.parametrize("images", [128, 768], ids=["whole batch", "two blocks"])
@pytest.mark.parametrize("normalize", F.AXES)
def test_repeated_launches_learn_as_float64(
    normalize: F.Axis, images: int, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the third step on, the launches of the second one are repeated, or replayed."""
    pytest.importorskip("triton")
    from poecaps.kernels.triton import learning, plan

    monkeypatch.setattr(learning, "PLAN_STEPS", mode != "launched")
    monkeypatch.setattr(learning, "REPLAY_STEPS", mode == "replayed")
    monkeypatch.setattr(learning, "REPLAY_AFTER", 1)
    monkeypatch.setattr(learning, "_plans", {})
    monkeypatch.setattr(learning, "_replays", {})
    monkeypatch.setattr(learning, "_repetitions", {})
    generator = torch.Generator("cuda").manual_seed(2)
    weight = torch.randn(576, 20, 16, 8, generator=generator, device="cuda") / 3
    layer = CapsuleExperts(576, 8, 20, 16, normalize=normalize, device="cuda")
    exact = CapsuleExperts(
        576, 8, 20, 16, normalize=normalize, backend="reference", device="cuda", dtype=torch.float64
    )
    for step in range(5):
        x = squash(torch.randn(images, 576, 8, generator=generator, device="cuda"))
        for each in (layer, exact):
            each.zero_grad()
            with torch.no_grad():
                each.weight.copy_(weight * (1 + step / 8))
            each.contrastive_divergence(x.to(each.weight.dtype)).backward()
        assert layer.weight.grad is not None
        assert exact.weight.grad is not None
        error = (layer.weight.grad - exact.weight.grad).norm() / exact.weight.grad.norm()
        assert error.item() < 1e-5
    blocks = -(-images // learning.images_per_block(images, weight))
    planned = mode != "launched"
    assert [each is not None for each in learning._plans.values()] == [True] * planned * blocks
    replayed = mode == "replayed" and blocks == 1
    assert [type(each) for each in learning._replays.values()] == [plan.Replay] * replayed


def test_whitened_colours_can_be_captured() -> None:
    """The steps of the first stage are replayed as a CUDA graph, for colour images, too."""
    generator = torch.Generator("cuda").manual_seed(0)
    stem = Stem(3, 4, colour_whitening=True, device="cuda")
    images = torch.rand(6, 3, 8, 8, generator=generator, device="cuda")
    stem.fit_colours([images])
    plain = stem.encode(images)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = stem.encode(images)
    graph.replay()
    assert torch.equal(captured, plain)


@pytest.mark.parametrize(
    ("winners", "views", "recombinations"),
    [(None, 1, 0), (None, 3, 0), (2, 1, 0), (2, 3, 0), (2, 3, 2)],
)
@pytest.mark.parametrize("mixing", F.MIXINGS)
def test_training_by_replays_gives_what_plain_steps_give(
    mixing: F.Mixing,
    winners: int | None,
    views: int,
    recombinations: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All stages, with dropout, chains, views, restarts and Bernoulli draws: those of each step.

    Several encoders are halved after half of the steps, or recombined.

    Twelve steps each: convolutions add up in any order, and in longer training the difference
    grows by itself. It is largest where Adam divides small gradients by their size, as those of
    the bias of pixels.
    """
    images = np.random.default_rng(0).integers(0, 255, (192, 20, 19), dtype=np.uint8)
    images[:, 5:9] //= 4
    np.save(tmp_path / "images.npy", images)
    config = Config(
        data=str(tmp_path / "images.npy"),
        model=ModelOptions(
            features=8,
            capsule_dim=4,
            experts=((4, 5), (3, 4)),
            normalize="outputs",
            whiten=True,
            equalized_components=2,
            pixel_decoder=True,
            density=DensityOptions(experts=(5, 4), linear_dims=2, base_components=8),
        ),
        autoencoder=Stage(epochs=1),
        density=DensityStage(
            epochs=1,
            chains=16,
            lifetime=6 if views == 1 else 0,
            levels=0 if views == 1 else 4,
            partition_steps=0,
        ),
        encoder=EncoderStage(
            epochs=1,
            learning_rate=1e-3,
            mixing=mixing,
            winners=winners,
            target_firing=0.5,
            views=ViewOptions(count=views),
            restarts=views,
            halvings=1 if views > 1 and not recombinations else 0,
            recombinations=recombinations,
        ),
        decoder=DecoderStage(epochs=1, learning_rate=1e-3, single_expert_share=0.5),
        pixel_decoder=PixelDecoderStage(epochs=1, single_expert_share=0.5),
        batch_size=16,
        device="cuda",
        precision="float32",
    )

    def one_of_each(log_odds: Mapping[int, torch.Tensor], count: int) -> list[tuple[int, int, int]]:
        """Always the same experts: the most stable ones may change by rounding."""
        starts = list(log_odds)
        return [(starts[expert % len(starts)], expert, 1) for expert in range(count)]

    monkeypatch.setattr(stages, "choose_experts", one_of_each)
    recorded: list[bool] = []
    can_record = trainer.Trainer._can_graph

    def note(*arguments: Any) -> bool:
        recorded.append(can_record(*arguments))
        return recorded[-1]

    monkeypatch.setattr(_graphs, "MIN_REPLAYS", 1)
    monkeypatch.setattr(trainer.Trainer, "_can_graph", note)
    replayed = train(config, tmp_path / "replayed").state_dict()
    assert recorded == [True] * (7 if views == 1 else 9)  # anew in each of two encoders
    monkeypatch.setattr(trainer.Trainer, "_can_graph", lambda *_: False)
    plain = train(config, tmp_path / "plain").state_dict()
    for name, value in plain.items():
        if not name.startswith("code_density."):  # clusters may be numbered otherwise
            assert (replayed[name] - value).norm() <= 0.05 * value.norm() + 1e-6, name


DENSITIES: dict[str, dict[str, Any]] = {
    "even": {},
    "components": {"base_components": 3},
    "ball": {"base": "ball"},
    "routing": {"iterations": 3, "backend": "triton"},
}
SAMPLERS: dict[str, dict[str, Any]] = {
    "hmc": {},
    "langevin": {"sampler": "langevin"},
    "gibbs": {"sampler": "gibbs"},
    "tempering": {"ladder": (1.0, 0.5, 0.0)},
    "strip": {"keep_every": 20},
}


def _gpu_density(**options: Any) -> CapsuleDensity:
    generator = torch.Generator("cuda").manual_seed(0)
    density = CapsuleDensity(
        16, 8, 8, 16, linear_dims=3, strength=2.0, device="cuda", generator=generator, **options
    )
    if options.get("base_components"):
        density.base.fit([torch.randn(64, 16, 8, device="cuda", generator=generator)])
    return density


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("name", DENSITIES)
def test_replayed_chains_are_those_of_plain_steps(
    name: str, sampler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    density, options = _gpu_density(**DENSITIES[name]), SAMPLERS[sampler]

    def draw() -> sampling.Samples:
        generator = torch.Generator("cuda").manual_seed(1)
        return sampling.sample(density, 8, steps=40, anneal=40, generator=generator, **options)

    replays = 0
    replay = torch.cuda.CUDAGraph.replay

    def count(graph: torch.cuda.CUDAGraph) -> None:
        nonlocal replays
        replays += 1
        replay(graph)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", count)
    replayed = draw()
    assert replays == 80 - _graphs.WARMUP_CALLS
    monkeypatch.setattr(_graphs, "MIN_REPLAYS", 1000)
    plain = draw()
    assert replays == 80 - _graphs.WARMUP_CALLS
    torch.testing.assert_close(replayed.free_energy, plain.free_energy, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(replayed.capsules, plain.capsules, rtol=1e-3, atol=1e-3)
    assert replayed.acceptance == pytest.approx(plain.acceptance)
    assert len(replayed.strip) == len(plain.strip)
    for ours, theirs in zip(replayed.strip, plain.strip, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", DENSITIES)
def test_replayed_estimates_are_those_of_plain_steps(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    density = _gpu_density(**DENSITIES[name])

    def estimate() -> likelihood.LogPartition:
        generator = torch.Generator("cuda").manual_seed(1)
        return likelihood.estimate_log_partition(density, chains=16, steps=60, generator=generator)

    replayed = estimate()
    monkeypatch.setattr(_graphs, "MIN_REPLAYS", 1000)
    plain = estimate()
    assert replayed.forward == pytest.approx(plain.forward, abs=1e-2)
    assert replayed.reverse == pytest.approx(plain.reverse, abs=1e-2)


def test_a_run_goes_on_on_a_gpu(tmp_path: Path) -> None:
    """In the middle of each stage, with what Adam remembers: as good as without a break."""
    images = np.random.default_rng(0).integers(0, 255, (192, 20, 19), dtype=np.uint8)
    np.save(tmp_path / "images.npy", images)
    config = Config(
        data=str(tmp_path / "images.npy"),
        model=ModelOptions(
            features=8, capsule_dim=4, experts=((4, 5),), whiten=True, pixel_decoder=True
        ),
        autoencoder=Stage(epochs=1),
        encoder=EncoderStage(epochs=1, learning_rate=1e-3),
        decoder=DecoderStage(epochs=1, learning_rate=1e-3),
        pixel_decoder=PixelDecoderStage(epochs=1),
        batch_size=16,
        device="cuda",
        precision="float32",
        checkpoint_every=0,
    )
    whole = train(config, tmp_path / "whole").state_dict()

    def stop(progress: Progress) -> None:
        if progress.step == 7 and progress.number not in broken:
            broken.append(progress.number)
            raise KeyboardInterrupt

    broken: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "run", report=stop)
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            resume(tmp_path / "run", report=stop)
    for name, value in resume(tmp_path / "run").state_dict().items():
        if not name.startswith("code_density."):
            assert (whole[name] - value).norm() <= 0.02 * value.norm() + 1e-6, name


def test_without_triton_the_gpu_takes_the_version_without_votes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer, x = layer_and_capsules(torch.float32)
    with torch.no_grad():
        expected = layer(x)
    monkeypatch.setattr(support, "installed", lambda: False)
    assert dispatch.choose(x, layer.weight) == "torch"
    with torch.no_grad():
        torch.testing.assert_close(layer(x), expected)
    layer.backend = "triton"
    with pytest.raises(ValueError, match="pip install triton"):
        layer(x)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("winners", [None, 2])
def test_a_training_step_never_waits(winners: int | None) -> None:
    layer, x = layer_and_capsules(torch.float32, winners=winners)
    chain, generator = x.clone(), torch.Generator("cuda").manual_seed(0)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    for mixing in F.MIXINGS:
        with no_waiting():
            optimizer.zero_grad()
            layer.contrastive_divergence(
                x, 2, mixing=mixing, chain=chain, generator=generator
            ).backward()
            optimizer.step()
    with pytest.raises(RuntimeError, match="synchronizing"), no_waiting():
        check_capsules(x)


def learned_in_a_loop(normalize: F.Axis, *, replayed: bool) -> tuple[Tensor, list[float]]:
    """Learn as docs/how-to/layer.md does: → weight, and the loss of each step."""
    layer, data = layer_and_capsules(torch.float32, normalize=normalize)
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.1, capturable=True)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = layer.contrastive_divergence(x)
        loss.backward()
        optimizer.step()
        return loss.detach()

    function = graphed(step, "cuda") if replayed else step
    losses = [function(batch).item() for _ in range(3) for batch in data.split(8)]
    return layer.weight.detach(), losses


@pytest.mark.parametrize("normalize", F.AXES)
def test_a_loop_can_be_replayed(normalize: F.Axis) -> None:
    weight, losses = learned_in_a_loop(normalize, replayed=False)
    replayed_weight, replayed_losses = learned_in_a_loop(normalize, replayed=True)
    torch.testing.assert_close(replayed_weight, weight, rtol=1e-4, atol=1e-5)
    assert replayed_losses == pytest.approx(losses, rel=1e-4, abs=1e-5)


def test_a_replayed_step_takes_inputs_of_one_shape() -> None:
    double = graphed(lambda x: 2 * x, "cuda")
    x = torch.arange(8.0, device="cuda")
    for shift in range(6):
        torch.testing.assert_close(double(x + shift), 2 * (x + shift))
    with pytest.raises(ValueError, match=r"captured for inputs of shapes \[\(8,\)\]"):
        double(x[:1])


def test_check_capsules_looks_at_values_on_the_gpu() -> None:
    _, x = layer_and_capsules(torch.float32)
    check_capsules(x)
    with pytest.raises(ValueError, match="has norm"):
        check_capsules(x * 9)


@pytest.mark.usefixtures("no_votes")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_autocast(dtype: torch.dtype) -> None:
    """By the same kernels, which compute in float32."""
    pytest.importorskip("triton")
    layer, x = layer_and_capsules(torch.float32)
    exact = layer(x)
    with torch.autocast("cuda", dtype=dtype):
        code, loss = layer(x), layer.contrastive_divergence(x)
    assert code.dtype == dtype
    assert loss.dtype == torch.float32
    assert ((code.float() - exact).norm() / exact.norm()).item() < 0.05
    loss.backward()
    assert layer.weight.grad is not None
    assert bool(layer.weight.grad.isfinite().all())


# --------------------------------------------------------------------------------------------------
# Operators and torch.compile


@pytest.fixture
def no_votes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nothing be computed by the reference."""

    def refuse(*_: Tensor) -> Tensor:
        raise AssertionError("the reference computed votes")

    monkeypatch.setattr(F, "votes", refuse)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of the compiler, which this imports
        torch.compiler.reset()


@pytest.mark.filterwarnings("ignore")  # the compiler's own warnings differ from release to release
@pytest.mark.parametrize("sizes", operator_calls.SIZES)
@pytest.mark.parametrize(("normalize", "agreement"), OPTIONS)
def test_opcheck(sizes: tuple[int, ...], normalize: F.Axis, agreement: F.Agreement) -> None:
    pytest.importorskip("triton")
    importlib.import_module("poecaps.kernels.operators")
    generator = torch.Generator().manual_seed(1)
    calls = operator_calls.operator_calls(sizes, normalize, agreement, generator, "cuda")
    for operator, arguments in calls:
        torch.library.opcheck(operator, arguments)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("no_votes")
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("winners", [None, 3])
def test_compiled_layers(winners: int | None, dynamic: bool) -> None:
    """The code and its gradients, the loss and its gradient: as without the compiler."""
    pytest.importorskip("triton")
    layer, x = layer_and_capsules(torch.float32, winners=winners)
    layer.eval()
    for method in (layer.forward, layer.free_energy, layer.contrastive_divergence):
        compiled = torch.compile(method, fullgraph=True, dynamic=dynamic)
        for images in (32, 17):
            found = []
            for function in (method, compiled):
                layer.zero_grad()
                leaf = x[:images].clone().requires_grad_()
                value = function(leaf)
                value.square().sum().backward()
                found.append((value.detach(), leaf.grad, layer.weight.grad))
            for eager, traced in zip(*found, strict=True):
                if eager is None:  # capsules are data for the learning rule
                    assert traced is None
                else:
                    torch.testing.assert_close(traced, eager, rtol=1e-3, atol=1e-5)


@pytest.mark.filterwarnings("ignore")
def test_compiled_reconstructions_and_decoders() -> None:
    pytest.importorskip("triton")
    torch.compiler.reset()
    layer, x = layer_and_capsules(torch.float32)
    compiled = torch.compile(layer.reconstruct, fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), layer.reconstruct(x), rtol=1e-4, atol=1e-5)
    slopes = []
    for function in (layer.reconstruct, compiled):
        leaf = x.clone().requires_grad_()
        function(leaf).square().sum().backward()
        slopes.append(leaf.grad)
    torch.testing.assert_close(slopes[1], slopes[0], rtol=1e-3, atol=1e-5)
    decoder = CapsuleDecoder(6, 16, 40, 8, device="cuda")
    code = layer(x).detach()
    found = []
    rule = decoder.contrastive_divergence
    for loss in (rule, torch.compile(rule, fullgraph=True)):
        decoder.zero_grad()
        loss(code, x).backward()
        found.append(decoder.weight.grad)
    torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-6)


class Supervised(torch.nn.Module):
    """A small network with labels: one expert for each class."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator("cuda").manual_seed(3)
        self.linear = torch.nn.Linear(24, 40 * 8, device="cuda")
        self.experts = CapsuleExperts(40, 8, 6, 16, normalize="outputs", device="cuda")
        with torch.no_grad():
            self.linear.weight.normal_(std=0.2, generator=generator)
            self.linear.bias.zero_()
        self.experts.reset_parameters(std=0.1, generator=generator)

    def forward(self, images: Tensor, label: Tensor) -> Tensor:
        code: Tensor = self.experts(squash(self.linear(images).view(-1, 40, 8)))
        return torch.nn.functional.cross_entropy(8 * code.norm(dim=-1), label)


def supervised_losses(**options: Any) -> list[float]:
    """Train the same small network on the same batches: → the loss of each step."""
    generator = torch.Generator("cuda").manual_seed(4)
    network = Supervised()
    loss = torch.compile(network, fullgraph=True, **options) if options else network
    optimizer = torch.optim.Adam(network.parameters(), lr=3e-3)
    losses = []
    for _ in range(12):
        images = torch.randn(32, 24, device="cuda", generator=generator)
        label = images[:, :6].argmax(1)
        torch.compiler.cudagraph_mark_step_begin()
        value = loss(images, label)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("no_votes")
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_supervised_training(mode: str) -> None:
    """Also if the compiler replays CUDA graphs, in which the operators are captured."""
    pytest.importorskip("triton")
    from torch._dynamo.utils import counters

    eager = supervised_losses()
    assert eager[-1] < eager[0]
    counters.clear()
    assert supervised_losses(mode=mode) == pytest.approx(eager, rel=1e-3)
    assert counters["inductor"]["cudagraph_skips"] == 0


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("no_votes")
def test_compiled_learning_that_is_replayed() -> None:
    pytest.importorskip("triton")
    weights = []
    for is_compiled in (False, True):
        layer, data = layer_and_capsules(torch.float32)
        loss: Callable[[Tensor], Tensor] = layer.contrastive_divergence
        if is_compiled:
            loss = torch.compile(loss, fullgraph=True, mode="reduce-overhead")
        optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
        for batch in data.repeat(2, 1, 1).split(8):
            torch.compiler.cudagraph_mark_step_begin()
            optimizer.zero_grad()
            loss(batch).backward()
            optimizer.step()
        weights.append(layer.weight.detach())
    torch.testing.assert_close(weights[1], weights[0], rtol=1e-3, atol=1e-5)


@pytest.mark.usefixtures("no_votes")
@torch.no_grad()
def test_an_empty_batch() -> None:
    layer, x = layer_and_capsules(torch.float32)
    assert layer(x[:0]).shape == (0, 6, 16)
    assert layer.reconstruct(x[:0]).shape == (0, 40, 8)
    assert layer.free_energy(x[:0]).shape == (0,)
    assert layer.route(x[:0]).coefficients.shape == (0, 40, 6)


def test_tensors_on_different_devices() -> None:
    layer, x = layer_and_capsules(torch.float32)
    for backend in (None, *dispatch.BACKENDS):
        layer.backend = backend
        with pytest.raises(ValueError, match="x is on 'cpu' but the layer's weight is on 'cuda:0'"):
            layer(x.cpu())


@pytest.mark.parametrize(
    ("batch", "channels", "size"), [(128, 1, (28, 28)), (130, 3, (32, 29)), (600, 1, (28, 28))]
)
def test_the_triton_convolutions_at_full_size(
    batch: int, channels: int, size: tuple[int, int]
) -> None:
    """Loss and gradients of a step in bfloat16 are near those of float32.

    The largest part of the difference comes from activations whose sign flips.
    """
    pytest.importorskip("triton")
    generator = torch.Generator().manual_seed(3)
    model = ConvAutoencoder(channels, generator=generator).to("cuda")
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    images = torch.rand(batch, channels, *size, generator=generator).bfloat16().float().to("cuda")
    uniform = torch.rand(batch, 128, *model.grid(size), generator=generator).to("cuda")
    results = []
    for half in (True, False):
        model.zero_grad()
        with (
            torch.autocast("cuda", dtype=torch.bfloat16, enabled=half),
            torch.backends.cudnn.flags(allow_tf32=False),
        ):
            if torch.cuda.get_device_capability()[0] == 9:
                reason = convolution.why_not(images, model._conv_parameters(), size)
                assert (reason is None) == half
            loss = model.loss(images, uniform=uniform)
            loss.backward()
        results.append([loss.detach(), *(parameter.grad for parameter in model.parameters())])
    for ours, exact in zip(*results, strict=True):
        assert ((ours - exact).norm() / exact.norm()).item() < 2e-2


@pytest.mark.parametrize("large", [50, 10**6])
@pytest.mark.parametrize("size", [1.0, 1e-8])
def test_fused_adam(large: int, size: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optim, "LARGE", large)
    assert_steps_of_torch("cuda", 0.1, size, torch.Generator().manual_seed(1))
