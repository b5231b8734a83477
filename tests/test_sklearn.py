"""The scikit-learn transformer: scikit-learn's own checks, tables, images and errors."""

from __future__ import annotations

import importlib
import os
import pickle
import pydoc
import re
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import load_digits, load_iris, load_wine
from sklearn.decomposition import PCA
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from poecaps import CapsuleNetwork, TrainingError, squash, unsquash
from poecaps._table import MAX_WHITENED, SHRINKAGE
from poecaps.data import DataError
from poecaps.sklearn import RESERVOIR_SIZE, CapsuleExpertsTransformer
from poecaps.training import PRESETS

if TYPE_CHECKING:
    from collections.abc import Iterator

Array = np.ndarray[Any, Any]


def table(**changes: Any) -> CapsuleExpertsTransformer:
    return CapsuleExpertsTransformer(
        **{"n_experts": 6, "expert_dim": 4, "random_state": 0} | changes
    )


def small(**changes: Any) -> CapsuleExpertsTransformer:
    """For images: few filters and epochs."""
    stages = {"autoencoder_iter": 3, "n_iter": 3, "decoder_iter": 3, "pixel_decoder_iter": 3}
    sizes = {"n_experts": 6, "expert_dim": 4, "n_filters": 16, "batch_size": 32, "random_state": 0}
    return CapsuleExpertsTransformer(**stages | sizes | changes)


@pytest.fixture(scope="module")
def wine() -> Array:
    return np.asarray(load_wine(return_X_y=True)[0])  # 178 rows, 13 columns of very different sizes


@pytest.fixture(scope="module")
def digits() -> Array:
    return np.asarray(load_digits(return_X_y=True)[0][:200] / 16)  # 8×8 pixels


def lost(X: Array, back: Array) -> float:
    """Return the unexplained share of the variance, averaged over the columns."""
    return float((np.square(back - X).mean(0) / X.var(0).clip(1e-12)).mean())


class TestScikitLearn:
    def test_every_check_passes(self) -> None:
        """In a separate process: SciPy decides at import whether a check of array types is run."""
        program = """if True:
            from sklearn.utils.estimator_checks import check_estimator
            from poecaps.sklearn import CapsuleExpertsTransformer as Transformer
            other = Transformer(
                3, 2, capsule_dim=3, n_iter=2, winners=None, normalize="inputs"
            )
            for each in (Transformer(n_iter=2), other):
                results = check_estimator(each, on_skip=None)
                assert len(results) > 40
                assert all(result["status"] == "passed" for result in results), results
        """
        environment = {**os.environ, "SCIPY_ARRAY_API": "1", "OMP_NUM_THREADS": "1"}
        subprocess.run([sys.executable, "-c", program], check=True, env=environment)

    def test_a_grid_search_over_a_pipeline_finds_the_better_parameter(self, digits: Array) -> None:
        y = load_digits(return_X_y=True)[1][: len(digits)]
        pipeline = make_pipeline(table(expert_dim=8), LogisticRegression(C=10, max_iter=500))
        search = GridSearchCV(pipeline, {"capsuleexpertstransformer__n_experts": [1, 8]}, cv=3).fit(
            digits, y
        )
        assert search.best_params_ == {"capsuleexpertstransformer__n_experts": 8}
        assert search.best_score_ > 0.8

    def test_a_clone_gives_the_same_codes(self, wine: Array) -> None:
        first = table().fit(wine)
        second = clone(first)
        assert not hasattr(second, "model_")
        np.testing.assert_array_equal(second.fit(wine).transform(wine), first.transform(wine))
        assert not np.array_equal(
            clone(first).set_params(random_state=1).fit_transform(wine), first.transform(wine)
        )

    def test_a_pickled_transformer_continues_in_the_same_way(self, wine: Array) -> None:
        first = table().partial_fit(wine[:100])
        second = pickle.loads(pickle.dumps(first))
        for each in (first, second):
            each.partial_fit(wine[100:])
        np.testing.assert_array_equal(
            second.inverse_transform(second.transform(wine)),
            first.inverse_transform(first.transform(wine)),
        )
        np.testing.assert_array_equal(second.sample(5), first.sample(5))

    def test_feature_names_are_kept(self) -> None:
        pandas = pytest.importorskip("pandas")
        frame = load_iris(as_frame=True).data
        made = table().set_output(transform="pandas").fit(frame)
        codes = made.transform(frame)
        assert isinstance(codes, pandas.DataFrame)
        assert list(made.feature_names_in_) == list(frame.columns)
        assert list(codes.columns) == [f"capsuleexpertstransformer{number}" for number in range(24)]
        with pytest.raises(ValueError, match="feature names"):
            made.transform(frame[frame.columns[::-1]])


