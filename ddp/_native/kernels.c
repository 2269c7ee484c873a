/* Fused kernels for the CPU. They pass over memory once or a few times, where NumPy would need many passes.
 *
 * The half of this file below the dividing line is compiled twice, for float and for double; NAME(f) is f_f32 or f_f64.
 * The order in which a sum is added up depends neither on the number of threads nor on the width of vectors: the sum of a
 * row, for instance, has LANES partial sums. Compilers may fuse products with sums, except in `adam`. So all builds by one
 * compiler for an architecture give the same bits. No -ffast-math: results may be infinite or nan.
 */
#ifndef REAL
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define LANES 32
#define VECTOR __BIGGEST_ALIGNMENT__ /* bytes of a register */
#define SIMD _Pragma("omp simd")
#define PRAGMA(...) _Pragma(#__VA_ARGS__)
/* Before a for loop: ON_THREADS runs its iterations on `count` threads, PARALLEL on as many as suit `work` (see
 * count_threads). Such loops never nest. */
#ifdef __clang__ /* clang compiles the pragma into calls of functions that threads.c does not have */
#define ON_THREADS(count, ...)
#define UNFUSED _Pragma("clang fp contract(off)")
#else
#define UNFUSED /* for GCC, `adam` has an attribute instead */
#define ON_THREADS(count, ...) PRAGMA(omp parallel for num_threads(count) __VA_ARGS__)
#endif
#define PARALLEL(work, ...) ON_THREADS(count_threads(work), __VA_ARGS__)
#define CHUNK 4096 /* elements of one iteration: threads share the iterations of a loop */
#define PIECE 4096 /* elements whose moments are taken at a time: they stay in L1 */
/* Runs a statement for i = 0 to n - 1, on several threads and in vectors. */
#define PARALLEL_SIMD(n, ...)                                                                                          \
    PARALLEL(n) for (size start = 0; start < (n); start += CHUNK)                                                      \
    {                                                                                                                  \
        const size stop = (n) - start < CHUNK ? (n) : start + CHUNK;                                                   \
        SIMD for (size i = start; i < stop; i++) __VA_ARGS__                                                           \
    }
/* Writes `value` of each x to out; if g is not NULL, g times `slope` instead. Two loops, so that none has a branch inside. */
#define CURVE(setup, value, slope)                                                                                     \
    if (g) {                                                                                                           \
        PARALLEL_SIMD(n, { setup; out[i] = g[i] * (slope); })                                                          \
    } else {                                                                                                           \
        PARALLEL_SIMD(n, { setup; out[i] = value; })                                                                   \
    }
#define INLINE static inline __attribute__((always_inline))
#ifdef __x86_64__ /* NARROW: registers of 32 bytes, for loops that are short or wait for memory. 64 bytes slow them down. */
#define NARROW __attribute__((target("prefer-vector-width=256")))
#else
#define NARROW
#endif
#define JOIN(a, b) a##_##b
#define SUFFIX(a, b) JOIN(a, b)
#define NAME(f) SUFFIX(f, TAG)
typedef ptrdiff_t size;
static inline size least(size a, size b) { return a < b ? a : b; }
static inline size ratio_up(size a, size b) { return (a + b - 1) / b; }

#include "threads.c"

/* e^x to 1 ulp: x = k*log 2 + r, e^r by a polynomial, 2^k by its bits in two factors, so that no factor overflows
 * or underflows before the product does. Adding 1.5*2^23 (double: 1.5*2^52) leaves k in the low bits. */
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
    /* The arithmetic shift of 64 bits is slow before AVX-512. So an offset makes the integer positive, and is taken off after
     * the halving. */
    const uint64_t bits = k_bits.bits - (0x4338000000000000u - 2048), half = bits >> 1;
    const union { uint64_t bits; double value; } a = {(half - 1) << 52}, b = {(bits - half - 1) << 52};
    return p * a.value * b.value;
}

/* The probability that a normal variable exceeds y >= 0, divided by e^(-y^2/2). The relative error is below 4e-7. */
static inline float tail_f32(float y)
{
    float t = 1 / (1 + 0.35f * y);
    float p = -0.029158030f;
    p = ((p * t + 0.144031609f) * t - 0.255840399f) * t + 0.159321250f;
    p = ((p * t - 0.023213391f) * t + 0.105552926f) * t + 0.119821185f;
    p = (p * t + 0.139863529f) * t + 0.139621306f;
    return p * t;
}

