"""Products of expert capsules as a scikit-learn transformer.

This module needs scikit-learn: ``pip install 'poecaps[sklearn]'``. `import poecaps` does not.
"""

from __future__ import annotations

import copy
import math
import tempfile
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import torch

from poecaps import _checks as checks
from poecaps import functional as F
from poecaps._modules import in_batches
from poecaps._table import TabularModel
from poecaps.autoencoder import feature_grid
from poecaps.data import ImageSet
from poecaps.network import CapsuleNetwork
from poecaps.options import DensityOptions
from poecaps.training import PRESETS, Config, Progress, Stage, train
from poecaps.training.finetune import fine_tune

try:
    from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
    from sklearn.utils import check_array, check_random_state
    from sklearn.utils.validation import check_is_fitted, validate_data
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "sklearn":
        raise
    missing = "poecaps.sklearn needs scikit-learn; pip install 'poecaps[sklearn]'"
    raise ModuleNotFoundError(missing, name="sklearn") from error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from poecaps.layer import CapsuleExperts

Array = np.ndarray[Any, Any]
# Rows in the reservoir: a uniform sample of all rows that `partial_fit` has received, to which the
# decoder of a table and the density of codes are fitted.
RESERVOIR_SIZE = 2000
# Learning rates of `partial_fit` on images after its first call, relative to those of `fit`.
FINE_TUNING_RATIO = 0.1
TRAINED = ("model_", "experts_", "_optimizer")  # attributes that training alters
NEVER = 2**31  # seconds between checkpoints: the folder of a run is deleted, so none is resumed


