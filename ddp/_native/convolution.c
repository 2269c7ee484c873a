/* Convolution of float images and its gradients: directly, or with many channels by Winograd's minimal filtering.
 *
 * A part of kernels.c, for float alone. x: (n, groups*channels, H, W), w: (groups*filters, channels, KH, KW), out: (n,
 * groups*filters, OH, OW), with the sizes in the struct `window`. The order of each sum does not depend on the number of
 * threads. Exported functions return whether there was enough memory.
 */
#define LINE 8 /* floats of a vector in this file, whatever the width of a register */
typedef float line __attribute__((vector_size(4 * LINE), aligned(4), may_alias));
#define LINE_AT(p) (*(line *)(p))
#define EVERY(s) ((line){(s), (s), (s), (s), (s), (s), (s), (s)}) /* not (line){0} + s: compilers would keep the addition */
#define MOST_ROWS 6 /* maximum number of rows of two vectors each: their sums fit into 16 registers */
#define MOST_STRIDE 4
#ifdef __clang__
#define SHUFFLE __builtin_shufflevector
#else
typedef int32_t order __attribute__((vector_size(4 * LINE)));
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (order){__VA_ARGS__})
#endif
#define UNROLL PRAGMA(GCC unroll 12) /* before a loop with a constant number of iterations, at most 12 */
#define CACHED (1 << 17) /* bytes of images that a thread works on at a time: they stay in L2 */

/* Runs RUN with the number of rows of a panel as a constant. */
#define WITH_CONSTANT(rows)                                                                                            \
    switch (rows) {                                                                                                    \
    case 1: RUN(1); break;                                                                                             \
    case 2: RUN(2); break;                                                                                             \
    case 3: RUN(3); break;                                                                                             \
    case 4: RUN(4); break;                                                                                             \
    case 5: RUN(5); break;                                                                                             \
    default: RUN(6);                                                                                                   \
    }

/* The first row of panel i, if k rows are cut into the fewest panels of at most MOST_ROWS, of nearly equal sizes. */
static inline size panel_start(size k, size i)
{
    const size panels = ratio_up(k, MOST_ROWS), q = k / panels, rest = k % panels;
    return i * q + least(i, rest);
}

static inline void put_line(float *out, line z, size n)
{
    if (n >= LINE) LINE_AT(out) = z;
    else
        for (size i = 0; i < n; i++) out[i] = z[i];
}

/* --- direct convolution ------------------------------------------------------------------------------------------- */

/* How the taps of a window, the elements of its kernel, read images. To compute out, they read x. If `back`, they read the
 * gradient of out, to compute that of x.
 *
 * A position p of residue r writes at p*spread + r. Its taps read at p*step + offset, with offsets from `low` to
 * `high`. A band is a copy of the elements that `lines` lines of positions read, with zeros around them. Each of its
 * rows is stored in `step` parts, so that the elements that neighbouring positions read are adjacent. */
typedef struct {
    size n, groups, sources, results; /* sources, results: channels of a group that are read, and that are written */
    size source[2], result[2], step[2], spread[2], low[2], high[2];
    size lines, bands, rows, part, width, plane, taps;
} walk;

/* Whether positions of this residue use the tap. *offset: where it reads, relative to p*step. */
static inline int tap_offset(const window *s, int back, int axis, size residue, size tap, size *offset)
{
    const size at = tap * s->dilation[axis] - s->padding[axis];
    *offset = back ? (residue - at) / s->stride[axis] : at;
    return !back || (residue - at) % s->stride[axis] == 0;
}

static walk plan_walk(const window *s, size n, size groups, size channels, size filters, int back)
{
    walk g = {.n = n, .groups = groups, .sources = back ? filters : channels, .results = back ? channels : filters};
    for (int axis = 0; axis < 2; axis++) {
        g.source[axis] = back ? s->out[axis] : s->image[axis];
        g.result[axis] = back ? s->image[axis] : s->out[axis];
        g.step[axis] = back ? 1 : s->stride[axis];
        g.spread[axis] = back ? s->stride[axis] : 1;
        g.low[axis] = PTRDIFF_MAX;
        g.high[axis] = PTRDIFF_MIN;
        for (size residue = 0, offset; residue < g.spread[axis]; residue++)
            for (size tap = 0; tap < s->kernel[axis]; tap++)
                if (tap_offset(s, back, axis, residue, tap, &offset)) {
                    g.low[axis] = offset < g.low[axis] ? offset : g.low[axis];
                    g.high[axis] = offset > g.high[axis] ? offset : g.high[axis];
                }
    }
    const size lines = ratio_up(g.result[0], g.spread[0]), across = ratio_up(ratio_up(g.result[1], g.spread[1]), LINE) * LINE;
    const size reach = g.high[0] - g.low[0] + 1;
    g.part = across + (g.high[1] - g.low[1]) / g.step[1] + 1;
    g.width = g.part * g.step[1];
    const size rows = CACHED / (size)sizeof(float) / (g.width * g.sources); /* that fit into CACHED bytes */
    g.lines = rows > reach + 4 * g.step[0] ? (rows - reach) / g.step[0] + 1 : 4;
    g.bands = ratio_up(lines, g.lines);
    g.lines = ratio_up(lines, g.bands);
    g.rows = (g.lines - 1) * g.step[0] + reach;
    g.plane = g.rows * g.width;
    g.taps = s->kernel[0] * s->kernel[1];
    return g;
}

