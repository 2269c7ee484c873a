"""The elementwise ops in CUDA C++: the value, and beside it the derivative by each input.

Names stand for numbers of type A, which is float for the 16-bit floats. `g` is the gradient of the result `out`; what
else a gradient reads is what its op saves. They are the formulas of `ddp.ops`, where they stand with their reasons.
"""

from __future__ import annotations

from typing import NamedTuple


class Formula(NamedTuple):
    """value: what `out` is, or statements that set it; gradients: by input, in the same way `dNAME`.

    numbers: the op's parameters that it reads; integers: whether it holds for integers and bool; saves: what the
    gradients read, where it is not what the op saves on the CPU.
    """

    value: str
    gradients: dict[str, str]
    numbers: tuple[str, ...] = ()
    integers: bool = False
    saves: tuple[str, ...] | None = None


def _extreme(function: str, loses: str, wins: str) -> Formula:
    """The larger or the smaller of two; the gradient of equal ones is halved, and a nan's goes to both."""
    share = "x {} y ? A(0) : x == y ? g * A(0.5) : g"
    return Formula(f"{function}(x, y)", {"x": share.format(loses), "y": share.format(wins)}, integers=True)


def _first(holds: str) -> Formula:
    """x if that holds, or if y is a nan; else y."""
    gradients = {"x": f"x {holds} y || y != y ? g : A(0)", "y": f"x {holds} y || y != y ? A(0) : g"}
    return Formula(f"x {holds} y || y != y ? x : y", gradients, integers=True)


# Functions that formulas may call, each put before the kernel that does. NumPy's rules: by zero there is 0 for
# integers, and the floor is that of the true quotient.
FUNCTIONS = {
    "truncated": """
__device__ inline float truncated(float x, float y) { return trunc(x / y); }
__device__ inline double truncated(double x, double y) { return trunc(x / y); }
template <class I> __device__ inline I truncated(I x, I y) { return y == 0 ? I(0) : y == -1 ? I(0) - x : x / y; }
""",
    "after_trunc": """
__device__ inline float after_trunc(float x, float y) { return fmod(x, y); }
__device__ inline double after_trunc(double x, double y) { return fmod(x, y); }
template <class I> __device__ inline I after_trunc(I x, I y) { return y == 0 || y == -1 ? I(0) : x % y; }
""",
    "after_floor": """
template <class R> __device__ inline R real_after_floor(R x, R y) {
    R rest = fmod(x, y);
    if (rest == 0) return copysign(R(0), y);
    return (y < 0) != (rest < 0) ? rest + y : rest;
}
__device__ inline float after_floor(float x, float y) { return real_after_floor(x, y); }
__device__ inline double after_floor(double x, double y) { return real_after_floor(x, y); }
template <class I> __device__ inline I after_floor(I x, I y) {
    if (y == 0 || y == -1) return I(0);
    I rest = x % y;
    return rest != 0 && (y < 0) != (rest < 0) ? rest + y : rest;
}
""",
    "floored": """
template <class R> __device__ inline R real_floored(R x, R y) {
    if (y == 0) return x / y;
    R rest = fmod(x, y), whole = (x - rest) / y;
    if (rest != 0 && (y < 0) != (rest < 0)) whole -= 1;
    if (whole == 0) return copysign(R(0), x / y);
    R down = floor(whole);
    return whole - down > R(0.5) ? down + 1 : down;
}
__device__ inline float floored(float x, float y) { return real_floored(x, y); }
__device__ inline double floored(double x, double y) { return real_floored(x, y); }
template <class I> __device__ inline I floored(I x, I y) {
    if (y == 0) return I(0);
    if (y == -1) return I(0) - x;
    I whole = x / y;
    return x % y != 0 && (x < 0) != (y < 0) ? whole - 1 : whole;
}
""",
    "power": """
template <class R> __device__ inline R real_power(R x, R y) {
    return y == 2 ? x * x : y == 1 ? x : y == 3 ? x * x * x : pow(x, y);
}
__device__ inline float power(float x, float y) { return real_power(x, y); }
__device__ inline double power(double x, double y) { return real_power(x, y); }
template <class I> __device__ inline I power(I x, I y) {
    if (y < 0) return x == 1 ? I(1) : x == -1 ? (y % 2 ? I(-1) : I(1)) : I(0);
    I z = 1;
    for (; y; y >>= 1) {
        if (y & 1) z *= x;
        x *= x;
    }
    return z;
}
""",
    "size_of": """
__device__ inline float size_of(float x) { return fabs(x); }
__device__ inline double size_of(double x) { return fabs(x); }
template <class I> __device__ inline I size_of(I x) { return x < 0 ? I(0) - x : x; }
""",
    # The larger, the smaller, nan beside a nan.
    "larger": "__device__ inline A larger(A x, A y) { return x > y || x != x ? x : y; }\n",
    "smaller": "__device__ inline A smaller(A x, A y) { return x < y || x != x ? x : y; }\n",
    "sigmoid": "__device__ inline A sigmoid(A x) { return 1 / (1 + exp(-x)); }\n",
}

