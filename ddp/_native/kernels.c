/* Fused kernels for the CPU: what NumPy would do in many passes over memory, in one.
 *
 * The half of this file below the dividing line is compiled twice, for float and for double; NAME(f) is f_f32 or f_f64.
 * Sums run in LANES partial sums whatever the vector width, and products are fused with sums where the compiler is told
 * so, so that every build for an architecture gives the same bits. Infinities and nan are values: no -ffast-math.
 */
#ifndef REAL
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define LANES 32
#define VECTOR __BIGGEST_ALIGNMENT__ /* bytes of a register */
#define SIMD _Pragma("omp simd")
#define INLINE static inline __attribute__((always_inline))
#ifdef __x86_64__ /* for loops that are short, or wait for memory: registers of 64 bytes slow them down */
#define NARROW __attribute__((target("prefer-vector-width=256")))
#else
#define NARROW
#endif
#define JOIN(a, b) a##_##b
#define SUFFIX(a, b) JOIN(a, b)
#define NAME(f) SUFFIX(f, TAG)
typedef ptrdiff_t size;

/* e^x to 1 ulp: x = k*log 2 + r, e^r by a polynomial, 2^k by its bits in two factors, so that neither over- nor underflows
 * before the product does. Adding 1.5*2^23 (2^52) leaves the integer k in the low bits. */
static inline float exp_f32(float x)
{
    x = x < -104.0f ? -104.0f : x;
    x = x > 89.0f ? 89.0f : x;
    float shifted = x * 1.44269504f + 12582912.0f;
    float k = shifted - 12582912.0f;
    float r = x - k * 0.693359375f;
    r = r + k * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = ((p * r + 1.3981999507e-3f) * r + 8.3334519073e-3f) * r + 4.1665795894e-2f;
    p = (p * r + 1.6666665459e-1f) * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    const union { float value; uint32_t bits; } raw = {shifted};
    const int32_t bits = (int32_t)(raw.bits - 0x4b400000u), half = bits >> 1;
    const union { uint32_t bits; float value; } a = {(uint32_t)(half + 127) << 23}, b = {(uint32_t)(bits - half + 127) << 23};
    return p * a.value * b.value;
}

static inline double exp_f64(double x)
{
    x = x < -746.0 ? -746.0 : x;
    x = x > 710.0 ? 710.0 : x;
    double shifted = x * 1.4426950408889634 + 6755399441055744.0;
    double k = shifted - 6755399441055744.0;
    double r = x - k * 6.93147180369123816490e-01;
    r = r - k * 1.90821492927058770002e-10;
    double p = 1.0 / 6227020800.0;
    p = ((p * r + 1.0 / 479001600.0) * r + 1.0 / 39916800.0) * r + 1.0 / 3628800.0;
    p = ((p * r + 1.0 / 362880.0) * r + 1.0 / 40320.0) * r + 1.0 / 5040.0;
    p = ((p * r + 1.0 / 720.0) * r + 1.0 / 120.0) * r + 1.0 / 24.0;
    p = (p * r + 1.0 / 6.0) * r + 0.5;
    p = p * (r * r) + r + 1.0;
    union { double value; uint64_t bits; } k_bits = {shifted};
    /* The arithmetic shift of 64 bits is slow before AVX-512: make the integer positive, halve it, and take that back. */
    const uint64_t bits = k_bits.bits - (0x4338000000000000u - 2048), half = bits >> 1;
    const union { uint64_t bits; double value; } a = {(half - 1) << 52}, b = {(bits - half - 1) << 52};
    return p * a.value * b.value;
}

/* The probability that a normal variable exceeds y >= 0, over e^(-y^2/2): to 3.2e-8 of its value. */
static inline float tail_f32(float y)
{
    float t = 1 / (1 + 0.35f * y);
    float p = -0.029158030f;
    p = ((p * t + 0.144031609f) * t - 0.255840399f) * t + 0.159321250f;
    p = ((p * t - 0.023213391f) * t + 0.105552926f) * t + 0.119821185f;
    p = (p * t + 0.139863529f) * t + 0.139621306f;
    return p * t;
}

/* out = x*c, c = P(normal variable <= x);  slope = c + x*e^(-x^2/2)/sqrt(2 pi) */
void gelu_f32(size n, const float *restrict x, float *restrict out, float *restrict slope)
{
    SIMD for (size i = 0; i < n; i++) {
        float e = exp_f32(-0.5f * (x[i] * x[i])), beyond = e * tail_f32(x[i] < 0 ? -x[i] : x[i]);
        float c = x[i] < 0 ? beyond : 1 - beyond;
        out[i] = x[i] * c;
        if (slope)
            slope[i] = c + x[i] * (e * 0.39894228f);
    }
}

