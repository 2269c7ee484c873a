"""The text of elementwise kernels: a formula over numbers of type A, and around it what dtypes and shapes ask for.

One kernel serves every shape. It is told by a `Plan`, which is passed by value: the sizes and steps of at most DIMS
dimensions, of which neighbours were joined where memory allows. Where the innermost steps are 0 or 1 it moves 16 bytes
at a time; the addresses decide in the kernel whether it can.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from ddp.ops.cuda._source import PRELUDE
from ddp.ops.cuda.formulas import FUNCTIONS

DIMS = 8
KINDS = {
    "bool": "bool",
    "uint8": "unsigned char",
    "int8": "signed char",
    "int16": "short",
    "int32": "int",
    "int64": "long long",
    "float16": "__half",
    "bfloat16": "__nv_bfloat16",
    "float32": "float",
    "float64": "double",
}
SIZES = {"bool": 1, "uint8": 1, "int8": 1, "int16": 2, "float16": 2, "bfloat16": 2, "int32": 4, "float32": 4}
HEADERS = {"float16": "#include <cuda_fp16.h>\n", "bfloat16": "#include <cuda_bf16.h>\n"}


class Input(NamedTuple):
    """dtype: of its array; None for a number of the host's."""

    name: str
    dtype: str | None


class Output(NamedTuple):
    name: str
    dtype: str


def computed_in(dtypes: Sequence[str]) -> str:
    """A for operands of these dtypes: the 16-bit floats are computed in float, the small integers in int."""
    if "float64" in dtypes:
        return "double"
    if any("float" in dtype for dtype in dtypes):
        return "float"
    return "long long" if "int64" in dtypes else "int"


def head(dtypes: Sequence[str], kind: str, body: str) -> str:
    """What goes before a kernel: headers, types, and those of our functions that its body calls."""
    includes = "".join(HEADERS[dtype] for dtype in sorted(set(dtypes)) if dtype in HEADERS)
    called = "".join(code for name, code in FUNCTIONS.items() if re.search(rf"\b{name}\(", body))
    return f"{includes}typedef {kind} A;\n{PRELUDE}\ntypedef unsigned int Small;\n{called}"


def number(kind: str) -> str:
    """What a number comes as, where it is computed with as `kind`."""
    return "double" if kind in ("float", "double") else "Index"


def formula(ins: Sequence[Input], outs: Sequence[str], numbers: Sequence[str], body: str) -> str:
    """The formula as a function of numbers of type A that writes into references."""
    given = [f"A {each.name}" for each in ins] + [f"A& {each}" for each in outs] + [f"A {each}" for each in numbers]
    return f"__device__ inline void each({', '.join(given)}) {{ {body} }}\n"


def lanes_of(dtypes: Sequence[str]) -> int:
    """How many elements a thread takes at a time: 16 bytes of the largest."""
    return 16 // max(SIZES.get(dtype, 8) for dtype in dtypes)