_LN2, _LN10 = "A(0.69314718055994531)", "A(2.3025850929940457)"

ARITHMETIC = {
    "add": Formula("x + alpha * y", {"x": "g", "y": "alpha * g"}, ("alpha",), integers=True),
    "sub": Formula("x - alpha * y", {"x": "g", "y": "-alpha * g"}, ("alpha",), integers=True),
    "mul": Formula("x * y", {"x": "g * y", "y": "g * x"}, integers=True),
    "div": Formula("x / y", {"x": "g / y", "y": "-g / y * out"}),
    "remainder": Formula("after_floor(x, y)", {"x": "g", "y": "-g * floored(x, y)"}, integers=True),
    "fmod": Formula("after_trunc(x, y)", {"x": "g", "y": "-g * trunc(x / y)"}, integers=True),
    "pow": Formula(
        "power(x, y)",
        {
            "x": "y == 0 ? A(0) : g * y * power(x, y - 1)",
            "y": "x == 0 && y >= 0 ? A(0) : g * out * log(x)",
        },
        integers=True,
    ),
    "div_floor": Formula("floored(x, y)", {}, integers=True),
    "div_trunc": Formula("truncated(x, y)", {}, integers=True),
    "neg": Formula("-x", {"x": "-g"}, integers=True),
    "abs": Formula("size_of(x)", {"x": "x > 0 ? g : x < 0 ? -g : g * 0"}, integers=True),
    "reciprocal": Formula("1 / x", {"x": "-g * out * out"}),
    "square": Formula("x * x", {"x": "2 * g * x"}, integers=True),
    "addcmul": Formula(
        "x + value * (y * z)", {"x": "g", "y": "g * (value * z)", "z": "g * (value * y)"}, ("value",), integers=True
    ),
    "addcdiv": Formula(
        "x + value * (y / z)", {"x": "g", "y": "g * (value / z)", "z": "-g * (value / z) * (y / z)"}, ("value",)
    ),
    "lerp": Formula(
        "fabs(w) < A(0.5) ? x + w * (y - x) : y - (y - x) * (1 - w)",
        {"x": "g * (1 - w)", "y": "g * w", "w": "g * (y - x)"},
    ),
    "hypot": Formula("hypot(x, y)", {"x": "g * (x / out)", "y": "g * (y / out)"}),
    "atan2": Formula("atan2(y, x)", {"y": "g / (x * x + y * y) * x", "x": "-(g / (x * x + y * y)) * y"}),
    "logaddexp": Formula(
        f"A d = x - y; out = x == y ? x + {_LN2} : d > 0 ? x + log1p(exp(-d)) : d <= 0 ? y + log1p(exp(d)) : d;",
        {"x": "g / (1 + exp(y - x))", "y": "g / (1 + exp(x - y))"},
    ),
    "xlogy": Formula(
        "x == 0 && y == y ? A(0) : x * log(y)",
        {"x": "x == 0 && y <= 0 ? A(0) : g * log(y)", "y": "g * (x / y)"},
    ),
    "maximum": _extreme("larger", "<", ">"),
    "minimum": _extreme("smaller", ">", "<"),
    "fmax": _first(">="),
    "fmin": _first("<="),
    "clamp": Formula(
        "A y = x < low ? low : x; out = y > high ? high : y;",
        {"x": "x >= low && x <= high ? g : A(0)"},
        ("low", "high"),
        integers=True,
    ),
    "clamp_between": Formula(
        "smaller(larger(x, low), high)",
        {
            "x": "x >= low && x <= high ? g : A(0)",
            "low": "x < low && low < high ? g : A(0)",
            "high": "x > high || low > high ? g : A(0)",
        },
        integers=True,
    ),
    "where": Formula("c != 0 ? x : y", {"x": "c != 0 ? g : A(0)", "y": "c != 0 ? A(0) : g"}, integers=True),
}