class TestTable:
    def test_codes_keep_the_information_of_the_rows(self, wine: Array) -> None:
        made = table(n_iter=30).fit(wine)
        codes = made.transform(wine)
        assert codes.shape == (178, 24)
        assert lost(wine, made.inverse_transform(codes)) < 0.3

    def test_codes_have_the_variance_of_standardized_columns(self, wine: Array) -> None:
        """And are those before squashing, which `inverse_transform` takes back."""
        scaled, squashed = table().fit(wine), table(scale_codes=False).fit(wine)
        codes = scaled.transform(wine)
        assert codes.var(0).sum() == pytest.approx(wine.shape[1])
        experts = torch.from_numpy(squashed.transform(wine)).view(178, 6, 4)
        z = unsquash(experts).flatten(1).numpy()
        np.testing.assert_allclose(codes, z * (codes[0, 0] / z[0, 0]), rtol=1e-6, atol=1e-9)
        np.testing.assert_allclose(
            scaled.inverse_transform(codes), squashed.inverse_transform(squashed.transform(wine))
        )

    def test_codes_of_a_table_are_as_good_as_its_principal_components(self) -> None:
        rows, y = load_digits(return_X_y=True)
        train, test = slice(None, 1200), slice(1200, None)
        scores = [
            make_pipeline(*steps, LogisticRegression(max_iter=1000))
            .fit(rows[train], y[train])
            .score(rows[test], y[test])
            for steps in (
                (StandardScaler(), PCA(0.95)),
                (CapsuleExpertsTransformer(n_iter=3, random_state=0),),
            )
        ]
        assert scores[1] > scores[0] - 0.01

    def test_correlations_are_removed_in_part(self, wine: Array) -> None:
        model = table().fit(wine).model_
        t = (wine - wine.mean(0)) / wine.std(0)
        white = np.linalg.eigvalsh(np.cov((t @ model.whitening.numpy()).T, bias=True))
        before = np.linalg.eigvalsh(np.cov(t.T, bias=True))
        expected = before / (before + SHRINKAGE)
        np.testing.assert_allclose(white, expected * len(before) / expected.sum())

    def test_wide_tables_are_only_standardized(self) -> None:
        wide = np.random.default_rng(0).normal(size=(12, MAX_WHITENED + 1))
        made = table(n_iter=1).fit(wide)
        assert made.model_.whitening is None
        assert made.model_.covariance.shape == (MAX_WHITENED + 1,)
        assert made.transform(wide).shape == (12, 24)

    def test_the_numbers_of_an_expert_are_a_probability_and_a_direction(self, wine: Array) -> None:
        made = table(scale_codes=False).fit(wine)
        firing = np.linalg.norm(made.transform(wine).reshape(178, 6, 4), axis=2)
        assert firing.max() < 1
        assert firing.max(1).mean() == pytest.approx(0.5, abs=1e-6)  # the strongest expert

    def test_units_do_not_matter(self, wine: Array) -> None:
        factors = np.logspace(-6, 6, 13)
        made, other = table().fit(wine), table().fit(wine * factors + 5 * factors)
        np.testing.assert_allclose(
            other.transform(wine * factors + 5 * factors), made.transform(wine), atol=1e-6
        )

    def test_a_constant_column_changes_nothing_and_comes_back(self, wine: Array) -> None:
        wide = np.column_stack([wine, np.full(178, 1e5)])  # this column was padding before
        made = table().fit(wide)
        np.testing.assert_allclose(
            made.transform(wide), table().fit(wine).transform(wine), atol=1e-9
        )
        np.testing.assert_allclose(made.inverse_transform(made.transform(wide))[:, -1], 1e5)

    def test_neighbouring_columns_are_a_capsule(self, wine: Array) -> None:
        made = table(capsule_dim=5, scale_codes=False).fit(wine)
        assert made.experts_.weight.shape == (3, 6, 4, 5)
        t = (wine - wine.mean(0)) / wine.std(0) @ made.model_.whitening.numpy()
        x = squash(torch.from_numpy(np.pad(t, ((0, 0), (0, 2))).reshape(178, 3, 5)) / 5**0.5)
        with torch.no_grad():
            np.testing.assert_allclose(
                made.transform(wine), made.experts_(x).flatten(1), atol=1e-12
            )
            np.testing.assert_allclose(
                made.score_samples(wine),
                -made.experts_.free_energy(x).numpy() - (t**2).sum(1) / 2,
                atol=1e-12,
            )

    def test_rows_unlike_the_training_rows_score_less(
        self, wine: Array, generator: torch.Generator
    ) -> None:
        made = table(n_iter=30).fit(wine[::2])
        random = np.random.default_rng(0)
        shuffled = np.stack([random.permutation(column) for column in wine.T], 1)
        assert np.median(made.score_samples(wine[1::2])) > np.median(made.score_samples(shuffled))

    def test_samples_are_like_the_rows(self, wine: Array) -> None:
        made = table(n_experts=10, n_iter=30).fit(wine)
        drawn = made.sample(2000)
        assert np.abs((drawn.mean(0) - wine.mean(0)) / wine.std(0)).max() < 0.3
        correlation = np.corrcoef(np.corrcoef(drawn.T).ravel(), np.corrcoef(wine.T).ravel())[0, 1]
        assert correlation > 0.9
        np.testing.assert_array_equal(drawn, made.sample(2000))
        assert not np.array_equal(drawn, made.sample(2000, random_state=5))

    @pytest.mark.parametrize("dtype", [np.float32, np.float64])
    def test_precision_is_kept(self, wine: Array, dtype: Any) -> None:
        rows = wine.astype(dtype)
        made = table().fit(rows)
        codes = made.transform(rows)
        for array in (
            codes,
            made.inverse_transform(codes),
            made.score_samples(rows),
            made.sample(2),
        ):
            assert array.dtype == dtype
        assert made.experts_.weight.dtype == (
            torch.float32 if dtype is np.float32 else torch.float64
        )

    def test_rows_in_portions_give_the_statistics_of_all(self, wine: Array) -> None:
        made = table()
        for part in np.array_split(wine, 7):
            made.partial_fit(part)
        np.testing.assert_allclose(made.model_.mean, wine.mean(0))
        np.testing.assert_allclose(made.model_.covariance, np.cov(wine.T, bias=True), atol=1e-9)
        assert (made.n_iter_, made.n_samples_seen_) == (7, 178)

    def test_rows_in_portions_train_the_experts(self, wine: Array) -> None:
        random, made = np.random.default_rng(0), table()
        for _ in range(30):
            made.partial_fit(wine[random.choice(178, 60)])
        assert lost(wine, made.inverse_transform(made.transform(wine))) < 0.3

    def test_the_reservoir_is_a_uniform_sample_of_a_stream(self) -> None:
        made = table(n_experts=2, expert_dim=2)
        for start in range(0, 6 * RESERVOIR_SIZE, RESERVOIR_SIZE):
            made.partial_fit(np.arange(start, start + RESERVOIR_SIZE, dtype=float)[:, None])
        kept = made._reservoir[0].ravel()
        assert len(kept) == len(set(kept)) == RESERVOIR_SIZE
        shares = np.histogram(kept, bins=6, range=(0, 6 * RESERVOIR_SIZE))[0] / RESERVOIR_SIZE
        np.testing.assert_allclose(shares, 1 / 6, atol=0.04)  # five standard deviations

    def test_divergence_raises_an_error(self, wine: Array) -> None:
        with pytest.raises(TrainingError, match="lower learning_rate"):
            table(learning_rate=1e30).fit(wine)