class CapsuleExpertsTransformer(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """Codes of expert capsules, learned without labels by contrastive divergence.

    X may hold images or the rows of a table. Arrays (n, h, w) and (n, h, w, c) are images, and so
    are (n, h·w) and (n, h·w·c) if `image_shape` is given: uint8, or floats from 0 to 1, grey or
    RGB. They train a whole `poecaps.CapsuleNetwork`. Every other array (n, columns) is a table:
    columns are centred, scaled and in part decorrelated, `capsule_dim` neighbouring columns are
    grouped into a capsule, one layer of experts is trained, and a linear decoder is fitted by least
    squares.

    Parameters
    ----------
    n_experts, expert_dim : int
        J and D: a code has J·D numbers.
    capsule_dim : int
        Number of columns of a table, or of features of an image, in one input capsule.
    image_shape : tuple of int, optional
        (h, w) or (h, w, c) of images that are given as rows. None: rows are those of a table.
    n_iter : int
        Epochs of the experts.
    learning_rate : float
        Initial learning rate of the experts, with cosine decay. In `partial_fit` it is constant.
    batch_size : int
        Rows in a training step.
    winners : int, optional
        Number of experts that may learn from a row; with few winners experts specialise. None: all.
        By default 1 for images, and all for a table.
    scale_codes : bool
        Whether the codes of a table are returned before squashing, times one factor with which
        their total variance is the number of columns, so that a classifier with a penalty treats
        codes as it treats standardized columns. False: squashed codes, whose norms are firing
        probabilities, as they always are for images.
    sharpness, normalize
        Options of the routing; see `poecaps.routing_by_agreement`.
    n_filters, kernel_size : int
        Of the convolutions, for images. A kernel_size of None is 9, or a third of the shorter side
        if that is less.
    autoencoder_iter, decoder_iter, pixel_decoder_iter : int
        Epochs of the other stages, for images: the convolutions, the capsule decoder and the pixel
        decoder.
    density_experts : tuple of int, optional
        Number and dimension of the experts of a density over the features of images, which gives
        `score_samples` a unit; (600, 8) in the preset ``energy``, whose other options it has, with
        at most one principal component of the base measure for every two images. None: no density.
    density_iter : int
        Epochs of the density; at least 1 if there is one.
    device : str
        Device for images: "cpu", "cuda", or "auto" for a GPU if there is one. Tables are always
        processed on the CPU.
    verbose : bool
        Whether to print a line for each epoch.
    random_state : int, RandomState instance or None
        Source of all random numbers. On a CPU the same integer gives the same result.

    Attributes
    ----------
    model_ : CapsuleNetwork or TabularModel
        The trained model, a `torch.nn.Module`.
    experts_ : CapsuleExperts
        Its layer of experts.
    image_shape_ : tuple of int, or None
        (h, w, c) of images; None for a table.
    n_features_in_ : int
        Columns, or h·w·c.
    feature_names_in_ : array of str
        Names of the columns, if X has names.
    n_iter_ : int
        Epochs of the experts so far. A call of `partial_fit` counts as one, except the first call
        for images, which is that of `fit`.
    n_samples_seen_ : int
        Rows so far; several epochs over the same rows count once.

    Notes
    -----
    `partial_fit` on a table updates the mean and the variance of each column. On images, its first
    call does the same as `fit`, and later calls leave the convolutions and the density of
    `density_experts` unchanged, so the first images should be many and typical. After each call the
    decoder of a table and the density of codes are fitted to a uniform sample of 2,000 of all rows
    so far. A call that fails or is interrupted changes nothing, whereas a failed `fit` leaves the
    estimator unfitted.

    `inverse_transform` and `sample` return images in the layout of `fit`, from 0 to 1.

    Examples
    --------
    >>> from sklearn.datasets import load_iris
    >>> from poecaps.sklearn import CapsuleExpertsTransformer
    >>> X, _ = load_iris(return_X_y=True)
    >>> CapsuleExpertsTransformer(n_experts=4, expert_dim=3, random_state=0).fit_transform(X).shape
    (150, 12)
    """

    model_: Any
    experts_: CapsuleExperts

    def __init__(
        self,
        n_experts: int = 20,
        expert_dim: int = 16,
        *,
        capsule_dim: int = 8,
        image_shape: tuple[int, ...] | None = None,
        n_iter: int = 10,
        learning_rate: float = 0.1,
        batch_size: int = 128,
        winners: int | Literal["auto"] | None = "auto",
        scale_codes: bool = True,
        sharpness: float = 1.0,
        normalize: F.Axis = "outputs",
        n_filters: int = 128,
        kernel_size: int | None = None,
        autoencoder_iter: int = 5,
        decoder_iter: int = 3,
        pixel_decoder_iter: int = 10,
        density_experts: tuple[int, int] | None = None,
        density_iter: int = 20,
        device: str = "cpu",
        verbose: bool = False,
        random_state: Any = None,
    ) -> None:
        self.n_experts = n_experts
        self.expert_dim = expert_dim
        self.capsule_dim = capsule_dim
        self.image_shape = image_shape
        self.n_iter = n_iter
        self.learning_rate = learning_rate
        self.batch_size = batch_size
        self.winners = winners
        self.scale_codes = scale_codes
        self.sharpness = sharpness
        self.normalize = normalize
        self.n_filters = n_filters
        self.kernel_size = kernel_size
        self.autoencoder_iter = autoencoder_iter
        self.decoder_iter = decoder_iter
        self.pixel_decoder_iter = pixel_decoder_iter
        self.density_experts = density_experts
        self.density_iter = density_iter
        self.device = device
        self.verbose = verbose
        self.random_state = random_state

    def fit(self, X: Any, y: Any = None) -> CapsuleExpertsTransformer:  # noqa: ARG002
        """Train on all rows of X, starting from initial weights.

        Parameters
        ----------
        X : (n, columns), or images (n, h·w), (n, h, w) or (n, h, w, c)
        y
            Not used.
        """
        rows = self._begin(X, min_samples=2)
        if self.image_shape_ is not None:
            self._train(rows)
        else:
            table = self.model_ = self._new_table(rows)
            data = _as_tensor(rows)
            table.partial_fit_statistics(data)
            experts = table.competing_experts
            optimizer = torch.optim.Adam(experts.parameters(), lr=self.learning_rate)
            stage, generator = Stage(learning_rate=self.learning_rate), self._generator()
            for epoch in range(self.n_iter):
                optimizer.param_groups[0]["lr"] = stage.learning_rate_at(epoch / self.n_iter)
                table.train_one_epoch(data, optimizer, self.batch_size, generator)
                self._print(f"epoch {epoch + 1}/{self.n_iter}")
            table.finalize(data, self._generator())
        return self._finish(rows, self.n_iter)

    def partial_fit(self, X: Any, y: Any = None) -> CapsuleExpertsTransformer:  # noqa: ARG002
        """Train on more rows, for one epoch; see the notes of the class.

        Parameters
        ----------
        X : as in `fit`
        y
            Not used.
        """
        first = not self.__sklearn_is_fitted__()
        with self._unchanged_by_failure():
            if first:
                rows = self._begin(X)
            else:
                self._validate_parameters()
                rows = self._validate_rows(X)
            if self.image_shape_ is None:
                self._partial_fit_table(rows, first=first)
            elif first:
                self._train(rows)
            else:
                images, seed = self._images(rows), self._seed()
                fine_tune(
                    self.model_,
                    self._config(len(rows)),
                    images,
                    learning_rate_ratio=FINE_TUNING_RATIO,
                    seed=seed,
                )
            self._finish(rows, self.n_iter if first and self.image_shape_ is not None else 1)
            sample = self._reservoir[0]
            if self.image_shape_ is None:
                self.model_.finalize(_as_tensor(sample), self._generator())
            elif not first:
                codes = self._encode(sample).to(self._device())
                self.model_.code_density.fit(codes, self._generator())
        return self

    def transform(self, X: Any) -> Array:
        """Encode rows.

        Parameters
        ----------
        X : as in `fit`

        Returns
        -------
        (n, n_experts·expert_dim)
            Of images, or with ``scale_codes=False``, squashed experts: the norm of each is below 1
            and is its firing probability. Else experts before squashing, scaled.
        """
        check_is_fitted(self)
        rows = self._validate_rows(X)
        codes = self._encode(rows)
        if self._has_scaled_codes():
            return _as_array(self.model_.scale(codes), _float_of(rows))
        return _as_array(codes.flatten(1), _float_of(rows))

    def inverse_transform(self, X: Any) -> Array:
        """Decode codes.

        Parameters
        ----------
        X : (n, n_experts·expert_dim)
            Codes of `transform`.

        Returns
        -------
        (n, columns), or images in the layout of `fit`
        """
        check_is_fitted(self)
        codes = check_array(X, dtype=(np.float64, np.float32))
        if codes.shape[1] != self._n_features_out:
            raise ValueError(
                f"X must have {self._n_features_out} columns, the size of a code, "
                f"but has {codes.shape[1]}"
            )
        if self._has_scaled_codes():
            scaled = _as_tensor(codes)
            return self._in_layout_of_fit(self.model_.decode_scaled(scaled), _float_of(codes))
        experts = _as_tensor(codes).view(len(codes), -1, self.experts_.out_dim)
        return self._in_layout_of_fit(self._apply(self.model_.decode, experts), _float_of(codes))

    def score_samples(self, X: Any) -> Array:
        """Compute the log-probability of each row, up to a constant of the model.

        For images without `density_experts` this is −F(x) of the experts. For a table it is
        −F(x) − ‖v‖²/2, where v is the row as the experts read it before it is squashed:
        standardized, and its correlations removed in part. Scores of two rows under one model can
        be compared, those of two models cannot.

        With `density_experts` it is the log-density of an image relative to independent capsules,
        in nats: `poecaps.CapsuleNetwork.log_prob`. Scores of all models over the same features can
        be compared.

        Both are about the input capsules, not about pixels or columns.

        Parameters
        ----------
        X : as in `fit`

        Returns
        -------
        (n,)

        Raises
        ------
        ValueError
            If the model has a density whose log Z was not estimated.
        """
        check_is_fitted(self)
        rows, model = self._validate_rows(X), self.model_
        if isinstance(model, CapsuleNetwork) and model.density is not None:
            scores = self._apply(model.log_prob, self._batch(rows))
        elif isinstance(model, TabularModel):
            scores = self._apply(model.log_density, self._batch(rows))
        else:
            scores = -self._apply(model.free_energy, self._batch(rows))
        return _as_array(scores, _float_of(rows))

    def sample(self, n_samples: int = 1, random_state: Any = None) -> Array:
        """Draw new rows or images from the density of codes.

        Parameters
        ----------
        n_samples
            Number of draws.
        random_state
            Source of the draws; by default the `random_state` of the estimator, so that an integer
            there gives the same draws in every call.

        Returns
        -------
        (n_samples, columns), or images in the layout of `fit`
        """
        check_is_fitted(self)
        checks.require_int("n_samples", n_samples, 1)
        numbers = check_random_state(self.random_state if random_state is None else random_state)
        generator = torch.Generator(self._device()).manual_seed(int(numbers.randint(2**31)))
        if isinstance(self.model_, TabularModel):
            return self._in_layout_of_fit(self.model_.sample(n_samples, generator), self._dtype)
        codes = self.model_.sample(n_samples, generator=generator)
        return self._in_layout_of_fit(self._apply(self.model_.decode, codes), self._dtype)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.transformer_tags.preserves_dtype = ["float64", "float32"]
        tags.input_tags.three_d_array = True
        return tags

    def __sklearn_is_fitted__(self) -> bool:
        """Return whether a training has ended; a failed one leaves no model."""
        return hasattr(self, "experts_")

    @contextmanager
    def _unchanged_by_failure(self) -> Iterator[None]:
        """Restore all attributes if an error or an interrupt ends the block."""
        trained = {each: value for each, value in vars(self).items() if each in TRAINED}
        before = vars(self) | copy.deepcopy(trained)  # all others are replaced, not altered
        random = self._random.get_state() if trained else None
        try:
            yield
        except BaseException:
            self.__dict__.clear()
            self.__dict__.update(before)
            if trained:
                self._random.set_state(random)
            raise

    # Validation of X and of the parameters

    def _begin(self, X: Any, min_samples: int = 1) -> Array:
        """Validate all parameters and X, and reset the fitted attributes."""
        self._validate_parameters()
        for name in TRAINED:
            if hasattr(self, name):
                delattr(self, name)
        given = np.asarray(X).shape[1:] if _ndim(X) in (3, 4) else None
        shape = given if self.image_shape is None else tuple(self.image_shape)
        self.image_shape_ = None if shape is None else (*shape, 1)[:3]
        if shape is None and self.density_experts is not None:
            raise ValueError(
                f"density_experts must be None for the rows of a table, but is "
                f"{self.density_experts!r}; for images, give image_shape"
            )
        self._layout = given
        rows = self._validate_rows(X, reset=True, min_samples=min_samples)
        self._random = check_random_state(self.random_state)
        self._reservoir = rows[:0], np.empty(0)
        self._dtype = _float_of(rows)
        self._n_features_out = self.n_experts * self.expert_dim
        self.n_iter_ = self.n_samples_seen_ = 0
        return rows

    def _validate_parameters(self) -> None:
        for name in ("n_experts", "expert_dim", "capsule_dim", "batch_size", "n_filters"):
            checks.require_int(name, getattr(self, name), 1)
        for name in ("n_iter", "autoencoder_iter", "decoder_iter", "pixel_decoder_iter"):
            checks.require_int(name, getattr(self, name), 0)
        for name in ("learning_rate", "sharpness"):
            checks.require_nonnegative(name, getattr(self, name))
        checks.require_choice("normalize", self.normalize, get_args(F.Axis))
        DensityOptions(self.density_experts, linear_dims=0).validate("density_")
        checks.require_int("density_iter", self.density_iter, int(self.density_experts is not None))
        if not isinstance(self.scale_codes, bool):
            raise ValueError(f"scale_codes must be True or False, but is {self.scale_codes!r}")
        if self.winners not in (None, "auto"):
            checks.require_int("winners", self.winners, 1, self.n_experts)
        if self.kernel_size is not None:
            checks.require_int("kernel_size", self.kernel_size, 1)
        if self.image_shape is not None:
            if len(self.image_shape) not in (2, 3):
                raise ValueError(
                    f"image_shape must be (h, w) or (h, w, c), but is {self.image_shape!r}"
                )
            for side in self.image_shape:
                checks.require_int("every number of image_shape", side, 1)

    def _validate_rows(self, X: Any, *, reset: bool = False, min_samples: int = 1) -> Array:
        """Return X as rows (n, n_features_in_): floats, or possibly uint8 for images."""
        shape = self.image_shape_
        if _ndim(X) in (3, 4):
            X = np.asarray(X)
            if shape is None or (*X.shape[1:], 1)[:3] != shape:
                images = "" if shape is None else f"images of {' × '.join(map(str, shape))}"
                expected = images or "rows of a table"
                raise ValueError(f"X must hold {expected}, but has shape {X.shape}")
            X = X.reshape(len(X), math.prod(X.shape[1:]))
        dtypes = (np.float64, np.float32) if shape is None else (np.float64, np.float32, np.uint8)
        rows: Array = validate_data(
            self, X, dtype=dtypes, reset=reset, ensure_min_samples=min_samples
        )
        if shape is not None and rows.shape[1] != math.prod(shape):
            raise ValueError(
                f"image_shape is {shape}, {math.prod(shape)} pixel values, "
                f"but X has {rows.shape[1]} columns"
            )
        return rows

    def _images(self, rows: Array) -> ImageSet:
        assert self.image_shape_ is not None  # noqa: S101 (called for images only)
        return ImageSet(rows.reshape(len(rows), *self.image_shape_), source="X")

    def _in_layout_of_fit(self, result: Tensor, dtype: type) -> Array:
        """Return rows, or images (n, c, h, w), in the layout of the X of `fit`."""
        if self.image_shape_ is not None:
            result = result.permute(0, 2, 3, 1)
        shape = self._layout or (self.n_features_in_,)
        return _as_array(result, dtype).reshape(len(result), *shape)

    # Training

    def _new_table(self, rows: Array) -> TabularModel:
        return TabularModel(
            rows.shape[1],
            self.capsule_dim,
            self.n_experts,
            self.expert_dim,
            sharpness=self.sharpness,
            normalize=self.normalize,
            winners=None if self.winners == "auto" else self.winners,
            dtype=torch.float32 if self._dtype is np.float32 else torch.float64,
            generator=self._generator(),
        )

    def _partial_fit_table(self, rows: Array, *, first: bool) -> None:
        """Train the experts of a table on more rows."""
        if first:
            self.model_ = self._new_table(rows)
        if first or not hasattr(self, "_optimizer"):
            experts = self.model_.competing_experts
            self._optimizer = torch.optim.Adam(experts.parameters(), lr=self.learning_rate)
        data = _as_tensor(rows)
        self.model_.partial_fit_statistics(data)
        self.model_.train_one_epoch(data, self._optimizer, self.batch_size, self._generator())

    def _config(self, images: int) -> Config:
        """Return the options of a run on so many images: a preset with the given parameters."""
        assert self.image_shape_ is not None  # noqa: S101 (called for images only)
        preset = PRESETS["default" if self.density_experts is None else "energy"]()
        kernel = self.kernel_size or min(9, max(1, min(self.image_shape_[:2]) // 3))
        model = replace(
            preset.model,
            features=self.n_filters,
            kernel_size=kernel,
            capsule_dim=self.capsule_dim,
            experts=((self.n_experts, self.expert_dim),),
            sharpness=self.sharpness,
            normalize=self.normalize,
        )
        if self.density_experts is not None:
            height, width = self.image_shape_[:2]
            numbers = math.prod(feature_grid(kernel, (height, width))) * self.n_filters
            components = min(preset.model.density.base_components, numbers, images // 2)
            density = replace(
                preset.model.density,
                experts=self.density_experts,
                linear_dims=self.density_experts[1],
                base_components=components,
            )
            model = replace(model, density=density)
            preset = replace(preset, density=replace(preset.density, epochs=self.density_iter))
        return replace(
            preset,
            model=model,
            autoencoder=replace(preset.autoencoder, epochs=self.autoencoder_iter),
            encoder=replace(
                preset.encoder,
                epochs=self.n_iter,
                learning_rate=self.learning_rate,
                winners=1 if self.winners == "auto" else self.winners,
            ),
            decoder=replace(preset.decoder, epochs=self.decoder_iter),
            pixel_decoder=replace(preset.pixel_decoder, epochs=self.pixel_decoder_iter),
            batch_size=self.batch_size,
            device=self.device,
            checkpoint_every=NEVER,
        )

    def _train(self, rows: Array) -> None:
        """Train a network on images; the files of the run are deleted afterwards."""
        images, config = self._images(rows), replace(self._config(len(rows)), seed=self._seed())
        with tempfile.TemporaryDirectory(prefix="poecaps-") as folder:
            self.model_ = train(config, Path(folder) / "run", data=images, report=self._report)

    def _finish(self, rows: Array, epochs: int) -> CapsuleExpertsTransformer:
        """Set the fitted attributes after training on rows."""
        is_table = isinstance(self.model_, TabularModel)
        self.experts_ = self.model_.experts if is_table else self.model_.encoders[0]
        self.model_.eval()
        self._update_reservoir(rows)
        self.n_samples_seen_ += len(rows)
        self.n_iter_ += epochs
        return self

    def _update_reservoir(self, rows: Array) -> None:
        """Add rows to the reservoir: every row has a random key, and the smallest keys stay."""
        candidates = np.concatenate([self._reservoir[0], rows])
        keys = np.concatenate([self._reservoir[1], self._random.uniform(size=len(rows))])
        chosen = np.sort(np.argsort(keys)[:RESERVOIR_SIZE])
        self._reservoir = candidates[chosen], keys[chosen]

    def _seed(self) -> int:
        return int(self._random.randint(2**31))

    def _generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self._seed())

    def _report(self, progress: Progress) -> None:
        if progress.step and progress.epoch == int(progress.epoch):
            self._print(f"{progress.stage}: {progress.summary()}")

    def _print(self, line: str) -> None:
        if self.verbose:
            print(f"[CapsuleExpertsTransformer] {line}", flush=True)  # noqa: T201

    # Using the model

    def _has_scaled_codes(self) -> bool:
        return self.scale_codes and isinstance(self.model_, TabularModel)

    def _device(self) -> torch.device:
        return self.experts_.weight.device

    def _batch(self, rows: Array) -> Tensor:
        """Return rows as the model takes them: (n, columns), or images (n, c, h, w)."""
        return (
            _as_tensor(rows) if self.image_shape_ is None else self._images(rows).batch(slice(None))
        )

    def _encode(self, rows: Array) -> Tensor:
        return self._apply(self.model_.encode, self._batch(rows))

    @torch.no_grad()
    def _apply(self, function: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:
        """Apply a method of the model in batches on its device; return the result on the CPU."""
        if self.image_shape_ is not None:
            inputs = inputs.float()
        device = self._device()
        return in_batches(lambda batch: function(batch.to(device)).cpu(), inputs)


def _ndim(X: Any) -> int:
    """Return the number of axes of anything that scikit-learn accepts as an array."""
    return int(X.ndim) if hasattr(X, "ndim") else np.asarray(X).ndim


def _as_tensor(rows: Array) -> Tensor:
    """Copy an array, which may be read-only, into a tensor."""
    return torch.from_numpy(np.array(rows))


def _as_array(result: Tensor, dtype: type) -> Array:
    return result.numpy(force=True).astype(dtype, copy=False)


def _float_of(rows: Array) -> type:
    """Return the dtype of results for rows: that of the rows, and float32 for images of bytes."""
    return np.float64 if rows.dtype == np.float64 else np.float32
