"""The format: what both sides of a file must agree on. Source: https://github.com/huggingface/safetensors#format"""

from __future__ import annotations

import numpy as np

from ddp._tensor.dtypes import bfloat16, bool_, float16, float32, float64, int8, int16, int32, int64, uint8

DTYPES = {
    "BOOL": bool_,
    "U8": uint8,
    "I8": int8,
    "I16": int16,
    "I32": int32,
    "I64": int64,
    "F16": float16,
    "BF16": bfloat16,
    "F32": float32,
    "F64": float64,
}
#: What files may hold that no tensor of ours does: arrays of checkpoints, such as the states of random numbers.
STORED = {**DTYPES, "U16": np.dtype("uint16"), "U32": np.dtype("uint32"), "U64": np.dtype("uint64")}
LIMIT = 100_000_000  # bytes of a header, as in the library
METADATA = "__metadata__"
SCALARS = (str, bool, int, float, type(None))  # JSON values, and the keys of dicts