/* q (length, depth), k (keys, depth), v (keys, width), z (length, width) for each head; g like z, dq, dk and dv like q, k
 * and v; mask (length, keys). Rows of each of the nine lie `row` elements apart, and its heads where `at` says; the
 * elements of a row adjoin, those of the mask lie `column` apart. masked: 0 for no mask, 1 for bool, 2 for numbers to add */
enum { Q, K, V, Z, G, DQ, DK, DV, MASK, ARRAYS };

typedef struct {
    int64_t heads, length, keys, depth, width, causal, masked, column;
    int64_t row[ARRAYS];
    const int64_t *at; /* (heads, ARRAYS) */
    double scale;
} attention_shape;
#define QUERIES 64 /* that attention works on at a time */

/* A window that slides over images; every pair is along H, along W. out: how many positions it takes */
typedef struct {
    int64_t image[2], kernel[2], stride[2], padding[2], dilation[2], out[2];
} window;

/* Narrows the positions from `start` to `stop` to those that see, at stride*position + offset, an element of n. */
static inline void clip(size n, size stride, size offset, size *start, size *stop)
{
    while (*start < *stop && *start * stride + offset < 0)
        ++*start;
    while (*start < *stop && (*stop - 1) * stride + offset >= n)
        --*stop;
}

/* One pass of a formula: registers, or scalar i as -1 - i; b is not read by functions of one operand. */
typedef struct {
    int32_t function, out, a, b;
} formula_pass;

enum { ADD, SUBTRACT, MULTIPLY, DIVIDE, MAXIMUM, SQRT, SIGN, NEGATIVE };
#define REGISTERS 16

void gelu_f64(size n, const double *restrict x, double *restrict out, double *restrict slope)
{
    for (size i = 0; i < n; i++) {
        const double c = 0.5 * erfc(-0.70710678118654752440 * x[i]);
        out[i] = x[i] * c;
        if (slope)
            slope[i] = c + x[i] * exp_f64(-0.5 * x[i] * x[i]) * 0.39894228040143267794;
    }
}

#define REAL float
#define TAG f32
#include "kernels.c"
#undef REAL
#undef TAG
#define REAL double
#define TAG f64
#include "kernels.c"

#else /* ---------------------------------------------------------------------------------------- once for each REAL */

#define EXP NAME(exp)

/* Runs a statement for i = 0 to n - 1, in which l counts the partial sum that i belongs to. */
#define EACH(n, ...)                                                                                                   \
    {                                                                                                                  \
        size first = 0;                                                                                                \
        for (; first + LANES <= (n); first += LANES)                                                                   \
            for (int l = 0; l < LANES; l++) {                                                                          \
                const size i = first + l;                                                                              \
                __VA_ARGS__;                                                                                           \
            }                                                                                                          \
        for (int l = 0; first + l < (n); l++) {                                                                        \
            const size i = first + l;                                                                                  \
            __VA_ARGS__;                                                                                               \
        }                                                                                                              \
    }

static inline REAL NAME(total)(REAL *sums)
{
    for (int half = LANES / 2; half; half /= 2)
        for (int l = 0; l < half; l++)
            sums[l] += sums[l + half];
    return sums[0];
}

static inline REAL NAME(largest)(size n, const REAL *x)
{
    REAL top[LANES];
    for (int l = 0; l < LANES; l++)
        top[l] = -INFINITY;
    EACH(n, top[l] = x[i] > top[l] ? x[i] : top[l]);
    for (int l = 1; l < LANES; l++)
        top[0] = top[l] > top[0] ? top[l] : top[0];
    return top[0];
}

/* Writes e^(x - top) to e, which may be x, and returns the sum. */
static inline REAL NAME(exponentials)(size n, const REAL *x, REAL top, REAL *e)
{
    REAL sums[LANES] = {0};
    SIMD for (size i = 0; i < n; i++)
        e[i] = EXP(x[i] - top);
    EACH(n, sums[l] += e[i]);
    return NAME(total)(sums);
}

/* --- activations: n elements; slope: what backward multiplies by, or NULL ---------------------------------------- */

/* out = 1/(1 + e^-x) */
void NAME(sigmoid)(size n, const REAL *restrict x, REAL *restrict out)
{
    SIMD for (size i = 0; i < n; i++)
        out[i] = 1 / (1 + EXP(-x[i]));
}

