/* Attention in blocks of QUERIES queries, so that no array of all (length, keys) scores is needed.
 *
 * A part of kernels.c, compiled for float and for double.
 */
#ifndef QUERIES
#define QUERIES 64 /* queries that attention works on at a time */

/* Shapes for each head: q (length, depth), k (keys, depth), v (keys, width), z and g (length, width), mask (length, keys).
 * dq, dk and dv have the shapes of q, k and v. Rows of array i are row[i] elements apart, and its head h begins at at[h][i].
 * The elements of a row are adjacent; those of the mask are `column` apart. masked: 0 for no mask, 1 for a mask of bool, 2
 * for a mask of numbers that are added to the scores */
enum { Q, K, V, Z, G, DQ, DK, DV, MASK, ARRAYS };

typedef struct {
    int64_t heads, length, keys, depth, width, causal, masked, column;
    int64_t row[ARRAYS];
    const int64_t *at; /* (heads, ARRAYS) */
    double scale;
} attention_shape;
#endif

#define MR 8                            /* rows of a block of the product: its sums stay in registers */
#define NR (VECTOR / (int)sizeof(REAL)) /* columns of the block: one vector */

typedef REAL NAME(line) __attribute__((vector_size(VECTOR), aligned(sizeof(REAL)), may_alias));

/* Computes `rows` rows (a constant) and one vector of columns of the product. */
INLINE void NAME(block)(int rows, size depth, const REAL *a, size a_row, size a_column, const REAL *b, size b_row,
                        REAL *c, size c_row, int add)
{
    NAME(line) sums[MR];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) sums[r] = add ? *(NAME(line) *)(c + r * c_row) : (NAME(line)){0};
    for (size t = 0; t < depth; t++) {
        const NAME(line) line = *(const NAME(line) *)(b + t * b_row);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) sums[r] += a[r * a_row + t * a_column] * line;
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) *(NAME(line) *)(c + r * c_row) = sums[r];
}

/* c = a @ b, or c += a @ b. a: (rows, depth) with any strides, b: (depth, columns), c: (rows, columns) */
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
            for (size t = 0; t < depth; t++) sum += a[i * a_row + t * a_column] * b[t * b_row + j];
            c[i * c_row + j] = sum;
        }
}

static void NAME(transpose)(size rows, size columns, const REAL *restrict x, size x_row, REAL scale, REAL *restrict out,
                            size out_row)
{
    for (size j = 0; j < columns; j++) {
        for (size i = 0; i < rows; i++) out[j * out_row + i] = x[i * x_row + j] * scale;
        for (size i = rows; i < out_row; i++) out[j * out_row + i] = 0;
    }
}

/* Applies the mask to n scores of a query. */
static inline void NAME(hide)(const attention_shape *s, const void *mask, size at, size n, REAL *score)
{
    if (s->masked == 1)
        for (size j = 0; j < n; j++) score[j] = ((const uint8_t *)mask)[at + j * s->column] ? score[j] : -INFINITY;
    else if (s->masked)
        for (size j = 0; j < n; j++) score[j] += ((const REAL *)mask)[at + j * s->column];
}

/* z = softmax(scale*q@k^T + mask)@v, sums = log sum e^score; both are 0 for a query that sees no key. sums: (heads, length);
 * scratch: per thread, (depth + QUERIES)*(keys rounded up to whole vectors) numbers */
void NAME(attention)(const attention_shape *s, const REAL *q, const REAL *k, const REAL *v, const void *mask, REAL *z,
                     REAL *sums, REAL *scratch, int threads)
{
    const size pad = (s->keys + NR - 1) / NR * NR;
    ON_THREADS(threads)
    for (size head = 0; head < s->heads; head++) {
        REAL *const k_t = scratch + omp_get_thread_num() * (s->depth + QUERIES) * pad, *const scores = k_t + s->depth * pad;
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
                sums[head * s->length + start + i] = top + (REAL)log(sum);
                scales[i] = 1 / sum;
            }
            NAME(product)(rows, s->width, seen, scores, pad, 1, v + at[V], row[V], z_block, row[Z], 0);
            for (size i = 0; i < rows; i++)
                SIMD for (size j = 0; j < s->width; j++) z_block[i * row[Z] + j] *= scales[i];
        }
    }
}

/* P = softmax(scale*q@k^T + mask);  dv = P^T@g, dP = g@v^T, dS = P*(dP - sum g*z), dq = scale*dS@k, dk = scale*dS^T@q.
 * scratch: per thread, (depth + width + 2*QUERIES)*(keys rounded up to whole vectors) numbers */
void NAME(attention_backward)(const attention_shape *s, const REAL *q, const REAL *k, const REAL *v,
                              const void *mask, const REAL *z, const REAL *g, const REAL *sums, REAL *dq, REAL *dk,
                              REAL *dv, REAL *scratch, int threads)
{
    const size pad = (s->keys + NR - 1) / NR * NR;
    ON_THREADS(threads)
    for (size head = 0; head < s->heads; head++) {
        REAL *const k_t = scratch + omp_get_thread_num() * (s->depth + s->width + 2 * QUERIES) * pad;
        REAL *const v_t = k_t + s->depth * pad, *const p = v_t + s->width * pad, *const ds = p + QUERIES * pad;
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
                const REAL less = NAME(total)(dots), sum = sums[head * s->length + start + r], scale = (REAL)s->scale;
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
