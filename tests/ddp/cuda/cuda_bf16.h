// The upper half of a float, rounded to even.
#pragma once
#include <string.h>

struct __nv_bfloat16 {
    unsigned short bits;
    __nv_bfloat16() = default;
    __nv_bfloat16(float x) {
        unsigned whole;
        memcpy(&whole, &x, 4);
        bits = x != x ? (unsigned short)(whole >> 16 | 64) : (unsigned short)((whole + 0x7fff + (whole >> 16 & 1)) >> 16);
    }
    operator float() const {
        unsigned whole = (unsigned)bits << 16;
        float x;
        memcpy(&x, &whole, 4);
        return x;
    }
};