/* Copies a band of x, a channel of an image: the elements that the lines of positions from `first` on read. */
static void copy_band(const walk *g, size first, const float *x, float *to)
{
    const size step = g->step[1];
    for (size part = 0; part < step; part++, to += g->part) {
        size start = 0, stop = g->part;
        clip(g->source[1], step, part + g->low[1], &start, &stop);
        for (size row = 0, y = first * g->step[0] + g->low[0]; row < g->rows; row++, y++) {
            const float *from = x + y * g->source[1] + part + g->low[1];
            float *own = to + row * g->width;
            const size last = y >= 0 && y < g->source[0] ? stop : 0, edge = last ? start : 0;
            for (size q = 0; q < edge; q++) own[q] = 0;
            if (step == 1)
                memcpy(own + edge, from + edge, (last - edge) * sizeof(float));
            else
                for (size q = edge; q < last; q++) own[q] = from[step * q];
            for (size q = last; q < g->part; q++) own[q] = 0;
        }
    }
}

/* The offset at which a tap reads in a band. */
static inline size offset_in_band(const walk *g, size down, size right)
{
    right -= g->low[1];
    return (down - g->low[0]) * g->width + right % g->step[1] * g->part + right / g->step[1];
}

/* A vector of n positions. read: the offset in a band at which it reads; write: the offset at which it writes, from the first
 * line that is computed from the band. */
typedef struct {
    int32_t read, write, n;
} spot;

/* Lists the spots of a residue; returns the number of them in a line. */
static size list_spots(const walk *g, size residue, spot *spots)
{
    const size down = residue / g->spread[1], right = residue % g->spread[1];
    const size columns = ratio_up(g->result[1] - right, g->spread[1]), each = ratio_up(columns, LINE);
    for (size i = 0; i < g->lines * each; i++) {
        const size y = i / each, q = i % each * LINE;
        spots[i].read = (int32_t)(y * g->step[0] * g->width + q);
        spots[i].write = (int32_t)((y * g->spread[0] + down) * g->result[1] + q * g->spread[1] + right);
        spots[i].n = (int32_t)least(columns - q, LINE);
    }
    return each;
}

/* out[k][p] = b[k] + sum over t of w[t][k]*band[p][offsets[t]] for a panel of filters; `vectors` of `all` spots at a time */
INLINE void sum_taps(const int filters, const int vectors, const walk *g, size count, const float *band, const int32_t *offsets,
                     const float *w, const float *b, const spot *spots, size all, float *out)
{
    for (size start = 0; start < all; start += vectors, spots += vectors) {
        line sums[12], made[12];
        const float *at[8], *weights = w;
        UNROLL for (int p = 0; p < vectors; p++) at[p] = band + spots[least(p, all - 1 - start)].read;
        UNROLL for (int i = 0; i < filters * vectors; i++) sums[i] = EVERY(b ? b[i / vectors] : 0);
        for (size t = 0; t < count; t++, weights += filters)
            UNROLL for (int p = 0; p < vectors; p++) {
                const line x = LINE_AT(at[p] + offsets[t]);
                UNROLL for (int k = 0; k < filters; k++) sums[k * vectors + p] += weights[k] * x;
            }
        UNROLL for (int i = 0; i < filters * vectors; i++) made[i] = sums[i];
        for (size i = 0; i < filters * vectors; i++) {
            const size p = i % vectors;
            float *to = out + i / vectors * g->result[0] * g->result[1] + spots[p].write;
            if (start + p < all && g->spread[1] == 1)
                put_line(to, made[i], spots[p].n);
            else if (start + p < all)
                for (size j = 0; j < spots[p].n; j++) to[j * g->spread[1]] = made[i][j];
        }
    }
}

/* Computes the results of one residue from a band: all filters, in panels. count: of taps; out: their first line */
static void run_band(const walk *g, size count, const float *band, const int32_t *offsets, const float *w, const float *b,
                     const spot *spots, size all, float *out)
{
#define RUN(rows) sum_taps(rows, rows == 1 ? 8 : rows < 4 ? 4 : 2, g, count, band, offsets, w, b, spots, all, out)
    for (size k = 0, panel = 0, filters; k < g->results; k += filters) {
        filters = panel_start(g->results, ++panel) - k;
        WITH_CONSTANT(filters)
        w += filters * count;
        b = b ? b + filters : NULL;
        out += filters * g->result[0] * g->result[1];
    }
#undef RUN
}

/* out = the convolution of x by w, plus b. If `back`: x is the gradient of its result, and out becomes the gradient of its
 * input. b: (groups*filters,) or NULL */
