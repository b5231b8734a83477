"""Encoders that are made of the experts of others after half of the stage."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from poecaps import CapsuleExperts, CapsuleNetwork, ModelError, squash
from poecaps import functional as F
from poecaps.data import load
from poecaps.serialization import read_tensors, write_tensors
from poecaps.training import resume, train
from poecaps.training.checkpoint import CHECKPOINT, read_checkpoint
from poecaps.training.finetune import fine_tune
from poecaps.training.recombination import BALANCE_RATE, choose_experts, overlap, recombined
from poecaps.training.record import without_machine
from poecaps.views import ViewOptions
from tests.training.runs import assert_same_weights, metrics, weights
from tests.training.test_distributed import EXACT, finish, torchrun
from tests.training.test_restarts import STEPS, config_with, selections, stop_at

if TYPE_CHECKING:
    from pathlib import Path

    from poecaps.training import Config
    from tests.processes import Commands

HALF = STEPS // 2


# --------------------------------------------------------------------------------------------------
# The choice of experts


def choices(*views: str) -> torch.Tensor:
    """Log-odds of three experts that choose as written: a word for each view, a digit per image."""
    experts = torch.tensor([[int(digit) for digit in word] for word in views])
    return torch.nn.functional.one_hot(experts.T, 3).float()


# Images 0 to 2, 3 to 5 and 6 to 8 are three classes. The first encoder has found the first class,
# and divides the others in another way; the second one has found the others, and divides the first.
FIRST = choices("000121212", "000121221")
SECOND = choices("001111222", "010111222")


def test_the_most_stable_experts_without_a_common_image_are_the_classes() -> None:
    """Of the first encoder its first expert, and of the second one its last two."""
    found = choose_experts({1: FIRST, 2: SECOND}, 3)
    assert {(start, expert) for start, expert, _ in found} == {(1, 0), (2, 1), (2, 2)}


def test_the_stability_decides_between_experts_with_the_same_images() -> None:
    """Also if the more stable one is not that of the first encoder."""
    shaky = choices("000111222", "001111222")  # its first expert loses a view
    firm = choices("111000222", "111000222")
    for order in ({1: shaky, 2: firm}, {2: firm, 1: shaky}):
        found = choose_experts(order, 3)
        assert (2, 1, 1.0) in found
        assert (1, 0) not in {each[:2] for each in found}


def test_experts_with_the_same_images_are_not_taken_twice() -> None:
    """However stable they are: two encoders have a stable expert of the second class."""
    same = choices("000111222", "000111200")
    other = choices("000111222", "000112222")
    found = choose_experts({1: same, 2: same, 3: other}, 3)
    assert {each[:2] for each in found} == {(1, 1), (3, 0), (3, 2)}


def test_a_single_encoder_remains_what_it_is() -> None:
    found = choose_experts({5: SECOND}, 3)
    assert sorted(each[:2] for each in found) == [(5, 0), (5, 1), (5, 2)]
    assert [each[2] for each in found] == sorted((each[2] for each in found), reverse=True)


def test_if_experts_are_missing_they_may_share_more_images() -> None:
    """But one without images is only taken if there is no other."""
    half = choices("000011111", "000011111")  # the third expert has no images
    other = choices("011111222", "011111222")
    found = choose_experts({1: half, 2: other}, 3)
    assert {each[:2] for each in found} == {(1, 0), (1, 1), (2, 1)}
    assert {each[:2] for each in choose_experts({1: half}, 3)} == {(1, 0), (1, 1), (1, 2)}


def test_the_overlap_is_the_share_of_the_smaller_expert() -> None:
    members = torch.tensor([[1, 1, 1, 1, 0], [0, 0, 0, 1, 1], [0, 0, 0, 0, 0]]).bool()
    expected = torch.tensor([[1.0, 0.5, 1.0], [0.5, 1.0, 1.0], [1.0, 1.0, 1.0]])
    assert torch.equal(overlap(members), expected)


def test_an_expert_keeps_its_log_odds_in_another_encoder(generator: torch.Generator) -> None:
    """Without routing, where they do not depend on the other experts; with its balance."""
    starts = {
        number: CapsuleExperts(6, 4, 3, 5, iterations=1, winners=1, generator=generator)
        for number in (1, 2)
    }
    for each in starts.values():
        each.balance.copy_(torch.randn(3, generator=generator))
    before = copy.deepcopy(starts)
    made = recombined(starts, [(2, 1), (1, 0), (2, 2)])
    x = squash(torch.randn(7, 6, 4, generator=generator))

    def log_odds(experts: CapsuleExperts) -> torch.Tensor:
        return F.log_odds(experts.route(x).preactivation) + experts.balance

    one, two = log_odds(before[1]), log_odds(before[2])
    expected = torch.stack([two[:, 1], one[:, 0], two[:, 2]], dim=1)
    torch.testing.assert_close(log_odds(made), expected)
    for number, each in starts.items():  # which are unchanged
        assert torch.equal(each.weight, before[number].weight)
        assert torch.equal(each.balance, before[number].balance)
    usual = copy.deepcopy(made)
    usual.balance_rate = 1.0
    for each in (made, usual):
        each.train().contrastive_divergence(x)
    assert usual.balance.any()
    torch.testing.assert_close(made.balance, BALANCE_RATE * usual.balance)  # it moves slowly


# --------------------------------------------------------------------------------------------------
# Runs


def config_of(data: Path, **changes: Any) -> Config:
    options = {"restarts": 4, "recombinations": 3, "criterion": "agreement", **changes}
    return config_with(data, **options)


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four encoders, of which three new ones are made after half of the steps."""
    folder = tmp_path_factory.mktemp("recombined") / "run"
    train(config_of(data), folder)
    return folder


