"""Measure persistent chains on the README example: `python -m benchmarks.chains`."""

from __future__ import annotations

import torch

from poecaps import CapsuleExperts, squash
from poecaps.data import load

STEPS, BATCH_SIZE, NEVER = 200, 128, 10**9
VARIANTS = (  # name, step at which the chain starts, share replaced with data before each step
    ("CD-1 from the data", NEVER, 0.0),
    ("chain from the first step on", 0, 0.0),
    ("chain from step 100 on", 100, 0.0),
    ("chain from step 100 on, 10 % of it replaced with data before each step", 100, 0.1),
    ("the same, 50 %", 100, 0.5),
    ("chain from the first step on, 10 % replaced", 0, 0.1),
)


def lost_variance(x: torch.Tensor, start: int, replaced: float, steps: int = STEPS) -> float:
    """Train with Adam at rate 0.1 and return the share of the variance that reconstruction loses.

    Parameters
    ----------
    x : (N, I, K)
    start
        Step at which the persistent chain starts; before it, mixing starts from the data.
    replaced
        Share of the chain that is replaced with data before each step.
    """
    torch.manual_seed(0)
    experts = CapsuleExperts(x.shape[1], x.shape[2], 20, 16)
    optimizer = torch.optim.Adam(experts.parameters(), lr=0.1)
    chain: torch.Tensor | None = None
    for step, batch in enumerate(torch.randint(len(x), (steps, BATCH_SIZE))):
        if step == start:
            chain = x[batch].clone()
        if chain is not None and replaced:
            restarted = torch.rand(BATCH_SIZE) < replaced
            chain[restarted] = x[batch][restarted]
        optimizer.zero_grad()
        experts.contrastive_divergence(x[batch], chain=chain).backward()
        optimizer.step()
    with torch.no_grad():
        return ((experts.reconstruct(x) - x).square().sum() / x.square().sum()).item()


def main() -> None:
    """Print the table of docs/contrastive-divergence.md."""
    images = load("mnist-sample").batch(range(2000))
    x = squash((images - images.mean(0)).unfold(2, 4, 4).unfold(3, 4, 4).reshape(-1, 49, 16))
    print("| negative phase | lost |\n| --- | --- |")
    for name, start, replaced in VARIANTS:
        print(f"| {name} | {lost_variance(x, start, replaced):.2f} |", flush=True)


if __name__ == "__main__":
    main()