int convolve_f32(const window *s, size n, size groups, size channels, size filters, int back, const float *x,
                 const float *w, const float *b, float *out)
{
    const walk g = plan_walk(s, n, groups, channels, filters, back);
    const size whole = channels * filters * g.taps, residues = g.spread[0] * g.spread[1];
    const size band_size = g.sources * g.plane + 2 * LINE, apart = back ? g.taps : channels * g.taps;
    const size most_spots = g.lines * ratio_up(g.part, LINE), plane = g.result[0] * g.result[1];
    /* per residue: the first tap, and how many spots a line has */
    size starts[MOST_STRIDE * MOST_STRIDE + 1] = {0}, in_line[MOST_STRIDE * MOST_STRIDE];
    const int threads = count_threads(n * groups * whole * plane / residues);
    float *packed = malloc((groups * whole + threads * band_size) * sizeof(float)), *bands = packed + groups * whole;
    int32_t *offsets = malloc(2 * g.sources * g.taps * sizeof(int32_t)), *seen = offsets + g.sources * g.taps;
    spot *spots = malloc(residues * most_spots * sizeof(spot));
    if (packed && offsets && spots) {
        for (size residue = 0, taps = 0; residue < residues; starts[++residue] = taps) {
            in_line[residue] = list_spots(&g, residue, spots + residue * most_spots);
            for (size c = 0; c < g.sources; c++)
                for (size tap = 0, down, right; tap < g.taps; tap++)
                    if (tap_offset(s, back, 0, residue / g.spread[1], tap / s->kernel[1], &down)
                        && tap_offset(s, back, 1, residue % g.spread[1], tap % s->kernel[1], &right)) {
                        offsets[taps] = (int32_t)(c * g.plane + offset_in_band(&g, down, right));
                        seen[taps++] = (int32_t)(c * g.taps * (back ? channels : 1) + tap);
                    }
        }
        float *to = packed;
        for (size group = 0; group < groups; group++)
            for (size residue = 0; residue < residues; residue++)
                for (size k = 0, panel = 0, stop; k < g.results; k = stop) {
                    stop = panel_start(g.results, ++panel);
                    for (size t = starts[residue]; t < starts[residue + 1]; t++)
                        for (size i = k; i < stop; i++) *to++ = w[group * whole + seen[t] + i * apart];
                }
        ON_THREADS(threads)
        for (size unit = 0; unit < n * groups * g.bands; unit++) {
            const size image = unit / g.bands, group = image % groups, first = unit % g.bands * g.lines;
            float *band = bands + omp_get_thread_num() * band_size;
            for (size c = 0; c < g.sources; c++)
                copy_band(&g, first, x + (image * g.sources + c) * g.source[0] * g.source[1], band + c * g.plane);
            for (size residue = 0; residue < residues; residue++) {
                const size lines = ratio_up(g.result[0] - residue / g.spread[1], g.spread[0]) - first;
                run_band(&g, starts[residue + 1] - starts[residue], band, offsets + starts[residue],
                         packed + group * whole + g.results * starts[residue], b ? b + group * filters : NULL,
                         spots + residue * most_spots, least(lines, g.lines) * in_line[residue],
                         out + image * g.results * plane + first * g.spread[0] * g.result[1]);
            }
        }
    }
    free(spots);
    free(offsets);
    free(packed);
    return packed && offsets && spots;
}

/* A block of images, copied to compute the gradient of filters. For each channel of x the copy has a band, and for each
 * channel of g `lines` rows of `columns` floats. */
typedef struct {
    size images, lines, columns, x_plane, x_row, g_plane, x_image, g_image;
} block;

/* dw[k][t] += sum over images and positions of g[k]*x[offsets[t]] */
INLINE void correlate_taps(const int filters, const int taps, const block *s, const float *g, const float *x,
                           const int32_t *offsets, float *dw, size dw_row)
{
    line sums[12];
    UNROLL for (int i = 0; i < filters * taps; i++) sums[i] = EVERY(0);
    for (size image = 0; image < s->images; image++, g += s->g_image, x += s->x_image)
        for (size y = 0; y < s->lines; y++)
            for (size q = 0; q < s->columns; q += LINE) {
                line seen[12];
                UNROLL for (int t = 0; t < taps; t++) seen[t] = LINE_AT(x + y * s->x_row + q + offsets[t]);
                UNROLL for (int k = 0; k < filters; k++) {
                    const line z = LINE_AT(g + k * s->g_plane + y * s->columns + q);
                    UNROLL for (int t = 0; t < taps; t++) sums[k * taps + t] += z * seen[t];
                }
            }
    UNROLL for (int k = 0; k < filters; k++)
        UNROLL for (int t = 0; t < taps; t++) {
            const line z = sums[k * taps + t];
            dw[k * dw_row + t] += ((z[0] + z[4]) + (z[2] + z[6])) + ((z[1] + z[5]) + (z[3] + z[7]));
        }
}

