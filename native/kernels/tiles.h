// AMX tiles: configuration, and the 16 x 16 transposes that lead in and out of them.
//
// gcc 12's tile macros do not say that they touch memory, and it drops or moves the stores around them; these say it.
#pragma once
#include "../simd.h"

namespace MOORAGE_ISA {

constexpr int TILE = 16;   // rows of a tile
constexpr int DEPTH = 32;  // bf16 of a tile row: the k of one tile product
constexpr int TILE_BYTES = TILE * DEPTH * 2;

struct alignas(64) TileConfig {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t colsb[16] = {};
    uint8_t rows[16] = {};
    void shape(int tile, int columns) { colsb[tile] = (uint16_t)(4 * columns), rows[tile] = TILE; } // columns of 4 bytes
    void use() const { __asm__ volatile("ldtilecfg %0" ::"m"(*this) : "memory"); }
};

template <int T> inline void tile_load(const void* p, int64_t stride) {
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(stride), "i"(T) : "memory");
}
template <int T> inline void tile_store(void* p, int64_t stride) {
    __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(stride), "i"(T) : "memory");
}
template <int T> inline void tile_zero() { __asm__ volatile("tilezero %%tmm%c0" ::"i"(T)); }
template <int C, int A, int B> inline void tile_dot() { // C += A B
    __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}

inline void transpose16(__m512i r[16]) {
    __m512i t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; j++) {
            r[i + 2 * j] = _mm512_unpacklo_epi64(t[i + j], t[i + j + 2]);
            r[i + 2 * j + 1] = _mm512_unpackhi_epi64(t[i + j], t[i + j + 2]);
        }
    // r[4g + c] holds rows 4g..4g+3 of columns c, c+4, c+8, c+12 (one per 128-bit lane)
    for (int c = 0; c < 4; c++) {
        const __m512i a = _mm512_shuffle_i32x4(r[c], r[4 + c], 0x88), b = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0x88);
        const __m512i d = _mm512_shuffle_i32x4(r[c], r[4 + c], 0xdd), e = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0xdd);
        t[c] = _mm512_shuffle_i32x4(a, b, 0x88), t[c + 8] = _mm512_shuffle_i32x4(a, b, 0xdd);
        t[c + 4] = _mm512_shuffle_i32x4(d, e, 0x88), t[c + 12] = _mm512_shuffle_i32x4(d, e, 0xdd);
    }
    memcpy(r, t, sizeof t);
}

// Tiles of 32 weight rows x nt panel rows (tile 2g + h: row half h, column half g) -> c[t * 32 + r].
inline void transpose_block(const uint8_t* tiles, int nt, float* c) {
    for (int g = 0; TILE * g < nt; g++)
        for (int h = 0; h < 2; h++) {
            __m512i r[16];
            memcpy(r, tiles + (2 * g + h) * TILE_BYTES, TILE_BYTES);
            transpose16(r);
            for (int t = 0; t < 16; t++) _mm512_storeu_si512(c + (TILE * g + t) * 2 * TILE + TILE * h, r[t]);
        }
}

// x = high + low with |x - high - low| <= 2^-17 |x|: both halves rounded to nearest even.
inline void split_round(__m512 a, __m512 b, __m512i& high, __m512i& low) {
    const __m512i h = (__m512i)_mm512_cvtne2ps_pbh(b, a);
    const __m512 ha = (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_castsi512_si256(h)), 16);
    const __m512 hb = (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(h, 1)), 16);
    high = h, low = (__m512i)_mm512_cvtne2ps_pbh(b - hb, a - ha);
}

} // namespace MOORAGE_ISA