# Of one input.
CURVES = {
    "exp": Formula("exp(x)", {"x": "g * out"}),
    "exp2": Formula("exp2(x)", {"x": f"g * out * {_LN2}"}),
    "expm1": Formula("expm1(x)", {"x": "g * (out + 1)"}),
    "log": Formula("log(x)", {"x": "g / x"}),
    "log2": Formula("log2(x)", {"x": f"g / (x * {_LN2})"}),
    "log10": Formula("log10(x)", {"x": f"g / (x * {_LN10})"}),
    "log1p": Formula("log1p(x)", {"x": "g / (x + 1)"}),
    "sqrt": Formula("sqrt(x)", {"x": "g / (2 * out)"}),
    "rsqrt": Formula("1 / sqrt(x)", {"x": "A(-0.5) * g * (out * out * out)"}),
    "sin": Formula("sin(x)", {"x": "g * cos(x)"}),
    "cos": Formula("cos(x)", {"x": "-g * sin(x)"}),
    "tan": Formula("tan(x)", {"x": "g * (1 + out * out)"}),
    "asin": Formula("asin(x)", {"x": "g / sqrt(1 - x * x)"}),
    "acos": Formula("acos(x)", {"x": "-g / sqrt(1 - x * x)"}),
    "atan": Formula("atan(x)", {"x": "g / (1 + x * x)"}),
    "sinh": Formula("sinh(x)", {"x": "g * cosh(x)"}),
    "cosh": Formula("cosh(x)", {"x": "g * sinh(x)"}),
    "asinh": Formula("asinh(x)", {"x": "g / sqrt(x * x + 1)"}),
    "acosh": Formula("acosh(x)", {"x": "g / sqrt(x * x - 1)"}),
    "atanh": Formula("atanh(x)", {"x": "g / (1 - x * x)"}),
    "logit": Formula("log(x / (1 - x))", {"x": "x >= 0 && x <= 1 ? g / (x * (1 - x)) : log(A(-1))"}),
    "logit_within": Formula(
        "A y = x < low ? low : x > high ? high : x; out = log(y / (1 - y));",
        {"x": "x >= low && x <= high ? g / (x * (1 - x)) : A(0)"},
        ("low", "high"),
    ),
    "erf": Formula("erf(x)", {"x": "g * (A(1.1283791670955126) * exp(-x * x))"}),
    "erfc": Formula("erfc(x)", {"x": "g * (A(-1.1283791670955126) * exp(-x * x))"}),
    "erfinv": Formula("erfinv(x)", {"x": "g * (A(0.88622692545275801) * exp(out * out))"}),
    "floor": Formula("floor(x)", {}),
    "ceil": Formula("ceil(x)", {}),
    "trunc": Formula("trunc(x)", {}),
    "round": Formula("rint(x * scale) / scale", {}, ("scale",)),
    "sign": Formula("x > 0 ? A(1) : x < 0 ? A(-1) : A(0)", {}, integers=True),
    "frac": Formula("x - trunc(x)", {"x": "g"}),
    "relu": Formula("x > 0 || x != x ? x : A(0)", {"x": "out != 0 ? g : A(0)"}, integers=True),
    "leaky_relu": Formula("x > 0 ? x : slope * x", {"x": "x > 0 ? g : slope * g"}, ("slope",)),
    "prelu": Formula("x > 0 ? x : w * x", {"x": "x > 0 ? g : w * g", "w": "x > 0 ? A(0) : g * x"}),
    "hardtanh": Formula(
        "x < low ? low : x > high ? high : x", {"x": "x <= low || x >= high ? A(0) : g"}, ("low", "high")
    ),
    "hardsigmoid": Formula(
        "A h = x + 3; out = (h < 0 ? A(0) : h > 6 ? A(6) : h) / 6;", {"x": "x > -3 && x < 3 ? g / 6 : A(0)"}
    ),
    "hardswish": Formula(
        "A h = x + 3; out = x * (h < 0 ? A(0) : h > 6 ? A(6) : h) / 6;",
        {"x": "x >= 3 ? g : x > -3 ? g * (x / 3 + A(0.5)) : A(0)"},
    ),
    "threshold": Formula("x <= threshold ? value : x", {"x": "x <= threshold ? A(0) : g"}, ("threshold", "value")),
    "sigmoid": Formula("sigmoid(x)", {"x": "g * out * (1 - out)"}),
    "tanh": Formula("tanh(x)", {"x": "g * (1 - out * out)"}),
    # x = [a | b]
    "glu": Formula("x * sigmoid(y)", {"x": "g * sigmoid(y)", "y": "A s = sigmoid(y); dy = g * s * (1 - s) * x;"}),
    "silu": Formula("x * sigmoid(x)", {"x": "A s = sigmoid(x); dx = g * (s + x * s * (1 - s));"}, saves=("x",)),
    # e stays finite: t is 1 long before.
    "mish": Formula(
        "A e = exp(x < 20 ? x : A(20)), n = e * (e + 2); out = x * (n / (n + 2));",
        {
            "x": "A e = exp(x < 20 ? x : A(20)), n = e * (e + 2), t = n / (n + 2);"
            " dx = g * (t + x * (1 - t * t) * (e / (1 + e)));"
        },
        saves=("x",),
    ),
    # y^+ + log(1 + e^-|y|), which neither overflows nor loses a small e.
    "softplus": Formula(
        "A y = x * beta; out = y > threshold ? x : ((y > 0 ? y : A(0)) + log1p(exp(-fabs(y)))) / beta;",
        {"x": "A y = x * beta; dx = y > threshold ? g : g * sigmoid(y);"},
        ("beta", "threshold"),
        saves=("x",),
    ),
    "logsigmoid": Formula("(x < 0 ? x : A(0)) - log1p(exp(-fabs(x)))", {"x": "g * sigmoid(-x)"}, saves=("x",)),
    "gelu": Formula(
        "x * (A(0.5) * erfc(x * A(-0.70710678118654752)))",
        {"x": "g * (A(0.5) * erfc(x * A(-0.70710678118654752)) + x * exp(A(-0.5) * x * x) * A(0.39894228040143268))"},
        saves=("x",),
    ),
    "gelu_tanh": Formula(
        "A(0.5) * x * (1 + tanh(A(0.79788456080286536) * x * (1 + A(0.044715) * x * x)))",
        {
            "x": "A k = A(0.79788456080286536), y = x * x, t = tanh(k * x * (1 + A(0.044715) * y));"
            " dx = g * (A(0.5) * (1 + t) + A(0.5) * x * (1 - t * t) * k * (1 + A(0.134145) * y));"
        },
        saves=("x",),
    ),
    "elu": Formula(
        "x > 0 ? scale * x : scale * alpha * expm1(input_scale * x)",
        {"x": "x > 0 ? g * scale : g * (scale * alpha * input_scale * exp(input_scale * x))"},
        ("alpha", "scale", "input_scale"),
        saves=("x",),
    ),
    "softsign": Formula("x / (fabs(x) + 1)", {"x": "A b = fabs(x) + 1; dx = g / (b * b);"}),
    "nan_to_num": Formula(
        "x != x ? nan : x > 0 && x - x != 0 ? posinf : x < 0 && x - x != 0 ? neginf : x",
        {"x": "x - x == 0 ? g : A(0)"},
        ("nan", "posinf", "neginf"),
    ),
    "deviation": Formula("sqrt(x)", {"x": "out == 0 ? A(0) : g / (2 * out)"}),
}

# Of results that are no part of the graph: bool of two operands.
COMPARISONS = {
    "equal": "x == y",
    "not_equal": "x != y",
    "less": "x < y",
    "less_equal": "x <= y",
    "greater": "x > y",
    "greater_equal": "x >= y",
    "logical_and": "x != 0 && y != 0",
    "logical_or": "x != 0 || y != 0",
    "logical_xor": "(x != 0) != (y != 0)",
}
