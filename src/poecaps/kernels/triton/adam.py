# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""A step of Adam for one parameter.

PyTorch's fused kernel assigns 65,536 numbers to each multiprocessor, which leaves most of them idle
for the weight of a capsule layer.
"""

import triton.language as tl
from torch import Tensor

from poecaps.kernels.triton.jit import kernel
from poecaps.kernels.triton.launch import LaunchConfig, cdiv, launch

# Numbers that one program updates.
BLOCK = 512

LAUNCH = LaunchConfig(num_warps=4, num_stages=2, maxnreg=None)


@kernel
def adam_kernel(
    param_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, step_ptr, lr_ptr, log_betas_ptr, count,
    BETA1: tl.constexpr, BETA2: tl.constexpr, WEIGHT_DECAY: tl.constexpr, EPS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Update `count` numbers of a parameter and of its moments.

    The bias corrections 1 − βᵗ are small differences of large numbers, so they are computed in
    float64, from ln β₁ and ln β₂ in `log_betas`.
    """
    offs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = offs < count
    t = tl.load(step_ptr).to(tl.float64)
    bias_correction1 = (1.0 - tl.exp(t * tl.load(log_betas_ptr))).to(tl.float32)
    bias_correction2 = (1.0 - tl.exp(t * tl.load(log_betas_ptr + 1))).to(tl.float32)
    p = tl.load(param_ptr + offs, mask=mask, other=0.0)
    g = tl.load(grad_ptr + offs, mask=mask, other=0.0) + WEIGHT_DECAY * p
    m = tl.load(exp_avg_ptr + offs, mask=mask, other=0.0)
    m += (1 - BETA1) * (g - m)
    v = BETA2 * tl.load(exp_avg_sq_ptr + offs, mask=mask, other=0.0) + (1 - BETA2) * g * g
    tl.store(exp_avg_ptr + offs, m, mask=mask)
    tl.store(exp_avg_sq_ptr + offs, v, mask=mask)
    step_size = tl.load(lr_ptr) / bias_correction1
    denominator = tl.sqrt(v) / tl.sqrt(bias_correction2) + EPS
    tl.store(param_ptr + offs, p - step_size * m / denominator, mask=mask)


def adam_step(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    step: Tensor,
    lr: Tensor,
    log_betas: Tensor,
    betas: tuple[float, float],
    weight_decay: float,
    eps: float,
) -> None:
    """Update a parameter and its moments in place.

    Parameters
    ----------
    param, grad, exp_avg, exp_avg_sq
        float32 tensors of the same shape and strides, without gaps in memory, of fewer than 2³¹
        numbers.
    step : ()
        Number of this step, counted from 1, float32.
    lr : ()
        Learning rate, float32.
    log_betas : (2,)
        Logarithms of `betas`, float64.
    betas, weight_decay, eps
        As in `torch.optim.Adam`.
    """
    count = param.numel()
    launch(
        adam_kernel,
        (cdiv(count, BLOCK),),
        (param, grad, exp_avg, exp_avg_sq, step, lr, log_betas, count),
        {
            "BETA1": betas[0],
            "BETA2": betas[1],
            "WEIGHT_DECAY": weight_decay,
            "EPS": eps,
            "BLOCK_N": BLOCK,
        },
        LAUNCH,
    )