/* z = x*c, c = P(normal variable <= x), e = e^(-x^2/2);  z' = c + x*e/sqrt(2*pi);  out = z, or g*z' where g is not NULL */
void gelu_f32(size n, const float *restrict x, const float *restrict g, float *restrict out)
{
    CURVE(const float e = exp_f32(-0.5f * (x[i] * x[i])); const float tail = e * tail_f32(x[i] < 0 ? -x[i] : x[i]);
          const float c = x[i] < 0 ? tail : 1 - tail, x[i] * c, c + x[i] * e * 0.39894228f)
}

/* A window that slides over images; pairs are (along H, along W). out: the number of positions */
typedef struct {
    int64_t image[2], kernel[2], stride[2], padding[2], dilation[2], out[2];
} window;

/* Narrows the positions from `start` to `stop` to those with 0 <= stride*position + offset < n. */
static inline void clip(size n, size stride, size offset, size *start, size *stop)
{
    while (*start < *stop && *start * stride + offset < 0) ++*start;
    while (*start < *stop && (*stop - 1) * stride + offset >= n) --*stop;
}

#include "convolution.c"
#include "depthwise.c"
#include "recurrent.c"

/* One pass of a formula. out, a, b: numbers of registers; a or b = -1 - i is scalar i. Functions of one operand ignore b. */
typedef struct {
    int32_t function, out, a, b;
} formula_pass;

enum { ADD, SUBTRACT, MULTIPLY, DIVIDE, MAXIMUM, SQRT, SIGN, NEGATIVE };
#define REGISTERS 16

/* Adam's formula, which `adam` computes in one loop. Registers 0 to 3 are p, grad, m and v. Its first scalar is number k. */
#define ADAM(k)                                                                                                        \
    {SUBTRACT, 4, 1, 2}, {MULTIPLY, 4, 4, -1 - (k)}, {ADD, 2, 2, 4}, {MULTIPLY, 3, 3, -2 - (k)}, {MULTIPLY, 4, 1, 1},  \
    {MULTIPLY, 4, 4, -3 - (k)}, {ADD, 3, 3, 4}, {SQRT, 4, 3, 3}, {ADD, 4, 4, -4 - (k)}, {DIVIDE, 4, 2, 4},             \
    {MULTIPLY, 4, 4, -5 - (k)}, {SUBTRACT, 0, 0, 4}
const formula_pass adam_passes[] = {ADAM(0)}, adamw_passes[] = {{MULTIPLY, 0, 0, -1}, ADAM(1)};
/* Whether `passes` equals a table. */
#define IS(table) (count == sizeof(table) / sizeof(*table) && !memcmp(passes, table, sizeof(table)))

#define REAL double
#define TAG f64
#include "kernels.c"
#undef REAL
#undef TAG
#define REAL float
#define TAG f32
#include "kernels.c"

#else /* ---------------------------------------------------------------------------------------- once for each REAL */

#define EXP NAME(exp)

/* Adds up the partial sums, and overwrites them. */
static inline REAL NAME(total)(REAL *sums)
{
    for (int half = LANES / 2; half; half /= 2)
        for (int l = 0; l < half; l++) sums[l] += sums[l + half];
    return sums[0];
}

/* Runs a statement for i = 0 to n - 1; l is the number of the partial sum that i belongs to. */
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

static inline REAL NAME(largest)(size n, const REAL *x)
{
    REAL top[LANES];
    for (int l = 0; l < LANES; l++) top[l] = -INFINITY;
    EACH(n, top[l] = x[i] > top[l] ? x[i] : top[l]);
    for (int l = 1; l < LANES; l++) top[0] = top[l] > top[0] ? top[l] : top[0];
    return top[0];
}

/* Writes e^(x - top) to e, which may be x, and returns the sum. */
static inline REAL NAME(exponentials)(size n, const REAL *x, REAL top, REAL *e)
{
    REAL sums[LANES] = {0};
    SIMD for (size i = 0; i < n; i++) e[i] = EXP(x[i] - top);
    EACH(n, sums[l] += e[i]);
    return NAME(total)(sums);
}

/* --- activations of n elements. out: z if g is NULL; else the gradient of x, where g is the gradient of z ---------- */