/* out = x*s, s = 1/(1 + e), e = e^-x;  slope = s + out*(1 - s) */
void NAME(silu)(size n, const REAL *restrict x, REAL *restrict out, REAL *restrict slope)
{
    SIMD for (size i = 0; i < n; i++) {
        REAL e = EXP(-x[i]), s = 1 / (1 + e), z = x[i] * s;
        out[i] = z;
        if (slope)
            slope[i] = s + z * (s > 0 ? e * s : 1);
    }
}

/* out = x*s, s = 1/(1 + e), e = e^-2u, u = k*(x + c*x^3), k = sqrt(2/pi), c = 0.044715;  slope = s + 2*out*(1 - s)*u' */
void NAME(gelu_tanh)(size n, const REAL *restrict x, REAL *restrict out, REAL *restrict slope)
{
    const REAL k = (REAL)0.79788456080286535588, c = (REAL)(0.79788456080286535588 * 0.044715);
    SIMD for (size i = 0; i < n; i++) {
        REAL y = x[i] * x[i], e = EXP(-2 * x[i] * (k + c * y)), s = 1 / (1 + e), z = x[i] * s;
        out[i] = z;
        if (slope)
            slope[i] = s + 2 * z * (s > 0 ? e * s : 1) * (k + 3 * c * y);
    }
}

#define OF_EACH(function)                                                                                              \
    void NAME(function)(size n, const REAL *restrict x, REAL *restrict out)                                            \
    {                                                                                                                  \
        for (size i = 0; i < n; i++) out[i] = (REAL)function(x[i]);                                                    \
    }
#define relu(x) ((x) > 0 || (x) != (x) ? (x) : 0)
OF_EACH(relu)
OF_EACH(erf)
OF_EACH(erfc) /* 1 - erf x */

/* dx = g unless z = 0 */
void NAME(relu_backward)(size n, const REAL *restrict g, const REAL *restrict z, REAL *restrict dx)
{
    SIMD for (size i = 0; i < n; i++)
        dx[i] = z[i] != 0 ? g[i] : 0;
}

/* --- rows of n elements ------------------------------------------------------------------------------------------- */

/* out = h*w + b, h = (x - mean)*rstd, rstd = 1/sqrt(mean (x - mean)^2 + eps); centered: 0 takes 0 for the mean.
 * x, out: (rows, n); w, b: (n,) or NULL; mean, rstd: (rows,) */
NARROW void NAME(layer_norm)(size rows, size n, const REAL *restrict x, const REAL *restrict w, const REAL *restrict b,
                             double eps, int centered, REAL *restrict out, REAL *restrict mean, REAL *restrict rstd)
{
    for (size row = 0; row < rows; row++, x += n, out += n) {
        REAL sums[LANES] = {0}, squares[LANES] = {0}, m = 0;
        if (centered) {
            EACH(n, sums[l] += x[i]);
            m = NAME(total)(sums) / n;
            mean[row] = m;
        }
        EACH(n, squares[l] += (x[i] - m) * (x[i] - m));
        const REAL r = (REAL)(1 / sqrt(NAME(total)(squares) / n + eps));
        rstd[row] = r;
        if (w && b)
            SIMD for (size i = 0; i < n; i++) out[i] = (x[i] - m) * r * w[i] + b[i];
        else
            SIMD for (size i = 0; i < n; i++) out[i] = (x[i] - m) * r * (w ? w[i] : 1) + (b ? b[i] : 0);
    }
}

/* dx = rstd*(g*w - mean(g*w) - h*mean(g*w*h)), without the first mean unless centered; dw, db += sum g*h, sum g */
NARROW void NAME(layer_norm_backward)(size rows, size n, const REAL *restrict g, const REAL *restrict x,
                                      const REAL *restrict w, const REAL *restrict mean, const REAL *restrict rstd,
                                      int centered, REAL *restrict dx, REAL *restrict dw, REAL *restrict db)
{
    for (size row = 0; row < rows; row++, x += n, g += n) {
        const REAL m = centered ? mean[row] : 0, r = rstd[row];
        if (dx) {
            REAL along[LANES] = {0}, across[LANES] = {0};
            if (w)
                EACH(n, along[l] += g[i] * w[i]; across[l] += g[i] * w[i] * (x[i] - m))
            else
                EACH(n, along[l] += g[i]; across[l] += g[i] * (x[i] - m))
            const REAL a = centered ? NAME(total)(along) / n : 0, c = NAME(total)(across) * r * r / n;
            if (w)
                SIMD for (size i = 0; i < n; i++) dx[i] = r * (g[i] * w[i] - a - (x[i] - m) * c);
            else
                SIMD for (size i = 0; i < n; i++) dx[i] = r * (g[i] - a - (x[i] - m) * c);
            dx += n;
        }
        if (dw)
            SIMD for (size i = 0; i < n; i++) dw[i] += g[i] * ((x[i] - m) * r);
        if (db)
            SIMD for (size i = 0; i < n; i++) db[i] += g[i];
    }
}

