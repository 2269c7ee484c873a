/* The steps of an LSTM of floats, and their gradients. A part of kernels.c.
 *
 * gates: (steps, batch, 4*n), in the order i, f, u, o; hs, cs: (steps + 1, batch, n), the states, of which the caller sets
 * the first. Steps of gates are `stride` floats apart. n is a multiple of WIDE. Weights (rows, columns) are stored in blocks:
 * (columns/WIDE, rows, WIDE).
 */

#define SIGMOID(x) (1 / (1 + exp_f32(-(x))))

/* tanh x to 3 ulp: by an odd polynomial where 1 - 2/(e^2x + 1) would cancel. */
static inline float tanh_f32(float x)
{
    const float y = x * x, far = 1 - 2 / (1 + exp_f32(2 * x));
    const float p = ((2.06390709e-2f - 5.70496772e-3f * y) * y - 5.37397104e-2f) * y + 1.33314422e-1f;
    return y < 0.390625f ? x + x * (y * (p * y - 3.33332819e-1f)) : far;
}

/* Computes hs[1:] and cs[1:]. gates: on entry w_ih@x + b of each step, on return the activations; w: (n, 4*n) */
void lstm_f32(size steps, size batch, size n, size stride, const float *w, float *gates, float *cs, float *hs)
{
    for (size t = 0; t < steps; t++, gates += stride, hs += batch * n, cs += batch * n)
        PARALLEL(batch * n * n)
        for (size k = 0; k < n; k += WIDE) {
            for (size column = k; column < 4 * n; column += n)
                multiply(batch, n, hs, n, 1, w + column * n, WIDE, gates + column, 4 * n, 1);
            for (size row = 0; row < batch; row++) {
                float *restrict a = gates + row * 4 * n + k, *restrict c = cs + row * n + k, *restrict h = hs + row * n + k;
                SIMD for (size q = 0; q < WIDE; q++) {
                    const float i = SIGMOID(a[q]), f = SIGMOID(a[q + n]), u = tanh_f32(a[q + 2 * n]);
                    const float o = SIGMOID(a[q + 3 * n]), next = f * c[q] + i * u;
                    a[q] = i, a[q + n] = f, a[q + 2 * n] = u, a[q + 3 * n] = o;
                    c[q + batch * n] = next;
                    h[q + batch * n] = o * tanh_f32(next);
                }
            }
        }
}

/* Computes das, the gradients before the activations, laid out as gates. step_gradients: of hs[1:], (steps, batch, n), with
 * steps stride/4 floats apart. dhs, dcs: on entry the gradients of the last states, on return those of the first states.
 * w: (4*n, n) */
void lstm_backward_f32(size steps, size batch, size n, size stride, const float *w, const float *gates,
                       const float *cs, const float *step_gradients, float *das, float *dhs, float *dcs)
{
    for (size t = steps - 1; t >= 0; t--) {
        PARALLEL(batch * n * n)
        for (size row = 0; row < batch; row++) {
            const float *restrict a = gates + t * stride + row * 4 * n, *restrict c = cs + (t * batch + row) * n;
            const float *restrict g = step_gradients + t * stride / 4 + row * n;
            float *restrict da = das + t * stride + row * 4 * n, *restrict dh = dhs + row * n, *restrict dc = dcs + row * n;
            SIMD for (size q = 0; q < n; q++) {
                const float i = a[q], f = a[q + n], u = a[q + 2 * n], o = a[q + 3 * n], z = tanh_f32(c[q + batch * n]);
                const float dm = dh[q] + g[q], d = dc[q] + dm * o * (1 - z * z);
                da[q] = d * u * i * (1 - i);
                da[q + n] = d * c[q] * f * (1 - f);
                da[q + 2 * n] = d * i * (1 - u * u);
                da[q + 3 * n] = dm * z * o * (1 - o);
                dc[q] = d * f;
            }
        }
        PARALLEL(batch * n * n)
        for (size k = 0; k < n; k += WIDE)
            multiply(batch, 4 * n, das + t * stride, 4 * n, 1, w + 4 * n * k, WIDE, dhs + k, n, 0);
    }
}