class TestImages:
    def test_all_layouts_are_the_same_images(self, digits: Array) -> None:
        square = digits.reshape(-1, 8, 8)
        flat, plain, deep = (
            small(image_shape=(8, 8)).fit(digits),
            small().fit(square),
            small().fit(square[..., None]),
        )
        codes = flat.transform(digits)
        assert codes.shape == (200, 24)
        for other, images in ((plain, square), (deep, square[..., None]), (plain, digits)):
            np.testing.assert_array_equal(other.transform(images), codes)
        for made, shape in ((flat, (64,)), (plain, (8, 8)), (deep, (8, 8, 1))):
            assert made.image_shape_ == (8, 8, 1)
            assert made.inverse_transform(codes[:3]).shape == (3, *shape)
            assert made.sample(2).shape == (2, *shape)

    def test_the_model_is_a_capsule_network(self, digits: Array) -> None:
        made = small(image_shape=(8, 8)).fit(digits)
        assert isinstance(made.model_, CapsuleNetwork)
        images = torch.from_numpy(digits).float().view(-1, 1, 8, 8)
        with torch.no_grad():
            codes = made.model_.encode(images).flatten(1).numpy()
            np.testing.assert_allclose(made.transform(digits), codes, atol=1e-6)
            np.testing.assert_allclose(
                made.score_samples(digits), -made.model_.free_energy(images), atol=1e-5
            )
            back = made.model_.reconstruct(images).flatten(1).numpy()
        np.testing.assert_allclose(made.inverse_transform(codes), back, atol=1e-5)

    def test_bytes_are_fractions_of_255(self, digits: Array) -> None:
        pixels = (digits * 16).astype(np.uint8) * 15  # up to 240
        made = small(image_shape=(8, 8)).fit(pixels)
        assert made.transform(pixels).dtype == np.float32
        np.testing.assert_allclose(made.transform(pixels), made.transform(pixels / 255), atol=1e-6)

    def test_colours_come_back_where_they_were(self) -> None:
        random = np.random.default_rng(0)
        images = np.zeros((64, 18, 18, 3), np.uint8)
        images[:, :9] = random.integers(150, 256, (64, 1, 1, 3)) * [
            1,
            0,
            0,
        ]  # red above, in many shades
        images[:, 9:] = random.integers(150, 256, (64, 1, 1, 3)) * [0, 0, 1]  # blue below
        made = small(autoencoder_iter=20, decoder_iter=10, pixel_decoder_iter=30).fit(images)
        back = made.inverse_transform(made.transform(images)).mean((0, 2))
        assert back[:8, 0].min() > 0.5 > back[:8, 1:].max()
        assert back[10:, 2].min() > 0.5 > back[10:, :2].max()

    def test_more_images_train_the_experts_but_not_the_filters(self, digits: Array) -> None:
        made = small(n_iter=1, decoder_iter=1, pixel_decoder_iter=1).partial_fit(
            digits.reshape(-1, 8, 8)[:100]
        )
        before = pickle.loads(pickle.dumps(made))
        for _ in range(5):
            made.partial_fit(digits)
        assert made.n_samples_seen_ == 1100
        for name, value in before.model_.autoencoder.state_dict().items():
            assert torch.equal(made.model_.autoencoder.state_dict()[name], value)
        assert torch.equal(made.model_.preprocessing.mean, before.model_.preprocessing.mean)
        errors = [
            np.square(
                each.inverse_transform(each.transform(digits)).reshape(-1, 64) - digits
            ).mean()
            for each in (before, made)
        ]
        assert errors[1] < errors[0]
        assert not torch.equal(made.model_.code_density.mean, before.model_.code_density.mean)

    def test_invalid_images_raise_an_error(self, digits: Array) -> None:
        made = small(image_shape=(8, 8)).fit(digits)
        with pytest.raises(DataError, match="floats from 0 to 1"):
            made.transform(digits * 16)
        with pytest.raises(ValueError, match="images of 8 × 8 × 1, but has shape"):
            made.transform(digits.reshape(-1, 4, 16))
        with pytest.raises(ValueError, match="image_shape is"):
            small(image_shape=(8, 9)).fit(digits)
        with pytest.raises(ValueError, match="rows of a table"):
            table().fit(digits).transform(digits.reshape(-1, 8, 8))