def test_the_record_says_which_experts_each_encoder_is_made_of(whole: Path) -> None:
    for (_, selection), size in zip(selections(whole).items(), (4, 3), strict=True):
        first, *others = selection["recombinations"]
        assert selection["starts"] == [5, 6, 7] == [each["number"] for each in (first, *others)]
        assert first["starts"] == [1, 2, 3, 4]
        assert [len(each["starts"]) for each in others] == [2, 2]  # either half of them
        assert sorted(others[0]["starts"] + others[1]["starts"]) == [1, 2, 3, 4]
        for each in (first, *others):
            assert len({tuple(origin) for origin in each["experts"]}) == size
            assert {start for start, _ in each["experts"]} <= set(each["starts"])
            assert all(0 <= expert < size for _, expert in each["experts"])
            assert len(each["stability"]) == size
            assert all(0 <= stable <= 1 for stable in each["stability"])
        scores = selection["scores"]["agreement"]
        assert selection["kept"] == 5 + scores.index(max(scores))
        assert selection["halvings"] == []
    record = json.loads((whole / "run.json").read_text())
    assert without_machine(record)["selection"] == selections(whole)


def test_until_then_every_start_learns_as_without_recombinations(
    data: Path, tmp_path: Path
) -> None:
    stop_at("encoder 1", HALF + 1, config_of(data), tmp_path / "new")
    stop_at("encoder 1", HALF + 1, config_of(data, recombinations=0), tmp_path / "old")
    new, old = (read_checkpoint(tmp_path / name) for name in ("new", "old"))
    assert new.step == HALF
    for ours, theirs in ((new.model, old.model), (new.stage_state, old.stage_state)):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_the_new_encoders_learn_with_a_new_optimizer_and_a_slow_balance(
    data: Path, tmp_path: Path
) -> None:
    config = config_of(data)
    stop_at("encoder 1", HALF + 4, config, tmp_path / "run")
    found = read_checkpoint(tmp_path / "run")
    steps = {name: value for name, value in found.optimizer.items() if name.endswith(".step")}
    assert set(steps) == {f"optimizer.{number}.step" for number in range(3)}
    assert {int(value) for value in steps.values()} == {3}
    numbers = range(5, 8)
    balances = [found.stage_state[f"start {number}.balance"] for number in numbers]
    for balance in balances:  # zero before these three steps, each of which moves it by the rate
        assert 0 < balance.abs().max().item() < 3 * BALANCE_RATE
    sums = {found.stage_state[f"start {number}.weight"].sum().item() for number in numbers}
    assert len(sums) == 3