/* out = 1/(1 + e^-x) */
void NAME(sigmoid)(size n, const REAL *restrict x, REAL *restrict out)
{
    PARALLEL_SIMD(n, out[i] = 1 / (1 + EXP(-x[i]));)
}

/* z = x*s, s = 1/(1 + e), e = e^-x;  z' = s + z*(1 - s) */
void NAME(silu)(size n, const REAL *restrict x, const REAL *restrict g, REAL *restrict out)
{
    CURVE(const REAL e = EXP(-x[i]); const REAL s = 1 / (1 + e); const REAL z = x[i] * s, z,
          s + z * (1 - s))
}

/* z = x*s, s = 1/(1 + e), e = e^-2u, u = k*(x + c*x^3), k = sqrt(2/pi), c = 0.044715;  z' = s + 2*z*(1 - s)*u' */
void NAME(gelu_tanh)(size n, const REAL *restrict x, const REAL *restrict g, REAL *restrict out)
{
    const REAL k = (REAL)0.79788456080286535588, c = (REAL)(0.79788456080286535588 * 0.044715);
    CURVE(const REAL y = x[i] * x[i]; const REAL e = EXP(-2 * x[i] * (k + c * y)); const REAL s = 1 / (1 + e);
          const REAL z = x[i] * s, z, s + 2 * z * (s > 0 ? e * s : 1) * (k + 3 * c * y))
}

#define OF_EACH(function)                                                                                              \
    void NAME(function)(size n, const REAL *restrict x, REAL *restrict out)                                            \
    {                                                                                                                  \
        PARALLEL_SIMD(n, out[i] = (REAL)function(x[i]);)                                                               \
    }
OF_EACH(erf)
OF_EACH(erfc) /* 1 - erf x */

/* out = x clipped to [low, high]; there is no upper bound if high is nan */
void NAME(clamp)(size n, double low, double high, const REAL *restrict x, REAL *restrict out)
{
    const REAL a = (REAL)low, b = (REAL)high;
    PARALLEL_SIMD(n, out[i] = x[i] <= a ? a : x[i] >= b ? b : x[i];)
}

/* dx = g where low < z < high or z is nan, else 0; z: the result of clamp */
void NAME(clamp_backward)(size n, double low, double high, const REAL *restrict g, const REAL *restrict z,
                          REAL *restrict dx)
{
    const REAL a = (REAL)low, b = (REAL)high;
    PARALLEL_SIMD(n, dx[i] = z[i] <= a ? 0 : z[i] >= b ? 0 : g[i];)
}

/* dx = g where x > 0, else g*slope */
void NAME(leaky_relu_backward)(size n, double slope, const REAL *restrict g, const REAL *restrict x, REAL *restrict dx)
{
    PARALLEL_SIMD(n, dx[i] = g[i] * (x[i] > 0 ? 1 : (REAL)slope);)
}

/* --- rows of n elements ------------------------------------------------------------------------------------------- */

/* The mean of x - shift, or of its squares. The sums are in REAL or, if that overflows or underflows, in double.
 * x: `rows` rows of n elements, which begin `apart` elements apart */
NARROW INLINE double NAME(mean)(const int squares, size rows, size apart, size n, const REAL *restrict x, REAL shift)
{
    REAL sums[LANES] = {0};
    for (const REAL *row = x; row < x + rows * apart; row += apart)
        EACH(n, const REAL z = row[i] - shift; sums[l] += squares ? z * z : z);
    double mean = NAME(total)(sums) / (double)(rows * n);
    if (__builtin_expect(!isfinite(mean) || (squares && mean <= 1e-30), 0)) {
        double wide[LANES] = {0};
        for (const REAL *row = x; row < x + rows * apart; row += apart)
            EACH(n, const double z = (double)row[i] - shift; wide[l] += squares ? z * z : z);
        mean = total_f64(wide) / (double)(rows * n);
    }
    return mean;
}

/* The mean and the biased variance. The sums are of differences from the first element, and then from the mean. So both
 * results are exact if all elements are equal. */
NARROW INLINE double NAME(moments_of_piece)(size rows, size apart, size n, const REAL *restrict x, double *var)
{
    const double mean = x[0] + NAME(mean)(0, rows, apart, n, x, x[0]), rounding = mean - (REAL)mean;
    *var = NAME(mean)(1, rows, apart, n, x, (REAL)mean) - rounding * rounding;
    return mean;
}

