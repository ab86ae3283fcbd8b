// What the bits of every weight format mean: blocks -> float32, in the operation order of the `gguf` package (bit-equal).
#pragma once
#include "dequant_parts.h"

namespace MOORAGE_ISA {

// 32 weights of Q4_0/Q4_1/Q5_0/Q5_1: low nibbles first, the fifth bits in `high`. `minus` makes the number signed.
inline void nibbles32(const uint8_t* qs, uint32_t high, int minus, float d, float m, bool add, float* out) {
    int8_t q[32];
    for (int j = 0; j < 16; j++) {
        q[j] = (int8_t)(((qs[j] & 15) | (high >> j & 1) << 4) - minus);
        q[j + 16] = (int8_t)(((qs[j] >> 4) | (high >> (j + 16) & 1) << 4) - minus);
    }
    for (int i = 0; i < 32; i += 16) {
        F w = splat(d) * load_i8(q + i);
        store(out + i, add ? w + splat(m) : w);
    }
}

// Scale and minimum number j of a Q4_K/Q5_K block: 8 pairs of 6-bit numbers in 12 bytes.
inline void scale_min(const uint8_t* s, int j, int& scale, int& minimum) {
    if (j < 4) {
        scale = s[j] & 63, minimum = s[j + 4] & 63;
    } else {
        scale = (s[j + 4] & 15) | (s[j - 4] >> 6) << 4;
        minimum = (s[j + 4] >> 4) | (s[j] >> 6) << 4;
    }
}

inline void block_q4_k(const uint8_t* b, float* out, bool five) {
    const float d = half(b), dmin = half(b + 2);
    const uint8_t *scales = b + 4, *qh = b + 16, *qs = b + (five ? 48 : 16);
    for (int j = 0; j < 8; j++) {
        int sc, mn;
        scale_min(scales, j, sc, mn);
        const F dl = splat(d * (float)sc), ml = splat(dmin * (float)mn);
        uint8_t q[32];
        for (int i = 0; i < 32; i++) {
            q[i] = (uint8_t)(qs[j / 2 * 32 + i] >> (j & 1 ? 4 : 0) & 15);
            if (five) q[i] |= (uint8_t)((qh[i] >> j & 1) << 4);
        }
        for (int i = 0; i < 32; i += 16) store(out + 32 * j + i, dl * load_u8(q + i) - ml);
    }
}

inline void block_q6_k(const uint8_t* b, float* out) {
    const uint8_t *ql = b, *qh = b + 128;
    const int8_t* scales = (const int8_t*)b + 192;
    const float d = half(b + 208);
    for (int n = 0; n < 2; n++) // halves of 128 weights
        for (int g = 0; g < 4; g++) {
            int8_t q[32];
            for (int i = 0; i < 32; i++) {
                const uint8_t low = ql[64 * n + 32 * (g & 1) + i] >> (g >= 2 ? 4 : 0) & 15;
                q[i] = (int8_t)((low | (qh[32 * n + i] >> 2 * g & 3) << 4) - 32);
            }
            for (int i = 0; i < 2; i++) {
                const F dl = splat(d * (float)scales[8 * n + 2 * g + i]);
                store(out + 128 * n + 32 * g + 16 * i, dl * load_i8(q + 16 * i));
            }
        }
}

inline void block(Format f, const uint8_t* b, float* out) {
    uint32_t high;
    switch (f) {
    case Format::Q8_0:
        for (int i = 0; i < 32; i += 16) store(out + i, load_i8((const int8_t*)b + 2 + i) * splat(half(b)));
        break;
    case Format::Q4_0: nibbles32(b + 2, 0, 8, half(b), 0, false, out); break;
    case Format::Q4_1: nibbles32(b + 4, 0, 0, half(b), half(b + 2), true, out); break;
    case Format::Q5_0:
        memcpy(&high, b + 2, 4);
        nibbles32(b + 6, high, 16, half(b), 0, false, out);
        break;
    case Format::Q5_1:
        memcpy(&high, b + 4, 4);
        nibbles32(b + 8, high, 0, half(b), half(b + 2), true, out);
        break;
    case Format::Q4_K: block_q4_k(b, out, false); break;
    case Format::Q5_K: block_q4_k(b, out, true); break;
    case Format::Q6_K: block_q6_k(b, out); break;
    default:
        for (int j = 0; j < info(f).elements / 32; j++) part(f, b, j, out + 32 * j);
    }
}

// Weights [first, first + n) of a stored row as float32; `first` and `n` are multiples of the format's block.
inline void dequant(Format f, const uint8_t* row, int64_t first, int64_t n, float* out) {
    if (f == Format::F32) {
        memcpy(out, row + 4 * first, 4 * n);
    } else if (f == Format::BF16 || f == Format::F16) {
        const uint16_t* p = (const uint16_t*)row + first;
        int64_t i = 0;
        if (f == Format::BF16) {
            for (; i + 16 <= n; i += 16) store(out + i, load_bf16(p + i));
            for (; i < n; i++) out[i] = bf16_float(p[i]);
        } else {
            for (; i + 16 <= n; i += 16) store(out + i, load_f16(p + i));
            for (; i < n; i++) out[i] = f16_float(p[i]);
        }
    } else {
        const FormatInfo& k = info(f);
        row += first / k.elements * k.bytes;
        for (int64_t i = 0; i < n; i += k.elements, row += k.bytes) block(f, row, out + i);
    }
}

} // namespace MOORAGE_ISA
