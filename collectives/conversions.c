/* Conversions between float32 and 16-bit floats, with the same bits as NumPy (float16) and ml_dtypes (bfloat16).
 *
 * Rounding is to nearest even. The conversions use only shifts, sums and selections, which compilers vectorize on every
 * CPU. The CPU's float16 instructions would turn signalling NaNs into quiet ones, which NumPy does not do.
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

static inline float as_float(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

static inline uint32_t as_bits(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

static inline uint32_t bf16(uint32_t x)
{
    const uint32_t nan = (x >> 16 & 0x8000) | 0x7fc0;
    const uint32_t rounded = (x + 0x7fff + (x >> 16 & 1)) >> 16;
    return (x & 0x7fffffff) > 0x7f800000 ? nan : rounded;
}

/* Exponents are biased by 127 in float32 and by 15 in float16. */
static inline float as_f32(uint16_t x)
{
    const uint32_t sign = (uint32_t)(x & 0x8000) << 16;
    const uint32_t bits = (uint32_t)(x & 0x7fff) << 13;
    /* An exponent of 31 becomes 255: infinity and NaN. */
    const uint32_t normal = bits + (bits < 0x0f800000 ? 112u << 23 : 224u << 23);
    const uint32_t subnormal = as_bits(as_float(bits + (113u << 23)) - as_float(113u << 23));
    return as_float(sign | (bits < 0x00800000 ? subnormal : normal));
}

static inline uint32_t f16(uint32_t x)
{
    const uint32_t sign = x >> 16 & 0x8000;
    const uint32_t bits = x & 0x7fffffff;
    const uint32_t normal = (bits - (112u << 23) + 0xfff + (bits >> 13 & 1)) >> 13;
    /* The sum rounds to multiples of 2^-24. */
    const uint32_t subnormal = as_bits(as_float(bits) + 0.5f) - 0x3f000000;
    const uint32_t payload = bits >> 13 & 0x3ff;
    const uint32_t nan = 0x7c00 | (payload ? payload : 1);
    uint32_t out = bits < 0x38800000 ? subnormal : normal;
    out = bits < 0x47800000 ? out : 0x7c00;
    return sign | (bits > 0x7f800000 ? nan : out);
}

void widen_f16(ptrdiff_t n, const uint16_t *__restrict__ x, float *__restrict__ out)
{
    for (ptrdiff_t i = 0; i < n; i++)
        out[i] = as_f32(x[i]);
}

void narrow_f16(ptrdiff_t n, const float *__restrict__ x, uint16_t *__restrict__ out)
{
    for (ptrdiff_t i = 0; i < n; i++)
        out[i] = (uint16_t)f16(as_bits(x[i]));
}

void narrow_bf16(ptrdiff_t n, const float *__restrict__ x, uint16_t *__restrict__ out)
{
    for (ptrdiff_t i = 0; i < n; i++)
        out[i] = (uint16_t)bf16(as_bits(x[i]));
}