/* out = e^x / sum e^x, or its logarithm. x, out: (rows, n) */
void NAME(softmax)(size rows, size n, int logarithm, const REAL *restrict x, REAL *restrict out)
{
    for (size row = 0; row < rows; row++, x += n, out += n) {
        const REAL top = NAME(largest)(n, x), sum = NAME(exponentials)(n, x, top, out);
        if (logarithm) {
            const REAL log_sum = (REAL)log(sum);
            SIMD for (size i = 0; i < n; i++) out[i] = x[i] - top - log_sum;
        } else {
            const REAL scale = 1 / sum;
            SIMD for (size i = 0; i < n; i++) out[i] *= scale;
        }
    }
}

/* dx = z*(g - sum g*z), or of the logarithm g - e^z*sum g */
void NAME(softmax_backward)(size rows, size n, int logarithm, const REAL *restrict g, const REAL *restrict z,
                            REAL *restrict dx)
{
    for (size row = 0; row < rows; row++, g += n, z += n, dx += n) {
        REAL sums[LANES] = {0};
        if (logarithm) {
            EACH(n, sums[l] += g[i]);
            const REAL sum = NAME(total)(sums);
            SIMD for (size i = 0; i < n; i++) dx[i] = g[i] - EXP(z[i]) * sum;
        } else {
            EACH(n, sums[l] += g[i] * z[i]);
            const REAL sum = NAME(total)(sums);
            SIMD for (size i = 0; i < n; i++) dx[i] = z[i] * (g[i] - sum);
        }
    }
}

static inline double NAME(mass)(size n, const REAL *w)
{
    double mass = w ? 0 : n;
    for (size i = 0; w && i < n; i++)
        mass += w[i];
    return mass;
}

/* The loss of row r: w_t*(1 - s)*(l - x_t) + s/n*sum_c w_c*(l - x_c), l = log sum_c e^x_c, t its target; 0 unless keep[r].
 * x: (rows, n); target, keep: (rows,), keep NULL for all; w: (n,), NULL for ones; each: (rows,), the losses, or NULL;
 * top, sum: (rows,), max x and sum e^(x - top), for backward; out: the losses' mean or sum, and the gradients' factor */
void NAME(cross_entropy)(size rows, size n, const REAL *restrict x, const int64_t *restrict target,
                         const uint8_t *restrict keep, const REAL *restrict w, double s, int mean, REAL *restrict top,
                         REAL *restrict sum, double *restrict each, double *restrict out)
{
    double losses = 0, weights = 0;
    const double mass = NAME(mass)(n, s ? w : NULL);
    for (size row = 0; row < rows; row++, x += n) {
        const REAL most = NAME(largest)(n, x);
        REAL sums[LANES] = {0};
        EACH(n, sums[l] += EXP(x[i] - most));
        top[row] = most;
        sum[row] = NAME(total)(sums);
        double loss = 0;
        if (!keep || keep[row]) {
            const double log_sum = log(sum[row]) + most, weight = w ? w[target[row]] : 1;
            loss = (log_sum - x[target[row]]) * weight * (1 - s);
            if (s) {
                REAL even[LANES] = {0};
                EACH(n, even[l] += x[i] * (w ? w[i] : 1));
                loss += (log_sum * mass - NAME(total)(even)) * s / n;
            }
            weights += weight;
        }
        losses += loss;
        if (each)
            each[row] = loss;
    }
    out[0] = mean ? losses / weights : losses;
    out[1] = mean ? 1 / weights : 1;
}

/* dx_c = g*((w_t*(1 - s) + s/n*sum w)*e^(x_c - top)/sum - w_t*(1 - s)*[c = t] - s/n*w_c), 0 unless keep[r];
 * g: (rows,), times factor; NULL for ones */