def elementwise(
    entry: str,
    ins: Sequence[Input],
    outs: Sequence[Output],
    numbers: Sequence[str],
    body: str,
    kind: str,
    exact: str | None = None,
) -> str:
    """A kernel that computes `outs` of `ins`, element by element. body: statements over their names, all of type A.

    exact: the dtype that numbers in the place of inputs are rounded to.
    """
    arrays: list[Input | Output] = [*[each for each in ins if each.dtype is not None], *outs]
    hosted = [*[each.name for each in ins if each.dtype is None], *numbers]
    dtypes = [str(each.dtype) for each in arrays]
    lanes = lanes_of(dtypes)
    pointers = [
        f"{'' if isinstance(each, Output) else 'const '}{KINDS[str(each.dtype)]}* {each.name}_" for each in arrays
    ]
    signature = ", ".join([*pointers, "Plan plan", *[f"{number(kind)} {name}_" for name in hosted]])
    names = ", ".join([*[f"{each.name}_" for each in arrays], "plan", *[f"{name}_" for name in hosted]])

    def steps(d: str) -> str:
        return " ".join(f"at_{each.name} += r * (I)plan.step[{a}][{d}];" for a, each in enumerate(arrays))

    def offsets() -> str:
        return ", ".join(f"at_{each.name} = 0" for each in arrays)

    def call(of: dict[str, str]) -> str:
        rounded = "A({}_)" if exact is None else f"A(static_cast<{KINDS[exact]}>(A({{}}_)))"
        given = [of[each.name] if each.dtype is not None else rounded.format(each.name) for each in ins]
        return f"each({', '.join([*given, *[f'of_{each.name}' for each in outs], *[f'A({n}_)' for n in numbers]])});"

    results = " ".join(f"A of_{each.name};" for each in outs)
    inputs = [each for each in ins if each.dtype is not None]
    loads = "\n            ".join(
        f"Pack<{KINDS[str(each.dtype)]}, N> {each.name} = load<{KINDS[str(each.dtype)]}, N>"
        f"({each.name}_ + at_{each.name}, plan.step[{a}][last]);"
        for a, each in enumerate(inputs)
    )
    packs = " ".join(f"Pack<{KINDS[each.dtype]}, N> {each.name};" for each in outs)
    stores = " ".join(f"{each.name}.at[i] = static_cast<{KINDS[each.dtype]}>(of_{each.name});" for each in outs)
    saves = " ".join(f"*(Pack<{KINDS[each.dtype]}, N>*)({each.name}_ + at_{each.name}) = {each.name};" for each in outs)
    tail = " ".join(
        f"{each.name}_[e * (I)plan.step[{a}][0]] = static_cast<{KINDS[each.dtype]}>(of_{each.name});"
        for a, each in enumerate(outs, len(inputs))
    )
    of_lane = {each.name: f"A({each.name}.at[i])" for each in inputs}
    of_tail = {each.name: f"A({each.name}_[e * (I)plan.step[{a}][0]])" for a, each in enumerate(inputs)}
    aligned = " && ".join(
        f"(!plan.step[{a}][plan.dims - 1] || (size_t){each.name}_ % ({SIZES.get(str(each.dtype), 8) * lanes}) == 0)"
        for a, each in enumerate(arrays)
    )
    return f"""{head(dtypes, kind, body)}
// wide: whether all innermost steps are 0 or 1, and lanes never cross a row; small: whether 32 bits hold each offset.
struct Plan {{ Index n, dims, wide, small, shape[{DIMS}], step[{len(arrays)}][{DIMS}]; }};
template <class T, int N> struct alignas(sizeof(T) * N) Pack {{ T at[N]; }};

template <class T, int N> __device__ inline Pack<T, N> load(const T* from, Index step) {{
    if (N == 1 || step) return *(const Pack<T, N>*)from;
    Pack<T, N> pack;
    T one = *from;
#pragma unroll
    for (int i = 0; i < N; i++) pack.at[i] = one;
    return pack;
}}

{formula(ins, [each.name for each in outs], numbers, body)}
template <class I, int N> __device__ void run({signature}) {{
    const I start = (I)blockIdx.x * blockDim.x + threadIdx.x, stride = (I)gridDim.x * blockDim.x;
    const I n = (I)plan.n, whole = n / N;
    const int last = (int)plan.dims - 1;
    for (I k = start; k < whole; k += stride) {{
        I e = k * N, {offsets()};
        for (int d = last; d > 0; d--) {{
            I up = e / (I)plan.shape[d], r = e - up * (I)plan.shape[d];
            {steps("d")}
            e = up;
        }}
        {{ I r = e; {steps("0")} }}
        {loads}
        {packs}
#pragma unroll
        for (int i = 0; i < N; i++) {{ {results} {call(of_lane)} {stores} }}
        {saves}
    }}
    // Lanes that are left over are of one dimension: else a row is so many packs.
    for (I e = N == 1 ? n : whole * N + start; e < n; e += stride) {{ {results} {call(of_tail)} {tail} }}
}}

extern "C" __global__ void ddp_{entry}({signature}) {{
    bool aligned = plan.wide && {aligned};
    if (!plan.small) run<Index, 1>({names});
    else if (aligned) run<Small, {lanes}>({names});
    else run<Small, 1>({names});
}}
"""