@pytest.fixture(scope="module")
def few_chains() -> Iterator[None]:
    """Let the preset estimate log Z by fewer and shorter chains."""
    preset = PRESETS["energy"]()
    stage = replace(preset.density, chains=64, partition_chains=16, partition_steps=50)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PRESETS, "energy", lambda: replace(preset, density=stage))
        yield


@pytest.fixture(scope="module")
def dense(digits: Array, few_chains: None) -> CapsuleExpertsTransformer:
    """Trained on the first 150 digits, with a density of their features."""
    made = small(image_shape=(8, 8), density_experts=(4, 3), density_iter=2, kernel_size=3)
    return made.fit(digits[:150])


@pytest.mark.usefixtures("few_chains")
class TestDensity:
    def test_scores_are_log_probabilities_in_nats(
        self, dense: CapsuleExpertsTransformer, digits: Array
    ) -> None:
        images = torch.from_numpy(digits).float().view(-1, 1, 8, 8)
        with torch.no_grad():
            expected, energy = dense.model_.log_prob(images), dense.model_.free_energy(images)
        scores = dense.score_samples(digits)
        assert scores.shape == (200,)
        np.testing.assert_allclose(scores, expected, rtol=1e-4)
        assert not np.allclose(scores, -energy, atol=1)

    def test_it_has_the_options_of_the_preset(self, dense: CapsuleExpertsTransformer) -> None:
        preset = PRESETS["energy"]().model.density
        assert preset.base_components > 64  # the numbers of an image's features
        expected = replace(preset, experts=(4, 3), linear_dims=3, base_components=64)
        assert dense.model_.architecture.density == expected

    def test_few_images_have_few_components(self, digits: Array) -> None:
        made = small(image_shape=(8, 8), density_experts=(2, 2), density_iter=1, kernel_size=3)
        made.fit(digits[:40])
        assert made.model_.architecture.density.base_components == 20
        assert np.isfinite(made.score_samples(digits)).all()

    def test_noise_scores_less_than_new_digits(
        self, dense: CapsuleExpertsTransformer, digits: Array
    ) -> None:
        noise = np.random.default_rng(0).uniform(size=(50, 64))
        scores = dense.score_samples(digits[150:])
        assert np.median(scores) > dense.score_samples(noise).max()

    def test_a_clone_and_a_copy_give_the_same_scores(
        self, dense: CapsuleExpertsTransformer, digits: Array
    ) -> None:
        copied, cloned = pickle.loads(pickle.dumps(dense)), clone(dense)
        assert cloned.get_params() == dense.get_params()
        assert not hasattr(cloned, "model_")
        scores = dense.score_samples(digits)
        np.testing.assert_array_equal(copied.score_samples(digits), scores)
        np.testing.assert_array_equal(cloned.fit(digits[:150]).score_samples(digits), scores)

    def test_an_unknown_log_z_raises_an_error(
        self, dense: CapsuleExpertsTransformer, digits: Array
    ) -> None:
        unknown = pickle.loads(pickle.dumps(dense))
        unknown.model_.density.partition.zero_()
        with pytest.raises(ValueError, match=r"^log Z is not known yet; estimate it with .*$"):
            unknown.score_samples(digits)

    def test_more_images_leave_the_density_unchanged(
        self, dense: CapsuleExpertsTransformer, digits: Array
    ) -> None:
        made = pickle.loads(pickle.dumps(dense)).partial_fit(digits)
        np.testing.assert_array_equal(made.score_samples(digits), dense.score_samples(digits))
        assert not np.array_equal(made.transform(digits), dense.transform(digits))

    def test_a_table_has_no_density(self, wine: Array) -> None:
        with pytest.raises(ValueError, match=r"density_experts must be None for .*\(60, 8\)"):
            table(density_experts=(60, 8)).fit(wine)


