"""Metrics that training and evaluation share.

`margin`, `agreement`, `reconstruction` and `energy` compare encoders without labels, and the more,
the better: with `encoder.restarts`, one of them chooses the encoder that is kept. `stability`
compares experts, for `encoder.recombinations`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "agreement",
    "effective_rank",
    "energy",
    "lost_share",
    "margin",
    "margins",
    "reconstruction",
    "stability",
]


def effective_rank(codes: Tensor) -> float:
    """Compute the participation ratio (Σλ)²/Σλ² of the eigenvalues λ of the codes' covariance.

    It is the number of directions that carry the variance of the codes.

    Parameters
    ----------
    codes : (N, S)
        One row for each image.

    Returns
    -------
    float
        From 1 to S, or 0 if all codes are equal.
    """
    centred = (codes - codes.mean(0)).double()
    covariance = centred.T @ centred
    total = covariance.trace()  # Σλ; Σλ² is the sum of the squared entries
    return (total.square() / covariance.square().sum()).item() if total > 0 else 0.0


def margins(log_odds: Tensor) -> Tensor:
    """Compute how far the most active expert of each image is ahead of the second.

    With the log-odds ℓ_j = log P(a_j = 1)/P(a_j = 0) and the most active expert m::

        ℓ_m − max_{j≠m} ℓ_j

    Parameters
    ----------
    log_odds : (N, J)
        Logits of the firing probabilities. With a single expert, all margins are 0.

    Returns
    -------
    (N,)
    """
    best = log_odds.topk(min(2, log_odds.shape[1]), dim=1).values
    return best[:, 0] - best[:, -1]


def margin(log_odds: Tensor) -> float:
    """Compute the mean over images of ℓ_m − max_{j≠m} ℓ_j; see `margins`.

    Experts that divide the images among themselves clearly have a large margin. One factor for all
    weights does not change it.

    Parameters
    ----------
    log_odds : (N, J)
    """
    return margins(log_odds).double().mean().item()


def agreement(log_odds: Tensor) -> float:
    """Compute the share of transformed copies whose most active expert is that of the image.

    With the most active expert m_nt of view t of image n, of which t = 0 is the image itself::

        1/(N(T−1)) · Σ_n Σ_{t≥1} [m_nt = m_n0]

    Parameters
    ----------
    log_odds : (N, T, J)
        Logits of the firing probabilities of all T ≥ 2 views.

    Returns
    -------
    float
        From 0 to 1.
    """
    expert = log_odds.argmax(-1)
    return (expert[:, 1:] == expert[:, :1]).double().mean().item()


def stability(log_odds: Tensor) -> Tensor:
    """Compute for each expert how often other views of an image that it wins choose it, too.

    With the number k_nj of the T views of image n whose most active expert is j::

        Σ_n k_nj(k_nj − 1) / ((T − 1) Σ_n k_nj)

    Parameters
    ----------
    log_odds : (N, T, J)
        Logits of the firing probabilities of all T ≥ 2 views.

    Returns
    -------
    (J,)
        From 0 to 1; 0 for an expert that wins no view.
    """
    views, experts = log_odds.shape[1:]
    winner = log_odds.argmax(-1).unsqueeze(-1)
    index = winner.new_tensor(range(experts))
    wins = (winner == index).sum(1)  # (N, J)
    pairs = (wins * (wins - 1)).sum(0)
    return pairs / ((views - 1) * wins.sum(0)).clamp(min=1)


def lost_share(x: Tensor, reconstructed: Tensor) -> float:
    """Compute the share of the square norm of capsules that is lost: Σ‖x̃ − x‖² / Σ‖x‖².

    Parameters
    ----------
    x, reconstructed : (N, I, K)
    """
    return ((reconstructed - x).square().sum() / x.square().sum()).item()


def reconstruction(x: Tensor, reconstructed: Tensor) -> float:
    """Compute −Σ‖x̃ − x‖² / Σ‖x‖² of capsules x and their reconstructions x̃; at most 0.

    Parameters
    ----------
    x, reconstructed : (N, I, K)
    """
    return -lost_share(x, reconstructed)


def energy(free_energy: Tensor) -> float:
    """Compute −mean F(x) = mean log(Z P(x)).

    The partition functions Z of two encoders differ, and are not known: encoders with larger
    weights have lower energies everywhere. Training measures it on training images.

    Parameters
    ----------
    free_energy : (N,)
    """
    return -free_energy.double().mean().item()