@pytest.mark.parametrize(
    "at",
    [
        ("encoder 1", HALF),
        ("encoder 1", HALF + 1),
        ("encoder 1", HALF + 2),
        ("encoder 2", HALF + 4),
        ("encoder 2", STEPS),
    ],
)
def test_a_resumed_run_is_bit_identical(
    at: tuple[str, int], data: Path, whole: Path, tmp_path: Path
) -> None:
    """From the last step before the experts are recombined, right before it, and after it."""
    stop_at(*at, config_of(data), tmp_path / "run")
    state = read_checkpoint(tmp_path / "run").stage_state
    assert ("recombinations" in state) == (at[1] > HALF + 1)
    resume(tmp_path / "run")
    assert_same_weights(tmp_path / "run", whole)
    assert metrics(tmp_path / "run") == metrics(whole)
    assert selections(tmp_path / "run") == selections(whole)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("recombinations", torch.zeros(3, 4, 2), "recombinations is not that of encoder 1"),
        ("recombinations", torch.full((3, 4, 3), 5.0), "experts that encoder 1 does not have"),
        ("recombinations", None, "start 2.weight is not that of encoder 1"),
        ("start 6.weight", None, "start 6.weight is not that of encoder 1"),
    ],
)
def test_a_damaged_recombination_is_an_error(
    name: str, change: torch.Tensor | None, message: str, data: Path, tmp_path: Path
) -> None:
    stop_at("encoder 1", HALF + 3, config_of(data), tmp_path / "run")
    tensors, about = read_tensors(tmp_path / "run" / CHECKPOINT)
    tensors.pop(f"stage.{name}")
    changed = {} if change is None else {f"stage.{name}": change}
    write_tensors(tmp_path / "run" / CHECKPOINT, {**tensors, **changed}, about)
    with pytest.raises(ModelError, match=message):
        resume(tmp_path / "run")


def test_two_processes_recombine_what_one_recombines(
    commands: Commands, data: Path, tmp_path: Path
) -> None:
    arguments = """--autoencoder.epochs 1 --encoder.epochs 2 --decoder.epochs 0
        --pixel-decoder.epochs 0 --encoder.winners 1 --encoder.target-firing 0.5
        --encoder.restarts 4 --encoder.recombinations 3 --encoder.criterion agreement
        --encoder.views.count 3 --encoder.views.rotation 30 --encoder.views.mirror"""
    finish(torchrun(commands, data, tmp_path / "two", *EXACT, *arguments.split()))
    train(config_of(data), tmp_path / "one")
    two, one = weights(tmp_path / "two"), weights(tmp_path / "one")
    ours, theirs = selections(tmp_path / "two"), selections(tmp_path / "one")
    for layer in range(2):
        name, stage = f"encoders.{layer}.weight", f"encoder {layer + 1}"
        assert ours[stage]["kept"] == theirs[stage]["kept"]
        for mine, other in zip(
            ours[stage]["recombinations"], theirs[stage]["recombinations"], strict=True
        ):
            assert mine["starts"] == other["starts"]
            assert mine["experts"] == other["experts"]
        assert (two[name] - one[name]).norm() <= 1e-3 * one[name].norm(), name


def test_fine_tuning_recombines_nothing(data: Path, whole: Path) -> None:
    network, images = CapsuleNetwork.load(whole), load(str(data))
    other, config = CapsuleNetwork.load(whole), config_of(data)
    once = replace(config, encoder=replace(config.encoder, restarts=1, recombinations=0))
    fine_tune(network, config, images, learning_rate_ratio=0.1, seed=1)
    fine_tune(other, once, images, learning_rate_ratio=0.1, seed=1)
    for ours, theirs in zip(network.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_in_a_single_step_nothing_is_recombined(data: Path, tmp_path: Path) -> None:
    config = replace(config_of(data, epochs=1), batch_size=96)
    train(config, tmp_path / "run")
    selection = selections(tmp_path / "run")["encoder 1"]
    assert selection["recombinations"] == []
    assert selection["starts"] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(
            ({"recombinations": each}, r"encoder\.recombinations must be .* from 0 to 1000")
            for each in (-1, 1001)
        ),
        ({"restarts": 1}, r"encoder\.recombinations needs encoder\.restarts of at least 2, .* 1"),
        (
            {"views": ViewOptions(), "criterion": "margin"},
            r"encoder\.recombinations needs encoder\.views\.count of at least 2, but is 1",
        ),
        ({"halvings": 1}, r"encoder\.recombinations .* encoder\.halvings must be 0, but is 1"),
        ({"winners": None}, r"encoder\.recombinations needs experts that compete .*winners"),
    ],
)
def test_invalid_options_are_an_error(
    options: dict[str, Any], message: str, data: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        train(config_of(data, **options), tmp_path / "run")


def test_experts_may_also_compete_after_training(data: Path) -> None:
    config = config_of(data, winners=None)
    replace(config, model=replace(config.model, winners=1)).validate()
    with pytest.raises(ValueError, match=r"encoder\.recombinations needs .* model\.agreement"):
        replace(config, model=replace(config.model, winners=1, agreement="inner")).validate()
