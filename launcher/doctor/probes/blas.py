"""NumPy's BLAS, and bfloat16: what they say when they are loaded."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from launcher.doctor.aside import answer


def look() -> dict[str, Any]:
    """name, version: of the BLAS; threads: that it would use, None if unknown; right: products and bfloat16 are."""
    import numpy as np

    try:
        config: Any = np.show_config(mode="dicts")
        build = config["Build Dependencies"]["blas"]
    except (KeyError, TypeError):  # an old NumPy, or one built by other means
        build = {}
    threads = None
    if importlib.util.find_spec("threadpoolctl"):
        info = importlib.import_module("threadpoolctl").threadpool_info()
        counts = [each["num_threads"] for each in info if each["user_api"] == "blas"]
        threads = max(counts, default=None)
    import ml_dtypes

    one = np.ones(2, ml_dtypes.bfloat16)
    product = np.ones((64, 64), np.float32) @ np.ones((64, 64), np.float32)
    return {
        "name": str(build.get("name", "")),
        "version": str(build.get("version", "")),
        "threads": threads,
        "right": bool((product == 64).all() and float((one + one).sum()) == 4.0),
    }


if __name__ == "__main__":
    answer(look)
