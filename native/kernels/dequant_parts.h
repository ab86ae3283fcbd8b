// Formats whose blocks are decoded 32 weights at a time: 2- and 3-bit K-quants, code books, and the 4- and 8-bit floats.
//
// `part` gives weights 32j..32j+31 of a block. Operation order is that of the `gguf` package; F8_E4M3 and NVFP4_SCALED are ours
// (a checkpoint's separate scales moved beside the numbers they belong to): value times scale, one rounding.
#pragma once
#include "../formats.h"
#include "../simd.h"
#include "grids.h"

namespace MOORAGE_ISA {

inline uint16_t u16(const uint8_t* p) {
    uint16_t h;
    memcpy(&h, p, 2);
    return h;
}
inline uint32_t u32(const uint8_t* p) {
    uint32_t h;
    memcpy(&h, p, 4);
    return h;
}
inline float f32(const uint8_t* p) { return bits_float(u32(p)); }
inline float half(const uint8_t* p) { return f16_float(u16(p)); }

constexpr int8_t IQ4_VALUES[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
constexpr int8_t E2M1_DOUBLED[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12}; // both zeros are +0, as ggml has them

// Half of 2^(e - 127): it belongs to doubled values.
inline float e8m0_half(uint8_t e) { return bits_float(e < 2 ? 0x00200000u << e : (uint32_t)(e - 1) << 23); }
// Half of an unsigned e4m3 number as ggml reads it: the sign is ignored, 0x7f is zero.
inline float e4m3_half(uint8_t x) {
    if (x == 0x7f) return 0;
    const int e = x >> 3 & 15, m = x & 7;
    return e ? bits_float((uint32_t)(e - 7 - 1 + 127) << 23 | (uint32_t)m << 20) : (float)m * 0x1p-10f;
}
// e4m3fn: no infinities, 0x7f and 0xff are NaN. As a half the bits mean 2^-8 of it, subnormals included.
inline float e4m3(uint8_t x) {
    if ((x & 0x7f) == 0x7f) return bits_float(0x7fc00000u | (uint32_t)(x & 0x80) << 24);
    return f16_float((uint16_t)((x & 0x80) << 8 | (x & 0x7f) << 7)) * 256.0f;
}

// Sixteen weights: scale times a small integer each.
inline void scaled(float d, const int8_t* q, float* out) { store(out, splat(d) * load_i8(q)); }

inline void looked_up(const int8_t* values, const uint8_t* qs, int n, int8_t* q) { // low nibbles first, then high ones
    for (int i = 0; i < n; i++) q[i] = values[qs[i] & 15], q[i + n] = values[qs[i] >> 4];
}

inline void part_q2_k(const uint8_t* b, int j, float* out) {
    const float d = half(b + 80), dmin = half(b + 82);
    uint8_t q[32];
    for (int i = 0; i < 32; i++) q[i] = b[16 + j / 4 * 32 + i] >> 2 * (j % 4) & 3;
    for (int h = 0; h < 2; h++) {
        const uint8_t s = b[2 * j + h];
        store(out + 16 * h, splat(d * (float)(s & 15)) * load_u8(q + 16 * h) - splat(dmin * (float)(s >> 4)));
    }
}

// Sixteen 6-bit scales: low halves in eight bytes, two high bits each in four more; stored plus 32.
inline int scale_q3_k(const uint8_t* s, int i) { return ((i < 8 ? s[i] & 15 : s[i - 8] >> 4) | (s[8 + i % 4] >> i / 4 * 2 & 3) << 4) - 32; }
inline void part_q3_k(const uint8_t* b, int j, float* out) {
    const float d = half(b + 108);
    int8_t q[32];
    for (int i = 0; i < 32; i++) q[i] = (int8_t)((b[32 + j / 4 * 32 + i] >> 2 * (j % 4) & 3) - (b[i] >> j & 1 ? 0 : 4));
    for (int h = 0; h < 2; h++) scaled(d * (float)scale_q3_k(b + 96, 2 * j + h), q + 16 * h, out + 16 * h);
}

// Eight magnitudes with signs: seven bits are given, the eighth makes their number even.
inline void signed8(uint64_t magnitudes, uint32_t signs, int8_t* q) {
    signs &= 127;
    signs |= (uint32_t)__builtin_parity(signs) << 7;
    for (int i = 0; i < 8; i++) {
        const int8_t m = (int8_t)(magnitudes >> 8 * i);
        q[i] = signs >> i & 1 ? (int8_t)-m : m;
    }
}
inline void part_iq2_xxs(const uint8_t* b, int j, float* out) {
    const uint8_t* p = b + 2 + 8 * j;
    const uint32_t signs = u32(p + 4);
    const float d = half(b) * (0.5f + (float)(signs >> 28)) * 0.25f;
    int8_t q[32];
    for (int i = 0; i < 4; i++) signed8(IQ2_XXS_GRID.at[p[i]], signs >> 7 * i, q + 8 * i);
    scaled(d, q, out), scaled(d, q + 16, out + 16);
}
inline void part_iq2_xs(const uint8_t* b, int j, float* out) {
    int8_t q[32];
    for (int i = 0; i < 4; i++) {
        const uint16_t code = u16(b + 2 + 8 * j + 2 * i);
        signed8(IQ2_XS_GRID.at[code & 511], code >> 9, q + 8 * i);
    }
    for (int h = 0; h < 2; h++) scaled(half(b) * (0.5f + (float)(b[66 + j] >> 4 * h & 15)) * 0.25f, q + 16 * h, out + 16 * h);
}
inline void part_iq3_xxs(const uint8_t* b, int j, float* out) {
    const uint8_t* codes = b + 2 + 8 * j;
    const uint32_t signs = u32(b + 66 + 4 * j);
    const float d = half(b) * (0.5f + (float)(signs >> 28)) * 0.5f;
    int8_t q[32];
    for (int i = 0; i < 4; i++)
        signed8(IQ3_XXS_GRID.at[codes[2 * i]] | IQ3_XXS_GRID.at[codes[2 * i + 1]] << 32, signs >> 7 * i, q + 8 * i);
    scaled(d, q, out), scaled(d, q + 16, out + 16);
}

inline void part_iq4(float d, const uint8_t* qs, const int8_t* values, float* out) {
    int8_t q[32];
    looked_up(values, qs, 16, q);
    scaled(d, q, out), scaled(d, q + 16, out + 16);
}
inline float scale_iq4_xs(const uint8_t* b, int j) {
    return half(b) * (float)(((b[4 + j / 2] >> 4 * (j & 1) & 15) | (u16(b + 2) >> 2 * j & 3) << 4) - 32);
}

inline void part_nvfp4(const uint8_t* b, int j, float* out) {
    for (int h = 0; h < 2; h++) {
        int8_t q[16];
        looked_up(E2M1_DOUBLED, b + 4 + 8 * (2 * j + h), 8, q);
        scaled(e4m3_half(b[2 * j + h]), q, out + 16 * h);
    }
}
inline void part_nvfp4_scaled(const uint8_t* b, int j, float* out) {
    part_nvfp4(b + 4 + j / 2 * 36, j & 1, out);
    const F all = splat(f32(b));
    for (int i = 0; i < 32; i += 16) store(out + i, load(out + i) * all);
}
inline void part_f8(const uint8_t* b, int j, float* out) {
    float v[32];
    for (int i = 0; i < 32; i++) v[i] = e4m3(b[4 + 32 * j + i]);
    for (int i = 0; i < 32; i += 16) store(out + i, load(v + i) * splat(f32(b)));
}

constexpr bool in_parts(Format f) { return f >= Format::Q2_K; }

inline void part(Format f, const uint8_t* b, int j, float* out) {
    switch (f) {
    case Format::Q2_K: return part_q2_k(b, j, out);
    case Format::Q3_K: return part_q3_k(b, j, out);
    case Format::IQ2_XXS: return part_iq2_xxs(b, j, out);
    case Format::IQ2_XS: return part_iq2_xs(b, j, out);
    case Format::IQ3_XXS: return part_iq3_xxs(b, j, out);
    case Format::IQ4_NL: return part_iq4(half(b), b + 2, IQ4_VALUES, out);
    case Format::IQ4_XS: return part_iq4(scale_iq4_xs(b, j), b + 8 + 16 * j, IQ4_VALUES, out);
    case Format::MXFP4: return part_iq4(e8m0_half(b[0]), b + 1, E2M1_DOUBLED, out);
    case Format::NVFP4: return part_nvfp4(b, j, out);
    case Format::NVFP4_SCALED: return part_nvfp4_scaled(b, j, out);
    case Format::F8_E4M3: return part_f8(b, j, out);
    default: __builtin_unreachable();
    }
}

} // namespace MOORAGE_ISA