void NAME(cross_entropy_backward)(size rows, size n, const REAL *restrict x, const int64_t *restrict target,
                                  const uint8_t *restrict keep, const REAL *restrict w, double s,
                                  const REAL *restrict top, const REAL *restrict sum, const REAL *restrict g,
                                  double factor, REAL *restrict dx)
{
    const double mass = NAME(mass)(n, s ? w : NULL);
    for (size row = 0; row < rows; row++, x += n, dx += n) {
        if (keep && !keep[row]) {
            memset(dx, 0, n * sizeof(REAL));
            continue;
        }
        const double scale = (g ? g[row] : 1) * factor, at_target = scale * (w ? w[target[row]] : 1) * (1 - s);
        const REAL f = (REAL)((at_target + scale * s / n * mass) / sum[row]), even = (REAL)(scale * s / n);
        const REAL most = top[row];
        SIMD for (size i = 0; i < n; i++) dx[i] = EXP(x[i] - most) * f;
        if (s)
            SIMD for (size i = 0; i < n; i++) dx[i] -= even * (w ? w[i] : 1);
        dx[target[row]] -= (REAL)at_target;
    }
}

/* out[where[i]] += g[i]. g: (rows, n) */
void NAME(add_rows)(size rows, size n, const int64_t *restrict where, const REAL *restrict g, REAL *restrict out)
{
    for (size row = 0; row < rows; row++, g += n) {
        REAL *restrict to = out + where[row] * n;
        SIMD for (size i = 0; i < n; i++) to[i] += g[i];
    }
}

/* --- channels: rows of n elements, of which several are normalized together -------------------------------------- */

/* first = sum x, second = sum x*(y - shift), or sum (x - shift)^2 where y is NULL. first, second, shift: (rows,) */
NARROW void NAME(channel_sums)(size rows, size n, const REAL *restrict x, const REAL *restrict y,
                               const REAL *restrict shift, REAL *restrict first, REAL *restrict second)
{
    for (size row = 0; row < rows; row++, x += n) {
        const REAL m = shift ? shift[row] : 0;
        REAL sums[LANES] = {0}, products[LANES] = {0};
        EACH(n, sums[l] += x[i]);
        if (y) {
            EACH(n, products[l] += x[i] * (y[i] - m));
            y += n;
        } else
            EACH(n, products[l] += (x[i] - m) * (x[i] - m))
        first[row] = NAME(total)(sums);
        second[row] = NAME(total)(products);
    }
}

/* out = x*a + c, or x*a + y*s + c. a, c, s: (rows,) */
NARROW void NAME(channel_lines)(size rows, size n, const REAL *restrict x, const REAL *restrict a,
                                const REAL *restrict c, const REAL *restrict y, const REAL *restrict s,
                                REAL *restrict out)
{
    for (size row = 0; row < rows; row++, x += n, out += n) {
        const REAL factor = a[row], summand = c[row];
        if (y) {
            const REAL other = s[row];
            SIMD for (size i = 0; i < n; i++) out[i] = x[i] * factor + y[i] * other + summand;
            y += n;
        } else
            SIMD for (size i = 0; i < n; i++) out[i] = x[i] * factor + summand;
    }
}

/* --- updates ------------------------------------------------------------------------------------------------------ */

#define BLOCK (2048 / (size)sizeof(REAL)) /* elements that all passes work on before the next: they stay in L1 */

#define LOOP(first, second, ...)                                                                                       \
    SIMD for (size i = 0; i < n; i++) {                                                                                \
        const REAL x = first, y = second; (void)y;                                                                     \
        out[i] = __VA_ARGS__;                                                                                          \
    }
/* A loop for each kind of operands: with the choice inside of one, compilers make no vectors. */
#define BINARY(...)                                                                                                    \
    if (pass->a < 0) LOOP(scalar_a, b[i], __VA_ARGS__)                                                                 \
    else if (pass->b < 0) LOOP(a[i], scalar_b, __VA_ARGS__)                                                            \
    else LOOP(a[i], b[i], __VA_ARGS__)

/* Runs the passes over `rows` rows of `arrays` vectors of sizes[row] elements, each rounded by itself.
 * scalars: those of the formula; at: (rows, arrays), where the vectors are */
