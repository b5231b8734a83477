"""Training of several encoders, of which one is kept without labels."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch

from poecaps import CapsuleNetwork, ModelError
from poecaps import functional as F
from poecaps.data import load
from poecaps.serialization import read_tensors, write_tensors
from poecaps.training import Config, Progress, TrainingError, resume, train
from poecaps.training.checkpoint import CHECKPOINT, read_checkpoint
from poecaps.training.config import CRITERIA, EncoderStage, Stage
from poecaps.training.finetune import fine_tune
from poecaps.training.record import without_machine
from poecaps.views import ViewOptions
from tests.training.runs import Stop, assert_same_weights, metrics, weights, without_epochs
from tests.training.test_distributed import EXACT, finish, torchrun

if TYPE_CHECKING:
    from pathlib import Path

    from poecaps import CapsuleExperts
    from tests.processes import Commands

VIEWS = ViewOptions(count=3, rotation=30.0, mirror=True)


def config_with(data: Path, **changes: Any) -> Config:
    """A short run of the autoencoder and of two layers of experts."""
    encoder = EncoderStage(
        epochs=2, learning_rate=0.05, mixing="bernoulli", winners=1, target_firing=0.5, views=VIEWS
    )
    changed = replace(encoder, **{"restarts": 3, **changes})
    autoencoder = Stage(epochs=1, learning_rate=5e-3)
    return without_epochs(
        data,
        autoencoder=autoencoder,
        encoder=changed,
        precision="float32",
        checkpoint_every=0,
    )


def selections(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "run.json").read_text())["selection"]
    return found


def stop_at(stage: str, step: int, config: Config, folder: Path) -> None:
    def report(progress: Progress) -> None:
        if (progress.stage, progress.step) == (stage, step):
            raise Stop

    with pytest.raises(Stop):
        train(config, folder, report=report)


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("restarts") / "run"
    train(config_with(data), folder)
    return folder


def test_the_start_with_the_highest_score_is_kept(whole: Path) -> None:
    for selection in selections(whole).values():
        assert selection["criterion"] == "margin"
        scores = selection["scores"]
        assert set(scores) == set(CRITERIA)
        assert all(
            len(each) == len(set(each)) == 3 for each in scores.values() if each != [1.0] * 3
        )
        assert scores["margin"][selection["kept"] - 1] == max(scores["margin"])
        assert all(0 <= share <= 1 for share in scores["agreement"])
        assert min(scores["margin"]) > 0
        assert max(scores["reconstruction"]) < 0 < min(scores["energy"])
    assert list(selections(whole)) == ["encoder 1", "encoder 2"]
    record = json.loads((whole / "run.json").read_text())
    assert without_machine(record)["selection"] == selections(whole)


def test_the_margin_of_the_saved_layer_is_the_score_of_the_start_that_was_kept(
    data: Path, whole: Path
) -> None:
    """So the weights that are saved are those that were scored: a scaling has no effect on it."""
    network = CapsuleNetwork.load(whole)
    x = network.capsules(load(str(data)).batch(slice(None)))
    layers = cast("list[CapsuleExperts]", list(network.encoders))
    for layer, selection in zip(layers, selections(whole).values(), strict=True):
        best = F.log_odds(layer.route(x).preactivation).sort(dim=1, descending=True).values
        margin = (best[:, 0] - best[:, 1]).mean().item()
        assert margin == pytest.approx(max(selection["scores"]["margin"]), rel=1e-3)
        x = layer(x)


@pytest.mark.parametrize("criterion", CRITERIA)
def test_each_criterion_chooses_by_its_own_score(
    criterion: Any, data: Path, whole: Path, tmp_path: Path
) -> None:
    train(config_with(data, criterion=criterion), tmp_path / "run")
    ours, theirs = selections(tmp_path / "run")["encoder 1"], selections(whole)["encoder 1"]
    assert ours["scores"] == theirs["scores"]
    assert ours["kept"] == 1 + max(range(3), key=ours["scores"][criterion].__getitem__)


def test_every_start_learns_as_if_it_were_alone(data: Path, tmp_path: Path) -> None:
    """The first one from the weights of a run without restarts, bit for bit."""
    stop_at("encoder 1", 6, config_with(data, restarts=1), tmp_path / "alone")
    stop_at("encoder 1", 6, config_with(data), tmp_path / "together")
    alone, together = (read_checkpoint(tmp_path / name) for name in ("alone", "together"))
    for name in ("encoders.0.weight", "encoders.0.balance"):
        assert torch.equal(alone.model[name], together.model[name])
    assert not alone.stage_state
    first = together.model["encoders.0.weight"]
    second, third = (together.stage_state[f"start {number}.weight"] for number in (2, 3))
    assert len({tensor.sum().item() for tensor in (first, second, third)}) == 3
    assert together.stage_state["start 3.balance"].any()


def test_a_kept_first_start_is_the_run_without_restarts(data: Path, tmp_path: Path) -> None:
    one = config_with(data, restarts=1)
    model = replace(one.model, experts=((4, 5),))
    train(replace(one, model=model), tmp_path / "one")
    for criterion in CRITERIA:
        folder = tmp_path / criterion
        train(replace(config_with(data, restarts=2, criterion=criterion), model=model), folder)
        if selections(folder)["encoder 1"]["kept"] == 1:
            assert_same_weights(folder, tmp_path / "one")
        else:
            ours, theirs = weights(folder), weights(tmp_path / "one")
            assert not torch.equal(ours["encoders.0.weight"], theirs["encoders.0.weight"])


def test_without_restarts_nothing_is_recorded(data: Path, tmp_path: Path) -> None:
    train(config_with(data, restarts=1), tmp_path / "run")
    assert "selection" not in json.loads((tmp_path / "run" / "run.json").read_text())


@pytest.mark.parametrize("at", [("encoder 1", 5), ("encoder 2", 1), ("encoder 2", 7)])
def test_a_resumed_run_with_restarts_is_bit_identical(
    at: tuple[str, int], data: Path, whole: Path, tmp_path: Path
) -> None:
    config = config_with(data)
    stop_at(*at, config, tmp_path / "run")
    assert read_checkpoint(tmp_path / "run").config == config
    resume(tmp_path / "run")
    assert_same_weights(tmp_path / "run", whole)
    assert metrics(tmp_path / "run") == metrics(whole)
    assert selections(tmp_path / "run") == selections(whole)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"start 2.weight": None}, "start 2.weight is not that of encoder 1"),
        ({"start 3.balance": torch.zeros(5)}, "start 3.balance is not that of encoder 1"),
        ({"start 3.balance": torch.full((4,), torch.nan)}, "start 3.balance is not that of"),
    ],
)
def test_a_damaged_start_is_an_error(
    change: dict[str, torch.Tensor | None], message: str, data: Path, tmp_path: Path
) -> None:
    stop_at("encoder 1", 5, config_with(data), tmp_path / "run")
    tensors, about = read_tensors(tmp_path / "run" / CHECKPOINT)
    changed = {**tensors, **{f"stage.{name}": value for name, value in change.items()}}
    kept = {name: value for name, value in changed.items() if value is not None}
    write_tensors(tmp_path / "run" / CHECKPOINT, kept, about)
    with pytest.raises(ModelError, match=message):
        resume(tmp_path / "run")


# --------------------------------------------------------------------------------------------------
# Halvings

STEPS = 12  # of a stage


@pytest.fixture(scope="module")
def halved(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five encoders, two after a quarter of the steps; one of them after half of them."""
    folder = tmp_path_factory.mktemp("halvings") / "run"
    train(config_with(data, restarts=5, halvings=2), folder)
    return folder