/* Merges the moments of a piece into those of the `count` elements before it, by Chan, Golub and LeVeque 1983. */
NARROW INLINE void NAME(add_piece)(size rows, size apart, size n, const REAL *restrict x, size count, double *mean, double *var)
{
    const double part = (double)(rows * n) / (double)(count + rows * n);
    double square;
    const double step = NAME(moments_of_piece)(rows, apart, n, x, &square) - *mean;
    *mean += step * part;
    *var += (square - *var) * part + step * (1 - part) * (step * part);
}

/* out = h*w + b, h = (x - mean)*rstd, rstd = 1/sqrt(mean (x - mean)^2 + eps); centered: if it is 0, the mean counts as 0.
 * x, out: (rows, n); w, b: (n,) or NULL; mean, rstd: (rows,) */
NARROW void NAME(layer_norm)(size rows, size n, const REAL *xs, const REAL *restrict w, const REAL *restrict b,
                             double eps, int centered, REAL *outs, double *restrict mean, REAL *restrict rstd)
{
    PARALLEL(rows * n) for (size row = 0; row < rows; row++) {
        const REAL *restrict x = xs + row * n;
        REAL *restrict out = outs + row * n;
        double center = 0, var = 0;
        if (centered) {
            for (size start = 0; start < n; start += PIECE)
                NAME(add_piece)(1, n, least(PIECE, n - start), x + start, start, &center, &var);
            mean[row] = center;
        } else
            var = NAME(mean)(1, 1, n, n, x, 0);
        const REAL r = (REAL)(1 / sqrt(var + eps)), m = (REAL)center, rounding = centered ? (m - center) * r : 0;
        rstd[row] = r;
        SIMD for (size i = 0; i < n; i++) out[i] = ((x[i] - m) * r + rounding) * (w ? w[i] : 1) + (b ? b[i] : 0);
    }
}

/* dx = rstd*(g*w - mean(g*w) - h*mean(g*w*h)), with 0 for mean(g*w) if centered is 0; dw = sum of g*h over rows, db = sum of
 * g over rows. dws, dbs: (blocks, n), zeros at first: the sums over blocks of rows; row 0 becomes the sum over all rows */
NARROW void NAME(layer_norm_backward)(size rows, size n, const REAL *gs, const REAL *xs, const REAL *restrict w,
                                      const double *restrict mean, const REAL *restrict rstd, int centered, REAL *dxs,
                                      size blocks, REAL *dws, REAL *dbs)
{
    PARALLEL(rows * n) for (size block = 0; block < blocks; block++) {
        REAL *restrict dw = dws ? dws + block * n : NULL, *restrict db = dbs ? dbs + block * n : NULL;
        for (size row = rows * block / blocks; row < rows * (block + 1) / blocks; row++) {
            const REAL *restrict g = gs + row * n, *restrict x = xs + row * n;
            const REAL m = centered ? (REAL)mean[row] : 0, r = rstd[row];
            const REAL rounding = centered ? (REAL)((m - mean[row]) * r) : 0;
            if (dxs) {
                REAL along[LANES] = {0}, across[LANES] = {0}, *restrict dx = dxs + row * n;
                EACH(n, const REAL z = w ? g[i] * w[i] : g[i]; along[l] += z; across[l] += z * ((x[i] - m) * r))
                const REAL sum = centered ? NAME(total)(along) : 0, c = (NAME(total)(across) + rounding * sum) / n;
                const REAL a = sum / n + rounding * c;
                SIMD for (size i = 0; i < n; i++) dx[i] = r * ((w ? g[i] * w[i] : g[i]) - a - (x[i] - m) * r * c);
            }
            if (dw)
                SIMD for (size i = 0; i < n; i++) dw[i] += g[i] * ((x[i] - m) * r + rounding);
            if (db)
                SIMD for (size i = 0; i < n; i++) db[i] += g[i];
        }
    }
    for (size block = 1; block < blocks; block++)
        for (size i = 0; i < n; i++) {
            if (dws) dws[i] += dws[block * n + i];
            if (dbs) dbs[i] += dbs[block * n + i];
        }
}