NARROW void NAME(run_program)(size count, const formula_pass *passes, const REAL *scalars, size rows, size arrays,
                              const int64_t *sizes, REAL *const *at)
{
    REAL scratch[REGISTERS][BLOCK], *registers[REGISTERS];
    for (size row = 0; row < rows; row++, at += arrays)
        for (size start = 0; start < sizes[row]; start += BLOCK) {
            const size n = sizes[row] - start < BLOCK ? sizes[row] - start : BLOCK;
            for (size k = 0; k < REGISTERS; k++) registers[k] = k < arrays ? at[k] + start : scratch[k];
            for (const formula_pass *pass = passes; pass < passes + count; pass++) {
                REAL *out = registers[pass->out], *a = pass->a < 0 ? NULL : registers[pass->a];
                REAL *b = pass->b < 0 ? NULL : registers[pass->b];
                const REAL scalar_a = pass->a < 0 ? scalars[-1 - pass->a] : 0;
                const REAL scalar_b = pass->b < 0 ? scalars[-1 - pass->b] : 0;
                switch (pass->function) {
                case ADD: BINARY(x + y) break;
                case SUBTRACT: BINARY(x - y) break;
                case MULTIPLY: BINARY(x * y) break;
                case DIVIDE: BINARY(x / y) break;
                case MAXIMUM: BINARY(x > y || x != x ? x : y) break;
                case SQRT: LOOP(a[i], 0, sizeof(REAL) == sizeof(float) ? sqrtf((float)x) : (REAL)sqrt(x)) break;
                case SIGN: LOOP(a[i], 0, x > 0 ? 1 : x < 0 ? -1 : x == 0 ? 0 : x) break;
                case NEGATIVE: LOOP(a[i], 0, -x) break;
                }
            }
        }
}

/* --- attention ---------------------------------------------------------------------------------------------------- */

#define MR 8                            /* rows of a block of the product: its sums stay in registers */
#define NR (VECTOR / (int)sizeof(REAL)) /* columns: one vector */

typedef REAL NAME(line) __attribute__((vector_size(VECTOR), aligned(sizeof(REAL)), may_alias));

