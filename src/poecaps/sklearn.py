"""Products of expert capsules as a scikit-learn transformer.

Needs scikit-learn: ``pip install 'poecaps[sklearn]'``. Importing `poecaps` alone does not.
"""

from __future__ import annotations

import math
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import torch

from poecaps import _checks as checks
from poecaps import functional as F
from poecaps._table import CapsuleTable
from poecaps.data import ImageSet
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
    from collections.abc import Callable

    from torch import Tensor

    from poecaps.layer import CapsuleExperts

Array = np.ndarray[Any, Any]
KEPT = 2000  # rows, drawn from all that `partial_fit` has seen, that the way back and the density are fitted to
LATER = 0.1  # learning rates of `partial_fit` on images after its first call, as a share of those of `fit`
CHUNK = 250  # images that go through the network together


class CapsuleExpertsTransformer(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """Codes of expert capsules, learned without labels by contrastive divergence.

    What X is, is told by its shape. An array (n, h, w) or (n, h, w, c) holds images, and so does (n, h·w) or (n, h·w·c)
    if `image_shape` says so: uint8, or floats from 0 to 1, grey or RGB. They train a whole `poecaps.CapsuleNetwork`.
    Every other array (n, columns) is a table: columns are centred and scaled, `capsule_dim` neighbours are grouped into
    a capsule, one layer of experts learns, and least squares finds the way back.

    Parameters
    ----------
    n_experts, expert_dim : int
        J and D: a code has J·D numbers.
    capsule_dim : int
        Columns of a table, or features of an image, in one input capsule.
    image_shape : tuple of int, optional
        (h, w) or (h, w, c) of images that come in rows. None: rows are those of a table.
    n_iter : int
        Passes of the experts over X.
    learning_rate : float
        Of the experts, at the start; it falls along a cosine. In `partial_fit` it does not fall.
    batch_size : int
        Rows in a step.
    winners : int, optional
        How many experts may learn from a row; few make experts different from each other. None: all.
    sharpness, normalize
        Options of the routing; see `poecaps.routing_by_agreement`.
    n_filters, kernel_size : int
        Of the convolutions that see images. A kernel_size of None is 9, or a third of the shorter side if that is less.
    autoencoder_iter, decoder_iter, painter_iter : int
        Passes of the other stages over images: the filters, the way back to capsules, and that to sharp pixels.
    device : str
        Where images are learned: "cpu", "cuda", or "auto" for a GPU where there is one. Tables stay on the CPU.
    verbose : bool
        Whether to print a line for each epoch.
    random_state : int, RandomState instance or None
        Where all random numbers come from. On a CPU the same integer gives the same result.

    Attributes
    ----------
    model_ : CapsuleNetwork or CapsuleTable
        What was learned, as a `torch.nn.Module`.
    experts_ : CapsuleExperts
        The layer of experts in it.
    image_shape_ : tuple of int, or None
        (h, w, c) of images; None for a table.
    n_features_in_ : int
        Columns, or h·w·c.
    feature_names_in_ : array of str
        Names of the columns, where X has names.
    n_iter_ : int
        Passes of the experts so far; a call of `partial_fit` is one, but for the first on images.
    n_samples_seen_ : int
        Rows so far; those of several passes count once.

    Notes
    -----
    `partial_fit` on a table follows the mean and the variance of each column as rows come. On images its first call is
    that of `fit`, and later ones leave the filters alone, so the first images should be many and typical. After each
    call the way back (of a table) and the density of codes are fitted to 2,000 rows drawn from all seen so far.

    Images come back from `inverse_transform` and `sample` in the layout that they were fitted in, from 0 to 1.

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
        winners: int | None = 1,
        sharpness: float = 1.0,
        normalize: F.Axis = "outputs",
        n_filters: int = 128,
        kernel_size: int | None = None,
        autoencoder_iter: int = 5,
        decoder_iter: int = 3,
        painter_iter: int = 10,
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
        self.sharpness = sharpness
        self.normalize = normalize
        self.n_filters = n_filters
        self.kernel_size = kernel_size
        self.autoencoder_iter = autoencoder_iter
        self.decoder_iter = decoder_iter
        self.painter_iter = painter_iter
        self.device = device
        self.verbose = verbose
        self.random_state = random_state

    def fit(self, X: Any, y: Any = None) -> CapsuleExpertsTransformer:  # noqa: ARG002
        """Learn from all rows of X, from the beginning.

        Parameters
        ----------
        X : (n, columns), or images (n, h·w), (n, h, w) or (n, h, w, c)
        y
            Not used.
        """
        rows = self._begin(X, fewest=2)
        if self.image_shape_ is not None:
            self._train(rows)
        else:
            table = self.model_ = self._new_table(rows)
            data = _as_tensor(rows)
            table.see(data)
            optimizer = torch.optim.Adam(table.learner.parameters(), lr=self.learning_rate)
            stage, generator = Stage(learning_rate=self.learning_rate), self._generator()
            for epoch in range(self.n_iter):
                optimizer.param_groups[0]["lr"] = stage.learning_rate_at(epoch / self.n_iter)
                table.learn(data, optimizer, self.batch_size, generator)
                self._tell(f"epoch {epoch + 1}/{self.n_iter}")
            table.settle(data, self._generator())
        return self._finish(rows, self.n_iter)

    def partial_fit(self, X: Any, y: Any = None) -> CapsuleExpertsTransformer:  # noqa: ARG002
        """Learn from some more rows, in one pass; see the notes of the class.

        Parameters
        ----------
        X : as in `fit`
        y
            Not used.
        """
        first = not hasattr(self, "model_")
        if first:
            rows = self._begin(X)
        else:
            self._check_parameters()
            rows = self._check(X)
        if self.image_shape_ is None:
            self._follow(rows, first=first)
        elif first:
            self._train(rows)
        else:
            fine_tune(
                self.model_,
                self._config(),
                self._images(rows),
                learning_rate_ratio=LATER,
                seed=self._seed(),
            )
        self._finish(rows, self.n_iter if first and self.image_shape_ is not None else 1)
        kept = self._kept[0]
        if self.image_shape_ is None:
            self.model_.settle(_as_tensor(kept), self._generator())
        elif not first:
            self.model_.density.fit(self._encode(kept).to(self._device()), self._generator())
        return self

    def transform(self, X: Any) -> Array:
        """Encode rows.

        Parameters
        ----------
        X : as in `fit`

        Returns
        -------
        (n, n_experts·expert_dim)
            Squashed experts: the numbers of each have a norm below 1, the probability that it fires.
        """
        check_is_fitted(self)
        rows = self._check(X)
        return _as_array(self._encode(rows).flatten(1), _float_of(rows))

    def inverse_transform(self, X: Any) -> Array:
        """Decode codes.

        Parameters
        ----------
        X : (n, n_experts·expert_dim)
            As `transform` gives them.

        Returns
        -------
        (n, columns), or images in the layout of `fit`
        """
        check_is_fitted(self)
        codes = check_array(X, dtype=(np.float64, np.float32))
        if codes.shape[1] != self._n_features_out:
            raise ValueError(
                f"X must have {self._n_features_out} columns, as a code has, but has {codes.shape[1]}"
            )
        experts = _as_tensor(codes).view(len(codes), -1, self.experts_.out_dim)
        return self._as_given(self._in_chunks(self.model_.decode, experts), _float_of(codes))

    def score_samples(self, X: Any) -> Array:
        """Compute −F(x) for each row: its log-probability up to a constant that depends on the model.

        Scores of two rows under one model can be compared, those of two models cannot. F is that of the input
        capsules, so the density is one of capsules, not of pixels or columns.

        Parameters
        ----------
        X : as in `fit`

        Returns
        -------
        (n,)
        """
        check_is_fitted(self)
        rows = self._check(X)
        return _as_array(
            -self._in_chunks(self.model_.free_energy, self._batch(rows)), _float_of(rows)
        )

    def sample(self, n_samples: int = 1, random_state: Any = None) -> Array:
        """Draw new rows or images from a density of the codes of those seen.

        Parameters
        ----------
        n_samples
            How many.
        random_state
            Where draws come from; by default the `random_state` of the estimator, so that an integer there draws the
            same each time.

        Returns
        -------
        (n_samples, columns), or images in the layout of `fit`
        """
        check_is_fitted(self)
        checks.require_int("n_samples", n_samples, 1)
        numbers = check_random_state(self.random_state if random_state is None else random_state)
        generator = torch.Generator(self._device()).manual_seed(int(numbers.randint(2**31)))
        if isinstance(self.model_, CapsuleTable):
            return self._as_given(self.model_.sample(n_samples, generator), self._dtype)
        codes = self.model_.sample(n_samples, generator=generator)
        return self._as_given(self._in_chunks(self.model_.decode, codes), self._dtype)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.transformer_tags.preserves_dtype = ["float64", "float32"]
        tags.input_tags.three_d_array = True
        return tags

    # What X is

    def _begin(self, X: Any, fewest: int = 1) -> Array:
        """Check all parameters and X, and forget what was learned."""
        self._check_parameters()
        given = np.asarray(X).shape[1:] if _ndim(X) in (3, 4) else None
        shape = given if self.image_shape is None else tuple(self.image_shape)
        self.image_shape_ = None if shape is None else (*shape, 1)[:3]
        self._layout = given
        rows = self._check(X, reset=True, fewest=fewest)
        self._random = check_random_state(self.random_state)
        self._kept = rows[:0], np.empty(0)
        self._dtype = _float_of(rows)
        self._n_features_out = self.n_experts * self.expert_dim
        self.n_iter_ = self.n_samples_seen_ = 0
        return rows

    def _check_parameters(self) -> None:
        for name in ("n_experts", "expert_dim", "capsule_dim", "batch_size", "n_filters"):
            checks.require_int(name, getattr(self, name), 1)
        for name in ("n_iter", "autoencoder_iter", "decoder_iter", "painter_iter"):
            checks.require_int(name, getattr(self, name), 0)
        for name in ("learning_rate", "sharpness"):
            checks.require_nonnegative(name, getattr(self, name))
        checks.require_choice("normalize", self.normalize, get_args(F.Axis))
        if self.winners is not None:
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

    def _check(self, X: Any, *, reset: bool = False, fewest: int = 1) -> Array:
        """Rows (n, n_features_in_) of X, of whatever shape; floats, or uint8 if they are images."""
        shape = self.image_shape_
        if _ndim(X) in (3, 4):
            X = np.asarray(X)
            if shape is None or (*X.shape[1:], 1)[:3] != shape:
                wanted = (
                    "rows of a table"
                    if shape is None
                    else f"images of {' × '.join(map(str, shape))}"
                )
                raise ValueError(f"X must hold {wanted}, but has shape {X.shape}")
            X = X.reshape(len(X), math.prod(X.shape[1:]))
        dtypes = (np.float64, np.float32) if shape is None else (np.float64, np.float32, np.uint8)
        rows: Array = validate_data(self, X, dtype=dtypes, reset=reset, ensure_min_samples=fewest)
        if shape is not None and rows.shape[1] != math.prod(shape):
            raise ValueError(
                f"image_shape is {shape}, {math.prod(shape)} numbers, but X has {rows.shape[1]} columns"
            )
        return rows

    def _images(self, rows: Array) -> ImageSet:
        assert self.image_shape_ is not None  # noqa: S101 (only images come here)
        return ImageSet(rows.reshape(len(rows), *self.image_shape_), source="X")

    def _as_given(self, made: Tensor, dtype: type) -> Array:
        """Rows, or images (n, c, h, w), in the layout of X."""
        if self.image_shape_ is not None:
            made = made.permute(0, 2, 3, 1)
        return _as_array(made, dtype).reshape(len(made), *(self._layout or (self.n_features_in_,)))

    # Learning

    def _new_table(self, rows: Array) -> CapsuleTable:
        return CapsuleTable(
            rows.shape[1],
            self.capsule_dim,
            self.n_experts,
            self.expert_dim,
            sharpness=self.sharpness,
            normalize=self.normalize,
            winners=self.winners,
            dtype=torch.float32 if self._dtype is np.float32 else torch.float64,
            generator=self._generator(),
        )

    def _follow(self, rows: Array, *, first: bool) -> None:
        """Let the experts of a table see some more rows."""
        if first:
            self.model_ = self._new_table(rows)
        if first or not hasattr(self, "_optimizer"):
            self._optimizer = torch.optim.Adam(
                self.model_.learner.parameters(), lr=self.learning_rate
            )
        data = _as_tensor(rows)
        self.model_.see(data)
        self.model_.learn(data, self._optimizer, self.batch_size, self._generator())

    def _config(self) -> Config:
        """Options of a training run: the preset, with the parameters of the estimator."""
        assert self.image_shape_ is not None  # noqa: S101 (only images come here)
        preset = PRESETS["default"]()
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
        return replace(
            preset,
            model=model,
            autoencoder=replace(preset.autoencoder, epochs=self.autoencoder_iter),
            encoder=replace(
                preset.encoder,
                epochs=self.n_iter,
                learning_rate=self.learning_rate,
                winners=self.winners,
            ),
            decoder=replace(preset.decoder, epochs=self.decoder_iter),
            pixel_decoder=replace(preset.pixel_decoder, epochs=self.painter_iter),
            batch_size=self.batch_size,
            device=self.device,
            checkpoint_every=2
            ** 31,  # nobody could go on from a checkpoint in a folder that vanishes
        )

    def _train(self, rows: Array) -> None:
        """Train a network on images; what a run writes goes where it vanishes."""
        images, config = self._images(rows), replace(self._config(), seed=self._seed())
        with tempfile.TemporaryDirectory(prefix="poecaps-") as folder:
            self.model_ = train(config, Path(folder) / "run", data=images, report=self._report)

    def _finish(self, rows: Array, passes: int) -> CapsuleExpertsTransformer:
        is_table = isinstance(self.model_, CapsuleTable)
        self.experts_ = self.model_.experts if is_table else self.model_.encoders[0]
        self.model_.eval()
        self._keep(rows)
        self.n_samples_seen_ += len(rows)
        self.n_iter_ += passes
        return self

    def _keep(self, rows: Array) -> None:
        """Add rows to those kept; of too many, an even draw stays."""
        kept = np.concatenate([self._kept[0], rows])
        lots = np.concatenate([self._kept[1], self._random.uniform(size=len(rows))])
        chosen = np.sort(np.argsort(lots)[:KEPT])
        self._kept = kept[chosen], lots[chosen]

    def _seed(self) -> int:
        return int(self._random.randint(2**31))

    def _generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self._seed())

    def _report(self, progress: Progress) -> None:
        if progress.step and progress.epoch == int(progress.epoch):
            self._tell(f"{progress.stage}: {progress.summary()}")

    def _tell(self, line: str) -> None:
        if self.verbose:
            print(f"[CapsuleExpertsTransformer] {line}", flush=True)  # noqa: T201

    # Using what was learned

    def _device(self) -> torch.device:
        return self.experts_.weight.device

    def _batch(self, rows: Array) -> Tensor:
        """Rows as the model takes them: (n, columns), or (n, c, h, w)."""
        return (
            _as_tensor(rows) if self.image_shape_ is None else self._images(rows).batch(slice(None))
        )

    def _encode(self, rows: Array) -> Tensor:
        return self._in_chunks(self.model_.encode, self._batch(rows))

    @torch.no_grad()
    def _in_chunks(self, function: Callable[[Tensor], Tensor], batch: Tensor) -> Tensor:
        if self.image_shape_ is not None:
            batch = batch.float()
        return torch.cat([function(part.to(self._device())).cpu() for part in batch.split(CHUNK)])


def _ndim(X: Any) -> int:
    """Count the axes of anything that scikit-learn takes for an array."""
    return int(X.ndim) if hasattr(X, "ndim") else np.asarray(X).ndim


def _as_tensor(rows: Array) -> Tensor:
    """Copy an array, which may be read-only, into a tensor."""
    return torch.from_numpy(np.array(rows))


def _as_array(made: Tensor, dtype: type) -> Array:
    return made.numpy(force=True).astype(dtype, copy=False)


def _float_of(rows: Array) -> type:
    """Type of the floats that belong to rows: their own, and float32 for images of bytes."""
    return np.float64 if rows.dtype == np.float64 else np.float32