@pytest.mark.parametrize(
    ("parameter", "message"),
    [
        ({"n_experts": 0}, "n_experts must be"),
        ({"winners": 7}, "winners must be a whole number from 1 to 6"),
        ({"scale_codes": "yes"}, "scale_codes must be True or False, but is 'yes'"),
        ({"normalize": "input"}, "did you mean 'inputs'"),
        ({"learning_rate": -1}, "learning_rate must be"),
        ({"image_shape": (64,)}, "image_shape must be"),
        ({"kernel_size": 0}, "kernel_size must be"),
        ({"density_experts": 60}, "density_experts must be a number and a dimension, but is 60"),
        ({"density_experts": (0, 8)}, "every number of density_experts must be"),
        ({"density_experts": (6, 8), "density_iter": 0}, "density_iter must be .* at least 1"),
    ],
)
def test_an_invalid_parameter_is_named_by_fit(wine: Array, parameter: Any, message: str) -> None:
    made = table(**parameter)  # only stored
    for learn in (made.fit, made.partial_fit):
        with pytest.raises(ValueError, match=message):
            learn(wine)


def test_a_code_of_another_size_raises_an_error(wine: Array) -> None:
    with pytest.raises(ValueError, match="X must have 24 columns"):
        table().fit(wine).inverse_transform(np.zeros((2, 23)))