def reduction(
    entry: str, ins: Sequence[Input], out: Output, numbers: Sequence[str], body: str, join: str, start: str, end: str,
    kind: str,
) -> str:  # fmt: skip
    """Kernels that reduce a formula `v` of `ins`.

    `ddp_ENTRY_along` gives a block to each result, `ddp_ENTRY_across` a thread. join: of A a and
    A b; start: the result of nothing; end: of the joined `v` and the numbers. All rows are cut into `chunks`, whose
    results stand one after another: (chunks, rows).
    """
    arrays = [each for each in ins if each.dtype is not None]
    hosted = [*[each.name for each in ins if each.dtype is None], *numbers]
    dtypes = [*[str(each.dtype) for each in arrays], out.dtype]
    pointers = [f"const {KINDS[str(each.dtype)]}* {each.name}_" for each in arrays]
    signature = ", ".join(
        [*pointers, f"{KINDS[out.dtype]}* result_", "Plan plan", *[f"{number(kind)} {name}_" for name in hosted]]
    )
    names = ", ".join([*[f"{each.name}_" for each in arrays], "result_", "plan", *[f"{name}_" for name in hosted]])

    def walk(index: str, dims: str, shape: str, step: str, at: str) -> str:
        def add(d: str) -> str:
            return " ".join(f"{at}_{each.name} += r * (I)plan.{step}[{a}][{d}];" for a, each in enumerate(arrays))

        return f"""I rest = {index};
            for (int d = (int)plan.{dims} - 1; d > 0; d--) {{
                I up = rest / (I)plan.{shape}[d], r = rest - up * (I)plan.{shape}[d];
                {add("d")}
                rest = up;
            }}
            {{ I r = rest; {add("0")} }}"""

    begins = ", ".join(f"from_{each.name} = 0" for each in arrays)
    copies = ", ".join(f"at_{each.name} = from_{each.name}" for each in arrays)
    given = [f"A({each.name}_[at_{each.name}])" if each.dtype is not None else f"A({each.name}_)" for each in ins]
    call = f"each({', '.join([*given, 'v', *[f'A({n}_)' for n in numbers]])});"
    ending = ", ".join(["A v", *[f"A {n}" for n in numbers]])
    ended = ", ".join(["v", *[f"A({n}_)" for n in numbers]])
    return f"""{head(dtypes, kind, body + join + end)}
struct Plan {{
    Index rows, n, chunks, length, small, dims, shape[{DIMS}], depth, over[{DIMS}];
    Index step[{len(arrays)}][{DIMS}], stride[{len(arrays)}][{DIMS}];
}};

{formula(ins, ["v"], numbers, body)}
__device__ inline A joined(A a, A b) {{ return {join}; }}
__device__ inline A ended({ending}) {{ return {end}; }}

template <class I, class Team> __device__ void run({signature}) {{
    for (Index row = Team::first(); row < plan.rows * plan.chunks; row += Team::rows()) {{
        I chunk = I(row / plan.rows), {begins};
        {{
            {walk("I(row - (Index)chunk * plan.rows)", "dims", "shape", "step", "from")}
        }}
        I begin = chunk * (I)plan.length, after = begin + (I)plan.length;
        if (after > (I)plan.n) after = (I)plan.n;
        A added = {start};
        for (I k = begin + (I)Team::start(); k < after; k += (I)Team::step()) {{
            I {copies};
            {walk("k", "depth", "over", "stride", "at")}
            A v;
            {call}
            added = joined(added, v);
        }}
        A v = Team::meet(added, [](A a, A b) {{ return joined(a, b); }});
        if (Team::leads()) result_[row] = static_cast<{KINDS[out.dtype]}>(ended({ended}));
    }}
}}

extern "C" __global__ void ddp_{entry}_along({signature}) {{
    if (plan.small) run<Small, Block>({names});
    else run<Index, Block>({names});
}}
extern "C" __global__ void ddp_{entry}_across({signature}) {{
    if (plan.small) run<Small, Thread>({names});
    else run<Index, Thread>({names});
}}
"""