/* Adds to dw of one filter or of four, for one channel. */
static void correlate_filters(size filters, size taps, const block *s, const float *g, const float *x,
                              const int32_t *offsets, float *dw, size dw_row)
{
#define RUN(filters, taps) correlate_taps(filters, taps, s, g, x, offsets + t, dw + t, dw_row)
    size t = 0;
    for (; filters == 1 && t + 9 <= taps; t += 9) RUN(1, 9);
    for (; t + 3 <= taps; t += 3) filters == 4 ? RUN(4, 3) : RUN(1, 3);
    for (; t < taps; t++) filters == 4 ? RUN(4, 1) : RUN(1, 1);
#undef RUN
}

/* dw = the gradient of w, if g is the gradient of the convolution of x by w */
int convolve_filters_f32(const window *s, size n, size groups, size channels, size filters, const float *x,
                         const float *g, float *dw)
{
    const walk plan = plan_walk(s, n, groups, channels, filters, 0);
    const size oh = s->out[0], ow = s->out[1], columns = ratio_up(ow, LINE) * LINE, taps = plan.taps;
    block b = {.columns = columns, .x_plane = plan.plane, .x_row = plan.step[0] * plan.width};
    b.g_plane = plan.lines * columns;
    b.x_image = groups * channels * b.x_plane;
    b.g_image = groups * filters * b.g_plane;
    const size most = 8 * CACHED / (size)sizeof(float) / (b.x_image + b.g_image), images = most < 1 ? 1 : least(n, most);
    float *x_bands = malloc((images * (b.x_image + b.g_image) + 2 * LINE) * sizeof(float));
    float *g_bands = x_bands + images * b.x_image + 2 * LINE;
    int32_t *offsets = malloc(taps * sizeof(int32_t));
    if (x_bands && offsets) {
        memset(dw, 0, groups * filters * channels * taps * sizeof(float));
        for (size tap = 0; tap < taps; tap++) {
            const size down = tap / s->kernel[1] * s->dilation[0] - s->padding[0];
            offsets[tap] = (int32_t)offset_in_band(&plan, down, tap % s->kernel[1] * s->dilation[1] - s->padding[1]);
        }
        for (size unit = 0; unit < ratio_up(n, images) * plan.bands; unit++) {
            const size start = unit / plan.bands * images, first = unit % plan.bands * plan.lines;
            b.images = least(images, n - start);
            b.lines = least(plan.lines, oh - first);
            PARALLEL(b.images * b.x_image)
            for (size plane = 0; plane < b.images * groups * channels; plane++)
                copy_band(&plan, first, x + (start * groups * channels + plane) * s->image[0] * s->image[1],
                          x_bands + plane * b.x_plane);
            PARALLEL(b.images * b.g_image)
            for (size row = 0; row < b.images * groups * filters * b.lines; row++) {
                const size plane = row / b.lines, y = row % b.lines;
                float *to = g_bands + plane * b.g_plane + y * columns;
                memcpy(to, g + ((start * groups * filters + plane) * oh + first + y) * ow, ow * sizeof(float));
                memset(to + ow, 0, (columns - ow) * sizeof(float));
            }
            const size fours = ratio_up(filters, 4);
            PARALLEL(b.images * b.g_image * channels * taps)
            for (size i = 0; i < groups * fours * channels; i++) {
                const size c = i % channels, k = i / channels % fours * 4, group = i / channels / fours;
                const float *own_g = g_bands + (group * filters + k) * b.g_plane;
                const float *own_x = x_bands + (group * channels + c) * b.x_plane;
                float *own = dw + ((group * filters + k) * channels + c) * taps;
                if (k + 4 <= filters)
                    correlate_filters(4, taps, &b, own_g, own_x, offsets, own, channels * taps);
                else
                    for (size f = 0; f < filters - k; f++)
                        correlate_filters(1, taps, &b, own_g + f * b.g_plane, own_x, offsets, own + f * channels * taps, 0);
            }
        }
    }
    free(offsets);
    free(x_bands);
    return x_bands && offsets;
}

/* --- Winograd's F(2x2, 3x3) and F(2x2, 2x2) ------------------------------------------------------------------------- */

/* Lavin and Gray 2015, arXiv:1509.09308: with a 3x3 window, 2x2 results need 16 products per channel instead of 36. One factor
 * is made of the 4x4 elements that the results read, the other of the filter; products are summed over channels. With a 2x2
 * window, 9 products replace 16. A 4x4 window at stride 2 is a 2x2 window over the four phases of an image (every other
 * element along H and W), which count as channels. Vectors hold channels. A result that reads an infinity may be nan where
 * direct convolution gives an infinity. */

#define TILE_COLUMNS 32 /* tiles of a row that are transformed at a time */
#define MOST_PHASES 2 /* along an axis */
#define BLOCK_BYTES (1 << 19) /* bytes of tiles that are worked on at a time: the same on any number of threads */
#define WIDE (2 * LINE)