def test_the_worse_half_is_dropped_after_a_quarter_and_a_half_of_the_steps(halved: Path) -> None:
    for selection in selections(halved).values():
        first, second = selection["halvings"]
        assert (first["step"], second["step"]) == (STEPS // 4, STEPS // 2)
        assert first["starts"] == [1, 2, 3, 4, 5]
        for before, after in ((first, second), (second, selection)):
            assert all(len(each) == len(before["starts"]) for each in before["scores"].values())
            margin = dict(zip(before["starts"], before["scores"]["margin"], strict=True))
            dropped = set(margin) - set(after["starts"])
            assert len(dropped) == len(margin) // 2
            left = [margin[number] for number in after["starts"]]
            assert max(margin[number] for number in dropped) < min(left)
        assert selection["kept"] in selection["starts"]
        assert len(selection["starts"]) == len(selection["scores"]["margin"]) == 2


def test_an_encoder_that_is_not_dropped_learns_what_it_learns_without_halvings(
    data: Path, halved: Path, tmp_path: Path
) -> None:
    """With the moments of its own optimizer, to the bit: scores and weights of the first layer."""
    train(config_with(data, restarts=5), tmp_path / "run")
    ours, theirs = selections(halved)["encoder 1"], selections(tmp_path / "run")["encoder 1"]
    for name, scores in theirs["scores"].items():
        assert [scores[number - 1] for number in ours["starts"]] == ours["scores"][name]
    best = max(ours["starts"], key=lambda number: theirs["scores"]["margin"][number - 1])
    assert ours["kept"] == best
    assert theirs["halvings"] == []


@pytest.mark.parametrize("at", [("encoder 1", 4), ("encoder 2", 8)])
def test_a_resumed_run_with_halvings_is_bit_identical(
    at: tuple[str, int], data: Path, halved: Path, tmp_path: Path
) -> None:
    """From the checkpoint of step 3, after which encoders are dropped, and from one after both."""
    stop_at(*at, config_with(data, restarts=5, halvings=2), tmp_path / "run")
    state = read_checkpoint(tmp_path / "run").stage_state
    assert ("halving 1.step" in state) == ("halving 2.step" in state) == (at[1] == 8)
    resume(tmp_path / "run")
    assert_same_weights(tmp_path / "run", halved)
    assert metrics(tmp_path / "run") == metrics(halved)
    assert selections(tmp_path / "run") == selections(halved)


def test_a_damaged_comparison_is_an_error(data: Path, tmp_path: Path) -> None:
    stop_at("encoder 1", 8, config_with(data, restarts=5, halvings=2), tmp_path / "run")
    tensors, about = read_tensors(tmp_path / "run" / CHECKPOINT)
    for name in ("halving 1.margin", "halving 1.step", "halving 2.energy"):
        changed = {**tensors, f"stage.{name}": torch.zeros(7)}
        write_tensors(tmp_path / "run" / CHECKPOINT, changed, about)
        with pytest.raises(ModelError, match=f"{name} is not that of encoder 1"):
            resume(tmp_path / "run")


def test_a_single_encoder_may_be_left(data: Path, tmp_path: Path) -> None:
    """Also where there are fewer steps than halvings."""
    config = config_with(data, restarts=4, halvings=2, epochs=1)
    train(replace(config, batch_size=48), tmp_path / "run")
    selection = selections(tmp_path / "run")["encoder 1"]
    assert [each["step"] for each in selection["halvings"]] == [1, 1]
    assert selection["starts"] == [selection["kept"]]


def test_two_processes_with_restarts_learn_what_one_learns(
    commands: Commands, data: Path, tmp_path: Path
) -> None:
    arguments = """--autoencoder.epochs 1 --encoder.epochs 2 --decoder.epochs 0
        --pixel-decoder.epochs 0 --encoder.winners 1 --encoder.target-firing 0.5
        --encoder.restarts 3 --encoder.halvings 1 --encoder.views.count 3
        --encoder.views.rotation 30 --encoder.views.mirror"""
    finish(torchrun(commands, data, tmp_path / "two", *EXACT, *arguments.split()))
    train(config_with(data, halvings=1), tmp_path / "one")
    two, one = weights(tmp_path / "two"), weights(tmp_path / "one")
    ours, theirs = selections(tmp_path / "two"), selections(tmp_path / "one")
    for layer in range(2):
        name, stage = f"encoders.{layer}.weight", f"encoder {layer + 1}"
        assert (two[name] - one[name]).norm() <= 1e-3 * one[name].norm(), name
        assert ours[stage]["kept"] == theirs[stage]["kept"]
        assert ours[stage]["starts"] == theirs[stage]["starts"]
        assert len(ours[stage]["starts"]) == 2
        margins = (each[stage]["scores"]["margin"] for each in (ours, theirs))
        assert next(margins) == pytest.approx(next(margins), rel=1e-2)


def test_a_start_that_diverges_is_an_error(data: Path, tmp_path: Path) -> None:
    config = config_with(data, optimizer="sgd", learning_rate=1e30, views=ViewOptions())
    with pytest.raises(TrainingError, match="encoder 1 diverged at step"):
        train(config, tmp_path / "run")


def test_fine_tuning_goes_on_with_the_encoder_that_was_kept(data: Path, whole: Path) -> None:
    network, images = CapsuleNetwork.load(whole), load(str(data))
    config = config_with(data)
    once = replace(config, encoder=replace(config.encoder, restarts=1))
    other = CapsuleNetwork.load(whole)
    fine_tune(network, config, images, learning_rate_ratio=0.1, seed=1)
    fine_tune(other, once, images, learning_rate_ratio=0.1, seed=1)
    for ours, theirs in zip(network.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"restarts": 0}, r"encoder\.restarts must be a whole number from 1 to 1000, but is 0"),
        ({"halvings": -1}, r"encoder\.halvings must be a whole number of at least 0, but is -1"),
        ({"halvings": 2}, r"encoder\.halvings must be at most 1 for encoder\.restarts 3.* is 2"),
        ({"criterion": "best"}, r"encoder\.criterion must be .*margin.*but is 'best'"),
        (
            {"criterion": "agreement", "views": ViewOptions()},
            r"encoder\.criterion agreement needs encoder\.views\.count of at least 2, but is 1",
        ),
        ({"init_std": 0.0}, r"encoder\.init_std must be above 0 for encoder\.restarts 3"),
    ],
)
def test_invalid_options_are_an_error(
    options: dict[str, Any], message: str, data: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        train(config_with(data, **options), tmp_path / "run")


def test_a_single_expert_has_no_margin(data: Path, tmp_path: Path) -> None:
    config = config_with(data)
    config = replace(config, model=replace(config.model, experts=((4, 5), (1, 4))))
    with pytest.raises(ValueError, match=r"encoder\.criterion margin needs at least 2 experts"):
        train(config, tmp_path / "run")