def test_verbose_prints_a_line_for_each_epoch(
    wine: Array, digits: Array, capsys: pytest.CaptureFixture[str]
) -> None:
    table(n_iter=2, verbose=True).fit(wine)
    assert capsys.readouterr().out.splitlines()[-1].endswith("epoch 2/2")
    small(image_shape=(8, 8), verbose=True).fit(digits)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 12  # four stages of three epochs
    assert "decoder 1: epoch 3.0/3" in lines[8]


def test_missing_scikit_learn_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "sklearn"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "poecaps.sklearn")
    monkeypatch.setitem(sys.modules, "sklearn", None)
    message = "poecaps.sklearn needs scikit-learn; pip install 'poecaps[sklearn]'"
    with pytest.raises(ModuleNotFoundError, match=f"^{re.escape(message)}$"):
        importlib.import_module("poecaps.sklearn")


@pytest.mark.parametrize("method", ["fit", "partial_fit"])
def test_a_failed_training_leaves_no_model(
    method: str, digits: Array, wine: Array, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the failed one nor that of an earlier call, for tables as well as images."""

    def fail(*_: Any, **__: Any) -> None:
        raise TrainingError("diverged")

    for estimator, rows, part in (
        (table(n_iter=1), wine, "poecaps._table.TabularModel.train_one_epoch"),
        (small(image_shape=(8, 8), kernel_size=2), digits, "poecaps.sklearn.train"),
    ):
        if method == "fit":
            estimator.fit(rows)
        with monkeypatch.context() as patched:
            patched.setattr(part, fail)
            with pytest.raises(TrainingError):
                getattr(estimator, method)(rows)
        for use in (estimator.transform, estimator.score_samples, estimator.inverse_transform):
            with pytest.raises(NotFittedError):
                use(rows)
        getattr(estimator, method)(rows)
        assert estimator.transform(rows).shape == (len(rows), 24)


def failing(function: Any) -> Any:
    """Return a function that does what another one does, and then fails."""

    def fail(*given: Any, **options: Any) -> None:
        function(*given, **options)
        raise KeyboardInterrupt

    return fail


@pytest.mark.parametrize(
    ("is_table", "part"),
    [
        (True, "poecaps._table.TabularModel.train_one_epoch"),
        (True, "poecaps._table.TabularModel.finalize"),
        (False, "poecaps.sklearn.fine_tune"),
        (False, "poecaps.code_density.CodeDensity.fit"),
    ],
)
def test_more_rows_in_vain_change_nothing(
    is_table: bool, part: str, digits: Array, wine: Array, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither what is answered, nor what is learned afterwards."""
    rows = wine if is_table else digits
    estimator = table() if is_table else small(image_shape=(8, 8), kernel_size=2)
    with monkeypatch.context() as patched:
        patched.setattr(part, failing(pydoc.locate(part)))
        if part != "poecaps.sklearn.fine_tune":  # the first call trains without it
            with pytest.raises(KeyboardInterrupt):
                estimator.partial_fit(rows)
            with pytest.raises(NotFittedError):
                estimator.transform(rows)
    estimator.partial_fit(rows[:100])
    other = pickle.loads(pickle.dumps(estimator))
    with monkeypatch.context() as patched:
        patched.setattr(part, failing(pydoc.locate(part)))
        with pytest.raises(KeyboardInterrupt):
            estimator.partial_fit(rows[100:])
    for _ in range(2):
        np.testing.assert_array_equal(estimator.transform(rows), other.transform(rows))
        np.testing.assert_array_equal(estimator.sample(3), other.sample(3))
        assert estimator.n_samples_seen_ == other.n_samples_seen_
        for each in (estimator, other):
            each.partial_fit(rows[100:])


def test_more_images_that_diverge_are_an_error(digits: Array) -> None:
    made = small(image_shape=(8, 8)).partial_fit(digits)
    codes = made.transform(digits)
    with pytest.raises(TrainingError, match=r"^encoder 1 diverged; lower learning_rate$"):
        made.set_params(learning_rate=1e30).partial_fit(digits)
    np.testing.assert_array_equal(made.transform(digits), codes)
