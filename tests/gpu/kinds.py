"""Which of NumPy's functions give views, wait for the device, or look at nothing but shapes and dtypes."""

from __future__ import annotations

from functools import cache
from pathlib import Path


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


VIEWS = _words(
    "reshape ravel transpose swapaxes moveaxis rollaxis expand_dims squeeze broadcast_to atleast_1d atleast_2d "
    "atleast_3d diagonal flip fliplr flipud rot90 split array_split hsplit vsplit dsplit real imag permute_dims "
    "matrix_transpose as_strided sliding_window_view"
)
# The size of their result, or an error that CuPy looks for, depends on numbers.
WAITS = _words(
    "nonzero argwhere flatnonzero unique unique_all unique_counts unique_inverse unique_values bincount extract "
    "compress setdiff1d setxor1d intersect1d union1d trim_zeros percentile quantile histogram histogram2d "
    "histogramdd array_equiv lstsq matrix_rank nanmedian"
)
PLAIN = _words(
    "result_type can_cast promote_types finfo iinfo issubdtype isscalar broadcast_shapes ndim shape size "
    "may_share_memory shares_memory min_scalar_type common_type isdtype iterable iscomplexobj isrealobj typename"
)
#: Through cuBLAS or cuSOLVER, which CuPy refuses while a graph is captured.
LIBRARY = _words("matmul dot tensordot einsum inner vdot outer kron linalg")

#: What copies, and so takes every dtype.
MOVES = _words(
    "concatenate stack take take_along_axis zeros ones full zeros_like ones_like full_like pad roll tile eye "
    "arange vstack hstack dstack column_stack identity repeat"
)
#: As CuPy 14.2 with ml_dtypes resolves its loops: where bfloat16 has none, and where float32's are taken and kept.
NO_BFLOAT16 = _words(
    "bitwise_and bitwise_or bitwise_xor invert ldexp gcd lcm left_shift right_shift sort argsort lexsort partition "
    "argpartition median percentile quantile searchsorted cumsum cumprod bincount histogram"
)
TO_FLOAT32 = _words("clip divmod where tril triu")


@cache
def names() -> dict[str, frozenset[str]]:
    """The names that CuPy has, by what has them."""
    result: dict[str, frozenset[str]] = {}
    where = ""
    for line in (Path(__file__).parent / "names.txt").read_text().splitlines():
        if line.startswith("["):
            where = line[1:-1]
            result[where] = frozenset()
        elif not line.startswith("#"):
            result[where] |= set(line.split())
    return result