typedef struct {
    size n, sources, results, source[2], result[2], tiles[2]; /* tiles: along H, W of a phase of a result */
    size step, spread;                                        /* phases along an axis: of a source, of a result */
    size first[2][MOST_PHASES];                               /* where the first tile of a phase of the result reads */
    size edge, products;                                      /* of a tile that is read: 4 and 16, or 3 and 9 */
    size source_row, result_row; /* floats of all channels of a tile: an odd number of pairs of vectors, for the cache */
    size rows;                   /* of tiles in a block */
} tiling;

static tiling plan_tiles(const window *s, size n, size channels, size filters, int back)
{
    tiling g = {.n = n, .sources = back ? filters : channels, .results = back ? channels : filters};
    const size stride = s->stride[0], taps = s->kernel[0] / stride;
    g.step = back ? 1 : stride;
    g.spread = back ? stride : 1;
    g.edge = taps + 1;
    g.products = g.edge * g.edge;
    for (int axis = 0; axis < 2; axis++) {
        g.source[axis] = back ? s->out[axis] : s->image[axis];
        g.result[axis] = back ? s->image[axis] : s->out[axis];
        g.tiles[axis] = ratio_up(g.result[axis], 2 * g.spread);
        for (size phase = 0; phase < g.spread; phase++)
            g.first[axis][phase] = back ? (phase + s->padding[axis]) / stride - taps + 1 : -s->padding[axis];
    }
    g.source_row = (ratio_up(g.step * g.step * g.sources, WIDE) | 1) * WIDE;
    g.result_row = (ratio_up(g.spread * g.spread * g.results, WIDE) | 1) * WIDE;
    const size tiles = BLOCK_BYTES / (g.products * (size)sizeof(float) * (g.source_row + g.result_row));
    g.rows = least(n * g.tiles[0], ratio_up(tiles < 64 ? 64 : tiles, g.tiles[1]));
    return g;
}

