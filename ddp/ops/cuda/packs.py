"""Neighbours in memory that are read and written at once, and parameters of either dtype."""

from __future__ import annotations

from typing import Any

from ddp._engine.leaves import AccumulateInto
from ddp.ops._op import Array

# A GPU moves 16 bytes a thread at best, if their address is a multiple of 16.
PACKS = """
#define WIDEST (16 / (int)sizeof(T))

#ifdef __CUDACC__
#define RESIDENT(threads, blocks) __launch_bounds__(threads, blocks)  // registers are to suffice for so many blocks
#else
#define RESIDENT(threads, blocks)
#endif

template <class E, int V> struct alignas(V * sizeof(E)) Pack { E at[V]; };

template <class E, int V> __device__ bool fits(const void* x) { return (size_t)x % sizeof(Pack<E, V>) == 0; }

// A parameter beside what is in T: of T or of A, or none. What is read in packs has to fit.
struct Weights {
    const T* narrow;
    const A* wide;

    __device__ bool given() const { return narrow || wide; }
    template <int V> __device__ bool packed() const { return fits<T, V>(narrow) && (size_t)wide % 16 == 0; }
    __device__ A at(Index i) const { return narrow ? A(narrow[i]) : wide[i]; }
    template <int V> __device__ void load(Index i, A (&to)[V]) const {
        constexpr int W = V * sizeof(A) > 16 ? 16 / (int)sizeof(A) : V;
        if (narrow) {
            Pack<T, V> found = *(const Pack<T, V>*)(narrow + i);
            for (int v = 0; v < V; v++) to[v] = A(found.at[v]);
        } else {
            for (int from = 0; from < V; from += W) {
                Pack<A, W> found = *(const Pack<A, W>*)(wide + i + from);
                for (int v = 0; v < W; v++) to[from + v] = found.at[v];
            }
        }
    }
};

// Where a gradient goes, in T or in A: to what is there already, if `adding`.
struct Slope {
    T* narrow;
    A* wide;
    Index adding;

    __device__ bool wanted() const { return narrow || wide; }
    __device__ void put(Index i, A value) const {
        if (narrow) narrow[i] = T(adding ? A(narrow[i]) + value : value);
        else if (wide) wide[i] = adding ? wide[i] + value : value;
    }
};
"""


def either(xp: Any, x: Array | None, dtype: Any, kind: Any) -> tuple[Array | None, Array | None]:
    """x in one piece as the kernels take it: in `dtype`, or in `kind`, the dtype that they compute in."""
    if x is None:
        return None, None
    return (xp.ascontiguousarray(x), None) if x.dtype == dtype else (None, xp.ascontiguousarray(x, kind))


def slope(
    xp: Any, want: bool, shape: tuple[int, ...], to: Any, out: Any, dtype: Any, kind: Any
) -> tuple[Array | None, tuple[Array | None, Array | None, bool]]:
    """Where a gradient in dtype `to` is written: the array, and the three arguments of a `Slope`.

    out: as of an op that takes `into`: where it belongs, if that can be written to
    """
    if not want:
        return None, (None, None, False)
    adding = isinstance(out, AccumulateInto)
    array = out.array if isinstance(out, AccumulateInto) else out
    if array is None or array.dtype != to or not array.flags.c_contiguous:
        adding, array = False, xp.ndarray(shape, to)
    if to == dtype:
        return array, (array, None, adding)
    assert to == kind, f"a gradient of {to} beside {dtype}"
    return array, (None, array, adding)