/* `rows` rows (a constant) and one vector of columns of the product. */
INLINE void NAME(block)(int rows, size depth, const REAL *a, size a_row, size a_column, const REAL *b, size b_row,
                        REAL *c, size c_row, int add)
{
    NAME(line) sums[MR];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
        sums[r] = add ? *(NAME(line) *)(c + r * c_row) : (NAME(line)){0};
    for (size t = 0; t < depth; t++) {
        const NAME(line) line = *(const NAME(line) *)(b + t * b_row);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
            sums[r] += a[r * a_row + t * a_column] * line;
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
        *(NAME(line) *)(c + r * c_row) = sums[r];
}

/* c = a @ b, or c += a @ b. a: (rows, depth) at any strides, b: (depth, columns), c: (rows, columns) */
static void NAME(product)(size rows, size columns, size depth, const REAL *restrict a, size a_row, size a_column,
                          const REAL *restrict b, size b_row, REAL *restrict c, size c_row, int add)
{
    size j = 0;
    for (; j + NR <= columns; j += NR) {
        size i = 0;
        for (; i + MR <= rows; i += MR)
            NAME(block)(MR, depth, a + i * a_row, a_row, a_column, b + j, b_row, c + i * c_row + j, c_row, add);
        for (; i < rows; i++)
            NAME(block)(1, depth, a + i * a_row, a_row, a_column, b + j, b_row, c + i * c_row + j, c_row, add);
    }
    for (; j < columns; j++)
        for (size i = 0; i < rows; i++) {
            REAL sum = add ? c[i * c_row + j] : 0;
            for (size t = 0; t < depth; t++)
                sum += a[i * a_row + t * a_column] * b[t * b_row + j];
            c[i * c_row + j] = sum;
        }
}

static void NAME(transpose)(size rows, size columns, const REAL *restrict x, size x_row, REAL scale, REAL *restrict out,
                            size out_row)
{
    for (size j = 0; j < columns; j++) {
        for (size i = 0; i < rows; i++)
            out[j * out_row + i] = x[i * x_row + j] * scale;
        for (size i = rows; i < out_row; i++)
            out[j * out_row + i] = 0;
    }
}

/* Masks n scores of a query. */
static inline void NAME(hide)(const attention_shape *s, const void *mask, size at, size n, REAL *score)
{
    if (s->masked == 1)
        for (size j = 0; j < n; j++)
            score[j] = ((const uint8_t *)mask)[at + j * s->column] ? score[j] : -INFINITY;
    else if (s->masked)
        for (size j = 0; j < n; j++)
            score[j] += ((const REAL *)mask)[at + j * s->column];
}

/* z = softmax(scale*q@k^T + mask)@v, sums = log sum e^score; 0 for a query that sees no key. sums: (heads, length);
 * scratch: (depth + QUERIES)*(keys rounded up to whole vectors) */
void NAME(attention)(const attention_shape *s, const REAL *q, const REAL *k, const REAL *v, const void *mask, REAL *z,
                     REAL *sums, REAL *scratch)
{
    const size pad = (s->keys + NR - 1) / NR * NR;
    REAL *const k_t = scratch, *const scores = scratch + s->depth * pad;
    for (size head = 0; head < s->heads; head++, sums += s->length) {
        const int64_t *at = s->at + ARRAYS * head, *row = s->row;
        NAME(transpose)(s->keys, s->depth, k + at[K], row[K], (REAL)s->scale, k_t, pad);
        for (size start = 0; start < s->length; start += QUERIES) {
            const size rows = s->length - start < QUERIES ? s->length - start : QUERIES;
            const size seen = s->causal && start + rows < s->keys ? start + rows : s->keys;
            const REAL *q_block = q + at[Q] + start * row[Q];
            REAL *z_block = z + at[Z] + start * row[Z], scales[QUERIES];
            NAME(product)(rows, (seen + NR - 1) / NR * NR, s->depth, q_block, row[Q], 1, k_t, pad, scores, pad, 0);
            for (size i = 0; i < rows; i++) {
                REAL *score = scores + i * pad;
                const size n = s->causal && start + i + 1 < seen ? start + i + 1 : seen;
                NAME(hide)(s, mask, at[MASK] + (start + i) * row[MASK], n, score);
                const REAL most = NAME(largest)(n, score), top = most == -INFINITY ? 0 : most;
                const REAL added = NAME(exponentials)(n, score, top, score), sum = added == 0 ? 1 : added;
                for (size j = n; j < seen; j++) score[j] = 0;
                sums[start + i] = top + (REAL)log(sum);
                scales[i] = 1 / sum;
            }
            NAME(product)(rows, s->width, seen, scores, pad, 1, v + at[V], row[V], z_block, row[Z], 0);
            for (size i = 0; i < rows; i++)
                SIMD for (size j = 0; j < s->width; j++) z_block[i * row[Z] + j] *= scales[i];
        }
    }
}

/* P = softmax(scale*q@k^T + mask);  dv = P^T@g, dP = g@v^T, dS = P*(dP - sum g*z), dq = scale*dS@k, dk = scale*dS^T@q.
 * scratch: (depth + width + 2*QUERIES)*(keys rounded up to whole vectors) */
void NAME(attention_backward)(const attention_shape *s, const REAL *q, const REAL *k, const REAL *v,
                              const void *mask, const REAL *z, const REAL *g, const REAL *sums, REAL *dq, REAL *dk,
                              REAL *dv, REAL *scratch)
{
    const size pad = (s->keys + NR - 1) / NR * NR;
    REAL *const k_t = scratch, *const v_t = k_t + s->depth * pad, *const p = v_t + s->width * pad;
    REAL *const ds = p + QUERIES * pad;
    for (size head = 0; head < s->heads; head++, sums += s->length) {
        const int64_t *at = s->at + ARRAYS * head, *row = s->row;
        NAME(transpose)(s->keys, s->depth, k + at[K], row[K], (REAL)s->scale, k_t, pad);
        NAME(transpose)(s->keys, s->width, v + at[V], row[V], 1, v_t, pad);
        for (size i = 0; i < s->keys; i++) {
            memset(dk + at[DK] + i * row[DK], 0, s->depth * sizeof(REAL));
            memset(dv + at[DV] + i * row[DV], 0, s->width * sizeof(REAL));
        }
        for (size start = 0; start < s->length; start += QUERIES) {
            const size rows = s->length - start < QUERIES ? s->length - start : QUERIES;
            const size seen = s->causal && start + rows < s->keys ? start + rows : s->keys;
            const size wide = (seen + NR - 1) / NR * NR;
            const REAL *q_block = q + at[Q] + start * row[Q], *g_block = g + at[G] + start * row[G];
            NAME(product)(rows, wide, s->depth, q_block, row[Q], 1, k_t, pad, p, pad, 0);
            NAME(product)(rows, wide, s->width, g_block, row[G], 1, v_t, pad, ds, pad, 0);
            for (size r = 0; r < rows; r++) {
                const size n = s->causal && start + r + 1 < seen ? start + r + 1 : seen;
                const REAL *g_row = g_block + r * row[G], *z_row = z + at[Z] + (start + r) * row[Z];
                REAL dots[LANES] = {0}, *p_row = p + r * pad, *ds_row = ds + r * pad;
                EACH(s->width, dots[l] += g_row[i] * z_row[i]);
                const REAL less = NAME(total)(dots), sum = sums[start + r], scale = (REAL)s->scale;
                NAME(hide)(s, mask, at[MASK] + (start + r) * row[MASK], n, p_row);
                SIMD for (size j = 0; j < n; j++) {
                    p_row[j] = EXP(p_row[j] - sum);
                    ds_row[j] = p_row[j] * (ds_row[j] - less) * scale;
                }
                for (size j = n; j < seen; j++) p_row[j] = ds_row[j] = 0;
            }
            NAME(product)(rows, s->depth, seen, ds, pad, 1, k + at[K], row[K], dq + at[DQ] + start * row[DQ], row[DQ], 0);
            NAME(product)(seen, s->depth, rows, ds, 1, pad, q_block, row[Q], dk + at[DK], row[DK], 1);
            NAME(product)(seen, s->width, rows, p, 1, pad, g_block, row[G], dv + at[DV], row[DV], 1);
        }
    }
}

/* --- windows over images ------------------------------------------------------------------------------------------ */

/* columns = what each element of the window sees of x from lines `first` to `last` of positions, 0 beyond it; or, back,
 * x += columns. x: (n, channels, H, W); columns: (channels, KH, KW, n, last - first, OW) */
NARROW void NAME(im2col)(const window *s, size n, size channels, size first, size last, int back, REAL *restrict x,
                         REAL *restrict columns)
{
    const size h = s->image[0], w = s->image[1], ow = s->out[1], step = s->stride[1];
    for (size c = 0; c < channels; c++)
        for (size i = 0, down = -s->padding[0]; i < s->kernel[0]; i++, down += s->dilation[0])
            for (size j = 0, right = -s->padding[1]; j < s->kernel[1]; j++, right += s->dilation[1]) {
                size start = 0, stop = ow;
                clip(w, step, right, &start, &stop);
                for (size image = 0; image < n; image++)
                    for (size line = first; line < last; line++, columns += ow) {
                        const size row = line * s->stride[0] + down, m = row >= 0 && row < h ? stop - start : 0;
                        const size from = m ? ((image * channels + c) * h + row) * w + start * step + right : 0;
                        REAL *seen = x + from, *to = columns + start;
                        if (back)
                            SIMD for (size q = 0; q < m; q++) seen[q * step] += to[q];
                        else {
                            if (m < ow)
                                memset(columns, 0, ow * sizeof(REAL));
                            SIMD for (size q = 0; q < m; q++) to[q] = seen[q * step];
                        }
                    }
            }
}

/* top = max(top, x[0], x[step], ...), at = where it is, counted from `first`; without branches, which nothing predicts */
NARROW INLINE void NAME(keep_larger)(size n, size step, const REAL *restrict x, int32_t first, REAL *restrict top,
                                     int32_t *restrict at)
{
    SIMD for (size q = 0; q < n; q++) {
        const REAL v = x[q * step], t = top[q], larger = v > t ? v : t;
        const int32_t better = -((v > t) | (v != v) | (at[q] < 0));
        top[q] = v != v ? v : larger;
        at[q] ^= (at[q] ^ (first + (int32_t)(q * step))) & better;
    }
}

/* top = max of x under the window, at = where in H*W it lies: of equals the first, the last nan; -1 if it sees nothing.
 * x: (planes, H, W); top, at: (planes, OH, OW) */
NARROW void NAME(max_pool)(const window *s, size planes, const REAL *restrict x, REAL *restrict top,
                           int32_t *restrict at)
{
    const size h = s->image[0], w = s->image[1], ow = s->out[1], step = s->stride[1];
    for (; planes > 0; planes--, x += h * w)
        for (size line = 0; line < s->out[0]; line++, top += ow, at += ow) {
            for (size q = 0; q < ow; q++)
                top[q] = -INFINITY, at[q] = -1;
            for (size i = 0, row = line * s->stride[0] - s->padding[0]; i < s->kernel[0]; i++, row += s->dilation[0])
                for (size j = 0, right = -s->padding[1]; j < s->kernel[1]; j++, right += s->dilation[1]) {
                    size start = 0, stop = row >= 0 && row < h ? ow : 0;
                    clip(w, step, right, &start, &stop);
                    const size first = row * w + start * step + right;
                    if (step == 2) /* a constant: the compiler shuffles, where it would gather */
                        NAME(keep_larger)(stop - start, 2, x + first, (int32_t)first, top + start, at + start);
                    else
                        NAME(keep_larger)(stop - start, step, x + first, (int32_t)first, top + start, at + start);
                }
        }
}

/* dx[at] += g. g, at: (planes, n); dx: (planes, m) */
void NAME(max_pool_backward)(size planes, size n, size m, const REAL *restrict g, const int32_t *restrict at,
                             REAL *restrict dx)
{
    for (size plane = 0; plane < planes; plane++, g += n, at += n, dx += m)
        for (size i = 0; i < n; i++)
            if (at[i] >= 0)
                dx[at[i]] += g[i];
}

#endif