/* Transposes eight vectors. */
INLINE void transpose_lines(line *r)
{
    line a[LINE], b[LINE];
    UNROLL for (int i = 0; i < LINE; i += 2) {
        a[i] = SHUFFLE(r[i], r[i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
        a[i + 1] = SHUFFLE(r[i], r[i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
    }
    UNROLL for (int i = 0; i < 4; i++) {
        const int at = i / 2 * 4 + i % 2, to = i / 2 * 4 + i % 2 * 2;
        b[to] = SHUFFLE(a[at], a[at + 2], 0, 1, 8, 9, 4, 5, 12, 13);
        b[to + 1] = SHUFFLE(a[at], a[at + 2], 2, 3, 10, 11, 6, 7, 14, 15);
    }
    UNROLL for (int j = 0; j < 4; j++) {
        r[j] = SHUFFLE(b[j], b[j + 4], 0, 1, 2, 3, 8, 9, 10, 11);
        r[j + 4] = SHUFFLE(b[j], b[j + 4], 4, 5, 6, 7, 12, 13, 14, 15);
    }
}

/* Copies rows from y on and columns from `left` on, of up to eight planes, to to[row][column][plane]; 0 outside planes. */
static void load_planes(const float *x, size planes, const size *image, size y, size left, size rows, size columns, float *to)
{
    const size h = image[0], w = image[1], start = left < 0 ? -left : 0, stop = least(columns, w - left);
    memset(to, 0, rows * columns * LINE * sizeof(float));
    for (size row = 0; row < rows; row++, y++, to += columns * LINE)
        for (size q = start; q < stop && y >= 0 && y < h; q += LINE) {
            line lines[LINE];
            const size n = least(LINE, stop - q);
            UNROLL for (size c = 0; c < LINE; c++) {
                const size at = (c * h + y) * w + left + q;
                lines[c] = EVERY(0);
                if (at + LINE <= planes * h * w) /* perhaps with elements of the next row */
                    lines[c] = LINE_AT(x + at);
                else if (c < planes)
                    memcpy(&lines[c], x + at, n * sizeof(float));
            }
            transpose_lines(lines);
            for (size i = 0; i < n; i++) LINE_AT(to + (q + i) * LINE) = lines[i];
        }
}

/* Writes `from`, (columns, LINE), to at most LINE planes, which are `apart` floats apart, and adds b of each plane. */
static void store_planes(const float *from, const float *b, size planes, size apart, size columns, float *out)
{
    line bias = EVERY(0);
    for (size k = 0; b && k < least(planes, LINE); k++) bias[k] = b[k];
    for (size q = 0; q < columns; q += LINE) {
        line lines[LINE];
        UNROLL for (int j = 0; j < LINE; j++) lines[j] = LINE_AT(from + (q + j) * LINE) + bias;
        transpose_lines(lines);
        for (size k = 0; k < least(planes, LINE); k++) put_line(out + k * apart + q, lines[k], columns - q);
    }
}

/* The transforms of factors and of sums of products, along one axis: z = T x, on vectors of channels. Each T has two forms:
 * one for tiles of 4x4 and filters of 3x3, a small one for tiles of 3x3 and filters of 2x2. */
typedef void transform(const line *x, line *z);
#define TRANSFORM(name, ...)                                                                                           \
    INLINE void name(const line *x, line *z)                                                                           \
    {                                                                                                                  \
        __VA_ARGS__;                                                                                                   \
    }
/* B^T */
TRANSFORM(of_image, z[0] = x[0] - x[2], z[1] = x[1] + x[2], z[2] = x[2] - x[1], z[3] = x[1] - x[3])
TRANSFORM(of_small_image, z[0] = x[0] - x[1], z[1] = x[1], z[2] = x[2] - x[1])
/* G */
TRANSFORM(of_filter, const line even = 0.5f * (x[0] + x[2]); const line odd = 0.5f * x[1]; z[0] = x[0], z[1] = even + odd,
          z[2] = even - odd, z[3] = x[2])
TRANSFORM(of_small_filter, z[0] = x[0], z[1] = x[0] + x[1], z[2] = x[1])
/* A^T */
TRANSFORM(of_products, z[0] = x[0] + x[1] + x[2], z[1] = x[1] - x[2] - x[3])
TRANSFORM(of_small_products, z[0] = x[0] + x[1], z[1] = x[1] + x[2])
/* A and G^T. The small form of A is that of G, and the small form of G^T that of A^T. */
TRANSFORM(of_gradient, z[0] = x[0], z[1] = x[0] + x[1], z[2] = x[0] - x[1], z[3] = -x[1])
TRANSFORM(of_filter_sums, const line even = 0.5f * (x[1] + x[2]); z[0] = x[0] + even, z[1] = 0.5f * (x[1] - x[2]),
          z[2] = even + x[3])

/* z = T x T^T. x: (n, n) vectors, with rows x_row and columns x_column floats apart; z: (made, made), likewise */
INLINE void transform_tile(transform *axis, const int n, const int made, const float *x, size x_row, size x_column, float *z,
                           size z_row, size z_column)
{
    line half[4][4], in[4], out[4];
    UNROLL for (int j = 0; j < n; j++) {
        UNROLL for (int i = 0; i < n; i++) in[i] = LINE_AT(x + i * x_row + j * x_column);
        axis(in, out);
        UNROLL for (int i = 0; i < made; i++) half[i][j] = out[i];
    }
    UNROLL for (int i = 0; i < made; i++) {
        axis(half[i], out);
        UNROLL for (int j = 0; j < made; j++) LINE_AT(z + i * z_row + j * z_column) = out[j];
    }
}

/* Transforms up to 32 adjacent tiles (n, n), for eight channels in each phase; if x has only `planes` channels, the
 * others are zeros. to: (tiles, row), where a row holds the phases, each of `channels` floats. The elements of a
 * transformed tile are `apart` floats apart. */
INLINE void transform_row(transform *axis, const int n, const int made, size step, const float *x, size planes, size channels,
                          const size *image, size y, size left, size tiles, float *to, size row, size apart)
{
    float seen[4 * MOST_PHASES * (2 * TILE_COLUMNS + 2) * MOST_PHASES * LINE];
    const size columns = (2 * tiles + n - 2) * step;
    load_planes(x, planes, image, y, left, n * step, columns, seen);
    for (size phase = 0; phase < step * step; phase++, to += channels)
        for (size tile = 0; tile < tiles; tile++)
            transform_tile(axis, n, made, seen + (phase / step * columns + 2 * tile * step + phase % step) * LINE,
                           columns * step * LINE, step * LINE, to + tile * row, made * apart, apart);
}

/* Transforms `rows` rows of tiles from `first` on, counted over all images. gradients: x is the gradient of the result.
 * down, right: where the first tile of an image reads */
static void transform_block(const tiling *t, int gradients, size down, size right, size first, size rows, const float *x,
                            float *to, size apart)
{
    const size channels = gradients ? t->results : t->sources, row = gradients ? t->result_row : t->source_row;
    const size *image = gradients ? t->result : t->source, across = t->tiles[1], step = gradients ? 1 : t->step;
    PARALLEL(t->products * rows * across * channels)
    for (size i = 0; i < ratio_up(channels, WIDE) * 2 * rows; i++) {
        const size c = i / rows * LINE, tile_row = first + i % rows, y = tile_row % t->tiles[0] * 2 * step + down;
        const size planes = channels - c; /* at most 0 if none are left */
        const float *from = x + (tile_row / t->tiles[0] * channels + least(c, channels)) * image[0] * image[1];
        for (size q = 0; q < across; q += TILE_COLUMNS) {
            const size tiles = least(TILE_COLUMNS, across - q), left = 2 * q * step + right;
            float *own = to + (i % rows * across + q) * row + c;
#define RUN(axis, n, made) transform_row(axis, n, made, step, from, planes, channels, image, y, left, tiles, own, row, apart)
            if (t->edge == 4)
                gradients ? RUN(of_gradient, 2, 4) : RUN(of_image, 4, 4);
            else
                gradients ? RUN(of_small_filter, 2, 3) : RUN(of_small_image, 3, 3);
#undef RUN
        }
    }
}

/* to = G w G^T: (products, phases, pairs of vectors of results, sources, WIDE). w: (results, sources, KH, KW) or, if `back`,
 * (sources, results, KH, KW), which is rotated by 180 degrees */
static void transform_filters(const tiling *t, const window *s, int back, const float *w, float *to)
{
    const size kernel = s->kernel[0], step = s->stride[0], taps = t->edge - 1, area = kernel * kernel;
    const size phases = step * step, pairs = ratio_up(t->results, WIDE), sources = t->step * t->step * t->sources;
    const size apart = t->spread * t->spread * pairs * sources * WIDE;
    const size from_k = back ? area : area * t->sources, from_c = back ? area * t->results : area;
    PARALLEL(apart * t->products)
    for (size i = 0; i < 2 * pairs; i++)
        for (size j = 0; j < phases * t->sources; j++) {
            const size phase = j % phases, c = j / phases, k = i * LINE;
            const size down = (phase / step + (back ? s->padding[0] : 0)) % step;
            const size right = (phase % step + (back ? s->padding[1] : 0)) % step;
            float f[9 * LINE];
            for (size e = 0; e < taps * taps; e++)
                for (size l = 0; l < LINE; l++) {
                    const size at = back ? taps * taps - 1 - e : e;
                    const size tap = (at / taps * step + down) * kernel + at % taps * step + right;
                    f[e * LINE + l] = k + l < t->results ? w[(k + l) * from_k + c * from_c + tap] : 0;
                }
            const size pair = back ? phase * pairs + i / 2 : i / 2, source = back ? c : phase * t->sources + c;
            float *own = to + (pair * sources + source) * WIDE + k % WIDE;
            if (taps == 3)
                transform_tile(of_filter, 3, 4, f, 3 * LINE, LINE, own, 4 * apart, apart);
            else
                transform_tile(of_small_filter, 2, 3, f, 2 * LINE, LINE, own, 3 * apart, apart);
        }
}

/* out = A^T m A + b for up to 32 tiles of a row, at most eight result channels of each phase. m: (tiles, row) */
static void transform_results(const tiling *t, const float *m, size row, size apart, size tiles, const float *b, size results,
                              size y, size left, float *out)
{
    const size h = t->result[0], w = t->result[1], spread = t->spread, columns = 2 * tiles * spread;
    float made[2 * MOST_PHASES * 2 * TILE_COLUMNS * MOST_PHASES * LINE];
    for (size phase = 0; phase < spread * spread; phase++, m += t->results)
        for (size tile = 0; tile < tiles; tile++) {
            float *own = made + (phase / spread * columns + 2 * tile * spread + phase % spread) * LINE;
            if (t->edge == 4)
                transform_tile(of_products, 4, 2, m + tile * row, 4 * apart, apart, own, columns * spread * LINE, spread * LINE);
            else
                transform_tile(of_small_products, 3, 2, m + tile * row, 3 * apart, apart, own, columns * spread * LINE,
                               spread * LINE);
        }
    for (size i = 0; i < least(2 * spread, h - y); i++)
        store_planes(made + i * columns * LINE, b, results, h * w, least(columns, w - left), out + (y + i) * w + left);
}

/* c = a @ b, or c += a @ b, for a few rows and WIDE columns. a: (rows, depth) with any strides */
INLINE void multiply_rows(const int rows, size depth, const float *a, size a_row, size a_column, const float *b, size b_row,
                          float *c, size c_row, int add)
{
    line left[MOST_ROWS], right[MOST_ROWS];
    UNROLL for (int r = 0; r < rows; r++) left[r] = right[r] = EVERY(0);
    for (size t = 0; t < depth; t++, a += a_column, b += b_row) {
        const line p = LINE_AT(b), q = LINE_AT(b + LINE);
        UNROLL for (int r = 0; r < rows; r++) {
            left[r] += a[r * a_row] * p;
            right[r] += a[r * a_row] * q;
        }
    }
    UNROLL for (int r = 0; r < rows; r++, c += c_row) {
        if (add)
            left[r] += LINE_AT(c), right[r] += LINE_AT(c + LINE);
        LINE_AT(c) = left[r], LINE_AT(c + LINE) = right[r];
    }
}

/* multiply_rows for any number of rows. */
static void multiply(size rows, size depth, const float *a, size a_row, size a_column, const float *b, size b_row, float *c,
                     size c_row, int add)
{
#define RUN(few) multiply_rows(few, depth, a + r * a_row, a_row, a_column, b, b_row, c + r * c_row, c_row, add)
    for (size r = 0, panel = 0, stop; r < rows; r = stop) {
        stop = panel_start(rows, ++panel);
        WITH_CONSTANT(stop - r)
    }
#undef RUN
}

/* As convolve_f32, for one group and a padding of at most two. The window is 2x2 or 3x3 at stride 1, or 4x4 at stride 2 if
 * channels and filters are multiples of WIDE. */
int winograd_f32(const window *s, size n, size channels, size filters, int back, const float *x, const float *w,
                 const float *b, float *out)
{
    const tiling t = plan_tiles(s, n, channels, filters, back);
    const size across = t.tiles[1], pairs = ratio_up(t.results, WIDE), sources = t.step * t.step * t.sources;
    const size spread = t.spread, phase_size = pairs * sources * WIDE, filter_size = spread * spread * phase_size;
    const size x_size = t.rows * across * t.source_row + WIDE, m_size = t.rows * across * t.result_row + WIDE;
    float *u = malloc(t.products * (filter_size + x_size + m_size) * sizeof(float));
    float *v = u + t.products * filter_size, *m = v + t.products * x_size;
    if (u)
        transform_filters(&t, s, back, w, u);
    for (size first = 0; u && first < n * t.tiles[0]; first += t.rows) {
        const size rows = least(t.rows, n * t.tiles[0] - first), work = t.products * rows * across;
        for (size phase = 0; phase < spread * spread; phase++) {
            transform_block(&t, 0, t.first[0][phase / spread], t.first[1][phase % spread], first, rows, x, v, x_size);
            PARALLEL(work * phase_size)
            for (size i = 0; i < t.products * pairs; i++) {
                const size p = i / pairs, k = i % pairs * WIDE;
                multiply(rows * across, sources, v + p * x_size, t.source_row, 1,
                         u + p * filter_size + phase * phase_size + k * sources, WIDE, m + p * m_size + phase * t.results + k,
                         t.result_row, 0);
            }
        }
        PARALLEL(work * t.results)
        for (size i = 0; i < ratio_up(t.results, LINE) * rows; i++) {
            const size k = i / rows * LINE, row = first + i % rows, image = row / t.tiles[0];
            for (size q = 0; q < across; q += TILE_COLUMNS)
                transform_results(&t, m + (i % rows * across + q) * t.result_row + k, t.result_row, m_size,
                                  least(TILE_COLUMNS, across - q), b ? b + k : NULL, least(t.results - k, LINE),
                                  row % t.tiles[0] * 2 * spread, 2 * q * spread,
                                  out + (image * t.results + k) * t.result[0] * t.result[1]);
        }
    }
    free(u);
    return u != NULL;
}

/* dw = the gradient of w for the convolutions that winograd_f32 takes: G^T (sum over tiles of A g A^T * B^T x B) G */
int winograd_filters_f32(const window *s, size n, size channels, size filters, const float *x, const float *g, float *dw)
{
    const tiling t = plan_tiles(s, n, channels, filters, 0);
    const size across = t.tiles[1], step = t.step, taps = t.edge - 1, kernel = s->kernel[0], lines = ratio_up(channels, LINE);
    const size pairs = ratio_up(step * step * channels, WIDE), sum_size = filters * t.source_row + WIDE;
    const size x_size = t.rows * across * t.source_row + WIDE, g_size = t.rows * across * t.result_row + WIDE;
    float *sums = malloc(t.products * (sum_size + x_size + g_size) * sizeof(float));
    float *v = sums + t.products * sum_size, *z = v + t.products * x_size;
    for (size first = 0; sums && first < n * t.tiles[0]; first += t.rows) {
        const size rows = least(t.rows, n * t.tiles[0] - first);
        transform_block(&t, 0, t.first[0][0], t.first[1][0], first, rows, x, v, x_size);
        transform_block(&t, 1, 0, 0, first, rows, g, z, g_size);
        PARALLEL(t.products * rows * across * filters * channels)
        for (size i = 0; i < t.products * pairs; i++) {
            const size p = i / pairs, c = i % pairs * WIDE;
            multiply(filters, rows * across, z + p * g_size, 1, t.result_row, v + p * x_size + c, t.source_row,
                     sums + p * sum_size + c, t.source_row, first > 0);
        }
    }
    PARALLEL(sums ? t.products * filters * channels : 0)
    for (size i = 0; i < (sums ? filters * lines : 0); i++) {
        const size k = i / lines, c = i % lines * LINE;
        for (size phase = 0; phase < step * step; phase++) {
            const float *from = sums + k * t.source_row + phase * channels + c;
            float e[9 * LINE];
            if (taps == 3)
                transform_tile(of_filter_sums, 4, 3, from, 4 * sum_size, sum_size, e, 3 * LINE, LINE);
            else
                transform_tile(of_small_products, 3, 2, from, 3 * sum_size, sum_size, e, 2 * LINE, LINE);
            for (size j = 0; j < least(LINE, channels - c); j++)
                for (size tap = 0; tap < taps * taps; tap++) {
                    const size down = tap / taps * step + phase / step, right = tap % taps * step + phase % step;
                    dw[((k * channels + c + j) * kernel + down) * kernel + right] = e[tap * LINE + j];
                }
        }
    }
    free(sums);
    return sums != NULL;
}
