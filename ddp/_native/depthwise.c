/* Convolution of each channel with a filter of its own, and its gradients, for small images.
 *
 * A part of kernels.c. Vectors hold channels: vectors of positions along a short row would be mostly empty. Each element of
 * the result is a sum of terms, which are listed first. A term is a product: x*w for out, g*w for the gradient of x, and x*g
 * for the gradient of w, where g is the gradient of out.
 */
enum { IMAGE, FILTER, RESULT };
#define SPAN 64 /* channels that a thread takes at a time */

typedef struct {
    int32_t left, right; /* the offsets of the two factors; `right` is in w, or in out for the gradient of w */
} term;

/* Lists the terms of all sums. Those of sum i begin at terms[starts[i]] and end before terms[starts[i + 1]]. */
static void list_terms(const window *s, int written, const size *lengths, int32_t *starts, term *terms)
{
    const int back = written == IMAGE, of_filters = written == FILTER;
    const size *from = back ? s->out : s->image, *to = back ? s->image : s->out, kw = s->kernel[1];
    int32_t count = 0;
    for (size i = 0; i < lengths[written]; i++) {
        starts[i] = count;
        for (size j = 0; j < lengths[of_filters ? RESULT : FILTER]; j++) {
            const size tap = of_filters ? i : j, place = of_filters ? j : i, y = place / to[1], x = place % to[1];
            size down, right;
            const int seen = tap_offset(s, back, 0, y, tap / kw, &down) & tap_offset(s, back, 1, x, tap % kw, &right);
            down += back ? 0 : y * s->stride[0];
            right += back ? 0 : x * s->stride[1];
            if (seen && down >= 0 && down < from[0] && right >= 0 && right < from[1])
                terms[count++] = (term){(int32_t)((down * from[1] + right) * LINE), (int32_t)(j * LINE)};
        }
    }
    starts[lengths[written]] = count;
}

/* Computes the array `written`: RESULT: out; IMAGE, FILTER: the gradient of x or of w, in its place; out then holds g.
 * x: (n, channels, H, W), w: (channels, KH, KW), b: (channels,) or NULL, out: (n, channels, OH, OW) */
int depthwise_f32(const window *s, size n, size channels, int written, float *x, float *w, const float *b, float *out)
{
    const size taps = s->kernel[0] * s->kernel[1], spans = ratio_up(channels, SPAN), images = written == FILTER ? n : 1;
    const size lengths[] = {s->image[0] * s->image[1], taps, s->out[0] * s->out[1]}, length = lengths[written];
    const size filters_size = spans * SPAN * taps, own_size = 2 * LINE * (lengths[IMAGE] + lengths[RESULT] + LINE);
    const int left = written == IMAGE ? RESULT : IMAGE, right = written == FILTER ? RESULT : FILTER;
    const int threads = count_threads(n * channels * taps * lengths[RESULT]);
    float *const arrays[] = {x, w, out}, *filters = calloc(filters_size + threads * own_size, sizeof(float));
    int32_t *starts = malloc((length + 1) * sizeof(int32_t));
    term *terms = malloc(taps * lengths[RESULT] * sizeof(term));
    if (filters && starts && terms) {
        list_terms(s, written, lengths, starts, terms);
        for (size c = 0; written != FILTER && c < channels; c += LINE)
            load_planes(w + c * taps, channels - c, (size[]){1, taps}, 0, 0, 1, taps, filters + c * taps);
        ON_THREADS(threads)
        for (size i = 0; i < spans * (n / images); i++)
            for (size unit = 0; unit < images * (SPAN / LINE); unit += 2) { /* two vectors of channels */
                const size image = i / spans + unit / (SPAN / LINE), c = i % spans * SPAN + unit % (SPAN / LINE) * LINE;
                float *own[] = {filters + filters_size + omp_get_thread_num() * own_size, filters + c * taps, NULL};
                own[RESULT] = own[IMAGE] + 2 * LINE * lengths[IMAGE];
                for (int k = IMAGE; k <= RESULT; k += 2)
                    for (size at = c; k != written && at < least(c + 2 * LINE, channels); at += LINE)
                        load_planes(arrays[k] + (image * channels + at) * lengths[k], channels - at, (size[]){1, lengths[k]},
                                    0, 0, 1, lengths[k], own[k] + (at - c) * lengths[k]);
                for (size j = 0; c < channels && j < length; j++) {
                    float *to = own[written] + j * LINE;
                    line sums[2];
                    UNROLL for (int v = 0; v < 2; v++) sums[v] = written == FILTER ? LINE_AT(to + v * length * LINE) : EVERY(0);
                    for (const term *t = terms + starts[j]; t < terms + starts[j + 1]; t++)
                        UNROLL for (int v = 0; v < 2; v++)
                            sums[v] += LINE_AT(own[left] + v * lengths[left] * LINE + t->left)
                                * LINE_AT(own[right] + v * lengths[right] * LINE + t->right);
                    UNROLL for (int v = 0; v < 2; v++) LINE_AT(to + v * length * LINE) = sums[v];
                }
                for (size at = c; (written != FILTER || image == n - 1) && at < least(c + 2 * LINE, channels); at += LINE)
                    store_planes(own[written] + (at - c) * length, b ? b + at : NULL, channels - at, length, length,
                                 arrays[written] + ((written == FILTER ? 0 : image) * channels + at) * length);
            }
    }
    free(terms);
    free(starts);
    free(filters);
    return filters && starts && terms;
}
