"""Which ops compute in 16 bits under autocast, and which in float32: PyTorch's lists, in our ops' names.

What is in no list computes in the dtype its inputs have, or are promoted to. PyTorch's lists differ between devices,
so these do. Source: PyTorch 2.13, documentation of `torch.amp`, "Autocast Op Reference".
"""

from __future__ import annotations

_PRODUCTS = {
    "conv2d",
    "conv_transpose2d",
    "einsum",
    "feed_forward",
    "gru",
    "linear",
    "linear_act",
    "lstm",
    "matmul",
    "prelu",
    "rnn",
    "scaled_dot_product_attention",
}
_LOSSES = {
    "binary_cross_entropy",
    "cross_entropy",
    "huber_loss",
    "kl_div",
    "l1_loss",
    "mse_loss",
    "nll_loss",
    "smooth_l1_loss",
    "soft_cross_entropy",
}

LOW: dict[str, frozenset[str]] = {
    "cuda": frozenset(_PRODUCTS),
    "cpu": frozenset(_PRODUCTS),
}
SINGLE: dict[str, frozenset[str]] = {
    "cuda": frozenset(
        _LOSSES
        | {
            "acos",
            "asin",
            "cosh",
            "cumprod",
            "cumsum",
            "erfinv",
            "exp",
            "expm1",
            "group_norm",
            "layer_norm",
            "log",
            "log10",
            "log1p",
            "log2",
            "log_softmax",
            "logsumexp",
            "pow",
            "prod",
            "reciprocal",
            "rms_norm",
            "rsqrt",
            "sinh",
            "softmax",
            "softplus",
            "sum",
            "tan",
            "vector_norm",
        }
    ),
    "cpu": frozenset(_LOSSES | {"prod"}),
}

#: Of SINGLE on GPUs: what has a kernel that reads 16 bits, computes in float32, and can give a float32 result.
KEPT = frozenset({"cross_entropy"})
