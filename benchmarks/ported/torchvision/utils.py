"""Pictures of batches."""

from __future__ import annotations

from typing import Any

import numpy as np
from PIL import Image


def save_image(tensor: Any, fp: str, nrow: int = 8, normalize: bool = False, **_: Any) -> None:
    """Writes a batch (N, C, H, W) of 0 to 1 as one picture, `nrow` images a row."""
    x = np.asarray(tensor.detach().numpy(), np.float64)
    if normalize:
        x = (x - x.min()) / max(x.max() - x.min(), 1e-5)
    x = np.concatenate([x, np.zeros((-len(x) % nrow, *x.shape[1:]))])
    rows = x.reshape(-1, nrow, *x.shape[1:]).transpose(0, 3, 1, 4, 2)  # row, H, column, W, C
    picture = rows.reshape(rows.shape[0] * rows.shape[1], -1, rows.shape[-1])
    Image.fromarray((picture.repeat(4 - picture.shape[-1], 2)[..., :3].clip(0, 1) * 255).astype(np.uint8)).save(fp)