/* out = e^x / sum e^x, or its logarithm. x, out: (rows, n) */
void NAME(softmax)(size rows, size n, int logarithm, const REAL *xs, REAL *outs)
{
    PARALLEL(rows * n) for (size row = 0; row < rows; row++) {
        const REAL *restrict x = xs + row * n;
        REAL *restrict out = outs + row * n;
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

/* dx = z*(g - sum g*z), or g - e^z*sum g for the logarithm */
void NAME(softmax_backward)(size rows, size n, int logarithm, const REAL *gs, const REAL *zs, REAL *dxs)
{
    PARALLEL(rows * n) for (size row = 0; row < rows; row++) {
        const REAL *restrict g = gs + row * n, *restrict z = zs + row * n;
        REAL sums[LANES] = {0}, *restrict dx = dxs + row * n;
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

/* The loss of row r: w_t*(1 - s)*(l - x_t) + s/n*sum_c w_c*(l - x_c), l = log sum_c e^x_c, t its target; 0 unless keep[r].
 * x: (rows, n); target, keep: (rows,), keep may be NULL; w: (n,), NULL for ones; mass: the sum of w; each: (rows,), the
 * losses; top, sum: (rows,), max x and sum e^(x - top), for backward; out: (2,), the mean or sum of the losses, and the factor
 * of the gradients in backward */
void NAME(cross_entropy)(size rows, size n, const REAL *xs, const int64_t *restrict target,
                         const uint8_t *restrict keep, const REAL *restrict w, double s, double mass, int mean,
                         REAL *restrict top, REAL *restrict sum, double *restrict each, double *restrict out)
{
    double losses = 0, weights = 0;
    /* firstprivate: so the compiler need not read these variables again after every store */
    PARALLEL(rows * n, firstprivate(n, xs, target, keep, w, s, top, sum, each, mass))
    for (size row = 0; row < rows; row++) {
        const REAL *restrict x = xs + row * n, most = NAME(largest)(n, x);
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
        }
        each[row] = loss;
    }
    for (size row = 0; row < rows; row++) {
        losses += each[row];
        if (!keep || keep[row])
            weights += w ? w[target[row]] : 1;
    }
    out[0] = mean ? losses / weights : losses;
    out[1] = mean ? 1 / weights : 1;
}

/* dx_c = g*((w_t*(1 - s) + s/n*sum w)*e^(x_c - top)/sum - w_t*(1 - s)*[c = t] - s/n*w_c), 0 unless keep[r];
 * g: (rows,), times factor; NULL for ones */
void NAME(cross_entropy_backward)(size rows, size n, const REAL *xs, const int64_t *restrict target,
                                  const uint8_t *restrict keep, const REAL *restrict w, double s, double mass,
                                  const REAL *restrict top, const REAL *restrict sum, const REAL *restrict g,
                                  double factor, REAL *dxs)
{
    PARALLEL(rows * n) for (size row = 0; row < rows; row++) {
        const REAL *restrict x = xs + row * n;
        REAL *restrict dx = dxs + row * n;
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

/* Row i belongs to channel i % channels. The index of its mean and rstd is i / members % statistics. */

/* The means and biased variances over the first and last axis. xs: (outer, statistics, n); mean, var: (statistics,), zeros
 * at first */
NARROW void NAME(channel_moments)(size outer, size statistics, size n, const REAL *xs, double *mean, double *var)
{
    const size rows = n < PIECE / 8 ? PIECE / n : 1; /* of a piece */
    const size many = least(16, ratio_up(statistics, count_threads(outer * statistics * n))); /* statistics of one task */
    PARALLEL(outer * statistics * n) for (size first = 0; first < statistics; first += many)
        for (size row = 0; row < outer; row += rows)
            for (size s = first; s < least(first + many, statistics); s++)
                for (size start = 0; start < n; start += PIECE)
                    NAME(add_piece)(least(rows, outer - row), statistics * n, least(PIECE, n - start),
                                    xs + (row * statistics + s) * n + start, row * n + start, mean + s, var + s);
}

/* out = (x - mean)*rstd*w + b. w, b: (channels,) or NULL; mean, rstd: (statistics,) */
NARROW void NAME(channel_norm)(size rows, size n, size channels, size members, size statistics, const REAL *xs,
                               const double *restrict mean, const double *restrict rstd, const REAL *restrict w,
                               const REAL *restrict b, REAL *outs)
{
    PARALLEL(rows * n) for (size row = 0; row < rows; row++) {
        const size s = row / members % statistics, c = row % channels;
        const REAL *restrict x = xs + row * n, m = (REAL)mean[s];
        const double scale = rstd[s] * (w ? w[c] : 1);
        const REAL factor = (REAL)scale, summand = (REAL)((m - mean[s]) * scale + (b ? b[c] : 0));
        REAL *restrict out = outs + row * n;
        SIMD for (size i = 0; i < n; i++) out[i] = (x[i] - m) * factor + summand;
    }
}

/* along = sum g, across = sum g*h, h = (x - mean)*rstd. along, across: (rows,); mean, rstd: (statistics,) */
NARROW void NAME(channel_sums)(size rows, size n, size members, size statistics, const REAL *gs, const REAL *xs,
                               const double *restrict mean, const double *restrict rstd, double *restrict along,
                               double *restrict across)
{
    PARALLEL(rows * n) for (size row = 0; row < rows; row++) {
        const size s = row / members % statistics;
        const REAL *restrict g = gs + row * n, *restrict x = xs + row * n, m = (REAL)mean[s], r = (REAL)rstd[s];
        REAL sums[LANES] = {0}, products[LANES] = {0};
        EACH(n, sums[l] += g[i]; products[l] += g[i] * ((x[i] - m) * r));
        along[row] = NAME(total)(sums);
        across[row] = NAME(total)(products) + (m - mean[s]) * rstd[s] * along[row];
    }
}

/* dx = rstd*(g*w - along - h*across), h = (x - mean)*rstd. w: (channels,) or NULL; mean, rstd, along, across:
 * (statistics,) */
NARROW void NAME(channel_gradient)(size rows, size n, size channels, size members, size statistics, const REAL *gs,
                                   const REAL *xs, const double *restrict mean, const double *restrict rstd,
                                   const REAL *restrict w, const double *restrict along,
                                   const double *restrict across, REAL *dxs)
{
    PARALLEL(rows * n) for (size row = 0; row < rows; row++) {
        const size s = row / members % statistics;
        const REAL *restrict g = gs + row * n, *restrict x = xs + row * n, m = (REAL)mean[s], r = (REAL)rstd[s];
        const REAL scale = (REAL)(rstd[s] * (w ? w[row % channels] : 1)), slope = (REAL)(-rstd[s] * across[s]);
        const REAL shift = (REAL)((m - mean[s]) * rstd[s] * slope - rstd[s] * along[s]);
        REAL *restrict dx = dxs + row * n;
        SIMD for (size i = 0; i < n; i++) dx[i] = g[i] * scale + (x[i] - m) * r * slope + shift;
    }
}

/* --- updates ------------------------------------------------------------------------------------------------------ */

#define BLOCK (2048 / (size)sizeof(REAL)) /* elements that all passes work on before the next elements: they stay in L1 */

#define ROOT(x) (sizeof(REAL) == sizeof(float) ? sqrtf((float)(x)) : (REAL)sqrt(x))
#define LOOP(first, second, ...)                                                                                       \
    SIMD for (size i = 0; i < n; i++) {                                                                                \
        const REAL x = first, y = second; (void)y;                                                                     \
        out[i] = __VA_ARGS__;                                                                                          \
    }
/* A loop for each kind of operands: compilers do not vectorize a loop that has this choice inside. */
#define BINARY(...)                                                                                                    \
    if (pass->a < 0) LOOP(scalar_a, b[i], __VA_ARGS__)                                                                 \
    else if (pass->b < 0) LOOP(a[i], scalar_b, __VA_ARGS__)                                                            \
    else LOOP(a[i], b[i], __VA_ARGS__)

/* Adam's passes over n elements in one loop; the result of each pass is rounded. decay: p's factor, s: other scalars */
__attribute__((optimize("fp-contract=off"))) NARROW static void NAME(adam)(size n, REAL decay, const REAL *s, REAL *p,
                                                                           const REAL *g, REAL *m, REAL *v)
{
    UNFUSED
    SIMD for (size i = 0; i < n; i++) {
        m[i] = m[i] + (g[i] - m[i]) * s[0];
        v[i] = v[i] * s[1] + g[i] * g[i] * s[2];
        p[i] = p[i] * decay - m[i] / (ROOT(v[i]) + s[3]) * s[4];
    }
}

/* Runs the passes over `rows` rows of `arrays` vectors of sizes[row] elements; the result of each pass is rounded.
 * scalars: of the formula; at: (rows, arrays), the addresses of the vectors */
NARROW void NAME(run_program)(size count, const formula_pass *passes, const REAL *scalars, size rows, size arrays,
                              const int64_t *sizes, REAL *const *at)
{
    const int first = IS(adam_passes) ? 0 : IS(adamw_passes) ? 1 : -1; /* Adam's first scalar; -1: another formula */
    for (size row = 0; row < rows; row++, at += arrays)
        PARALLEL(sizes[row]) for (size start = 0; start < sizes[row]; start += BLOCK) {
            REAL scratch[REGISTERS][BLOCK], *registers[REGISTERS];
            const size n = sizes[row] - start < BLOCK ? sizes[row] - start : BLOCK;
            if (first >= 0) {
                NAME(adam)(n, first ? scalars[0] : 1, scalars + first, at[0] + start, at[1] + start, at[2] + start, at[3] + start);
                continue;
            }
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
                case SQRT: LOOP(a[i], 0, ROOT(x)) break;
                case SIGN: LOOP(a[i], 0, x > 0 ? 1 : x < 0 ? -1 : x == 0 ? 0 : x) break;
                case NEGATIVE: LOOP(a[i], 0, -x) break;
                }
            }
        }
}

/* --- windows over images ------------------------------------------------------------------------------------------ */

/* Copies to `columns` the element of x that each element of the window covers, at every position in lines `first` to
 * `last` - 1 of the output; 0 outside x. If `back`, adds `columns` to these elements of x instead.
 * x: (n, channels, H, W); columns: (channels, KH, KW, n, last - first, OW) */
NARROW void NAME(im2col)(const window *s, size n, size channels, size first, size last, int back, REAL *x,
                         REAL *all_columns)
{
    const size h = s->image[0], w = s->image[1], ow = s->out[1], step = s->stride[1];
    const size each = s->kernel[0] * s->kernel[1] * n * (last - first) * ow;
    PARALLEL(channels * each) for (size c = 0; c < channels; c++) {
        REAL *columns = all_columns + c * each;
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
}

/* top = max of x under the window; at = its index in H*W, or -1 if the window covers no element of x. Of equal maxima, at is
 * the first; of several nan, the last.
 * x: (planes, H, W); top, at: (planes, OH, OW) */
NARROW void NAME(max_pool)(const window *s, size planes, const REAL *xs, REAL *tops, int32_t *ats)
{
    const size h = s->image[0], w = s->image[1], lines = s->out[0], ow = s->out[1], step = s->stride[1];
    PARALLEL(planes * h * w) for (size plane = 0; plane < planes; plane++)
        for (size line = 0; line < lines; line++) {
            const REAL *restrict x = xs + plane * h * w;
            REAL *restrict top = tops + (plane * lines + line) * ow;
            int32_t *restrict at = ats + (plane * lines + line) * ow;
            for (size q = 0; q < ow; q++)
                top[q] = -INFINITY, at[q] = -1;
            for (size i = 0, row = line * s->stride[0] - s->padding[0]; i < s->kernel[0]; i++, row += s->dilation[0])
                for (size j = 0, right = -s->padding[1]; j < s->kernel[1]; j++, right += s->dilation[1]) {
                    size start = 0, stop = row >= 0 && row < h ? ow : 0;
                    clip(w, step, right, &start, &stop);
                    SIMD for (size q = start; q < stop; q++) { /* without branches, which cannot be predicted */
                        const REAL v = x[row * w + q * step + right], t = top[q], larger = v > t ? v : t;
                        const int32_t better = -((v > t) | (v != v) | (at[q] < 0));
                        top[q] = v != v ? v : larger;
                        at[q] ^= (at[q] ^ (int32_t)(row * w + q * step + right)) & better;
                    }
                }
        }
}

/* dx[at] += g. g, at: (planes, n); dx: (planes, m) */
void NAME(max_pool_backward)(size planes, size n, size m, const REAL *restrict g, const int32_t *restrict at,
                             REAL *restrict dx)
{
    PARALLEL(planes * m) for (size plane = 0; plane < planes; plane++)
        for (size i = plane * n; i < (plane + 1) * n; i++)
            if (at[i] >= 0)
                dx[plane * m + at[i]] += g[i];
}

#include "attention.c"

#endif
