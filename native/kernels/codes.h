// Formats whose weights are a small number times a scale: stored rows -> bf16 tiles of the numbers, and the scales beside them.
//
// w = d v + p, with v exact in bf16. A tile holds v alone; d and p are applied to the sums of a group (kernels/gemm_codes.h), so no
// weight is ever rounded. A tile row may hold its 32 numbers in any order as long as the panel holds x in the same one (`order_of`),
// so every format takes the order its bits fall out in, and small numbers are looked up in a register that holds all of them.
//
// A format is a struct with SPAN (weights of a stored block), GROUP (steps of 32 that share d and p), PLUS (whether there is a p)
// and `values`, which converts step j of a block. Its scales come one a block, `one` (the first four bytes of sixteen blocks at a
// time), or eight a block, `eight` (eight d, then eight p).
#pragma once
#include "dequant.h"
#include "kscales.h"
#include "tiles.h"
#include <bit>

namespace MOORAGE_ISA {

constexpr int BLOCK_ROWS = 32;                     // weight rows converted together
constexpr int STEP_BYTES = BLOCK_ROWS * DEPTH * 2; // one step of them, high or low

// Which of 32 elements stands at word p of a tile row.
enum class Order { NATURAL, HALVES, PARITY, QUARTERS, SIXTEENS };
constexpr Order order_of(Format f) {
    switch (f) {
    case Format::BF16:
    case Format::F8_E4M3: return Order::NATURAL;
    case Format::Q4_0:
    case Format::Q4_1:
    case Format::Q5_0:
    case Format::Q5_1:
    case Format::IQ4_NL:
    case Format::IQ4_XS:
    case Format::MXFP4: return Order::QUARTERS;
    case Format::Q4_K:
    case Format::Q5_K: return Order::PARITY;
    case Format::NVFP4:
    case Format::NVFP4_SCALED: return Order::SIXTEENS;
    default: return Order::HALVES;
    }
}
constexpr int element_at(Order o, int p) {
    const int lane = p / 8, w = p % 8;
    switch (o) {
    case Order::HALVES: return p / 2 + p % 2 * 16;
    case Order::PARITY: return p % 16 * 2 + p / 16;
    case Order::QUARTERS: return lane / 2 * 16 + w * 2 + lane % 2;
    case Order::SIXTEENS: return w / 4 * 16 + w % 4 * 2 + lane % 2 + lane / 2 * 8;
    default: return p;
    }
}

// Upper 16 bits of a's and b's floats, word by word in turn: order HALVES.
inline __m512i uppers(__m512 a, __m512 b) {
    return _mm512_mask_blend_epi16(0xaaaaaaaau, _mm512_srli_epi32((__m512i)a, 16), (__m512i)b);
}
inline __m512 ints(__m128i bytes) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)); }
inline __m512i signed_bytes(__m128i first, __m128i second) { return uppers(ints(first), ints(second)); }

// Sixteen small numbers as bf16, each twice: bits 4..1 of a word look one up, whatever bit 0 is.
struct alignas(64) Table {
    uint16_t at[32];
    constexpr explicit Table(int first) : at() {
        for (int i = 0; i < 32; i++) at[i] = bf16((float)(first + i / 2));
    }
    constexpr explicit Table(const int8_t* values) : at() {
        for (int i = 0; i < 32; i++) at[i] = bf16((float)values[i / 2]);
    }
    static constexpr uint16_t bf16(float f) { return (uint16_t)(std::bit_cast<uint32_t>(f) >> 16); }
    __m512i operator[](__m512i index) const { return _mm512_permutexvar_epi16(index, _mm512_load_si512(at)); }
};
inline constexpr Table FROM_0(0), FROM_16(16), FROM_MINUS_8(-8), FROM_MINUS_16(-16), OF_IQ4(IQ4_VALUES), OF_E2M1(E2M1_DOUBLED);

template <int A, int B, int C, int D> inline __m512i each_quarter() {
    const __m512i ab = _mm512_inserti32x4(_mm512_set1_epi16(A), _mm_set1_epi16(B), 1);
    return _mm512_inserti32x4(_mm512_inserti32x4(ab, _mm_set1_epi16(C), 2), _mm_set1_epi16(D), 3);
}
inline __m512i rotate(__m512i words, __m512i by) { return _mm512_shldv_epi16(words, words, by); }
// 16 bytes of nibbles -> bits 4..1: a word holds the low and high nibble of a byte, then those of the next, from its low bits up.
inline __m512i nibbles16(const uint8_t* qs) {
    return rotate(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)qs)), each_quarter<1, 9, 13, 5>());
}
// 32 bytes, their low (n = 0) or high nibbles, order PARITY.
inline __m512i nibbles32(const uint8_t* qs, int n) {
    const __m512i words = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i*)qs));
    return rotate(words, n ? each_quarter<13, 13, 5, 5>() : each_quarter<1, 1, 9, 9>());
}
inline __m512i both(const Table& low, const Table& high, __mmask32 fifth, __m512i index) {
    return _mm512_mask_permutexvar_epi16(low[index], fifth, index, _mm512_load_si512(high.at));
}
// Bits of 32 elements -> the same bits in order QUARTERS.
inline __mmask32 quarters(const uint8_t* p) {
    const uint32_t bits = u32(p), even = __builtin_ia32_pext_si(bits, 0x55555555), odd = __builtin_ia32_pext_si(bits, 0xaaaaaaaa);
    return (even & 0xff) | (odd & 0xff) << 8 | (even & 0xff00) << 8 | (odd & 0xff00) << 16;
}

inline __m512 low_halves(__m512i words) { return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(words)); }
inline __m512 half_all(const uint8_t* p) { // reads 8 bytes; a block is longer
    return _mm512_broadcastss_ps(_mm_cvtph_ps(_mm_loadl_epi64((const __m128i*)p)));
}

template <Format> struct Codes { // others go by their float32 values (kernels/dequant_tiles.h)
    static constexpr bool HELD = false;
};

template <int WEIGHTS, int STEPS = 1, bool P = false> struct Coded {
    static constexpr bool HELD = true, PLUS = P, EIGHT = WEIGHTS == 256;
    static constexpr int SPAN = WEIGHTS, GROUP = STEPS;
};
struct HalfScale { // d alone, in front
    static void one(__m512i raw, __m512& d, __m512&) { d = low_halves(raw); }
};
struct TwoHalves { // d, p
    static void one(__m512i raw, __m512& d, __m512& p) { d = low_halves(raw), p = low_halves(_mm512_srli_epi32(raw, 16)); }
};
struct FloatScale {
    static void one(__m512i raw, __m512& d, __m512&) { d = (__m512)raw; }
};

template <> struct Codes<Format::Q8_0> : Coded<32>, HalfScale {
    static __m512i values(const uint8_t* b, int) {
        const __m128i* q = (const __m128i*)(b + 2);
        return signed_bytes(_mm_loadu_si128(q), _mm_loadu_si128(q + 1));
    }
};
template <> struct Codes<Format::Q4_0> : Coded<32>, HalfScale {
    static __m512i values(const uint8_t* b, int) { return FROM_MINUS_8[nibbles16(b + 2)]; }
};
template <> struct Codes<Format::Q4_1> : Coded<32, 1, true>, TwoHalves {
    static __m512i values(const uint8_t* b, int) { return FROM_0[nibbles16(b + 4)]; }
};
template <> struct Codes<Format::Q5_0> : Coded<32>, HalfScale {
    static __m512i values(const uint8_t* b, int) { return both(FROM_MINUS_16, FROM_0, quarters(b + 2), nibbles16(b + 6)); }
};
template <> struct Codes<Format::Q5_1> : Coded<32, 1, true>, TwoHalves {
    static __m512i values(const uint8_t* b, int) { return both(FROM_0, FROM_16, quarters(b + 4), nibbles16(b + 8)); }
};
template <> struct Codes<Format::IQ4_NL> : Coded<32>, HalfScale {
    static __m512i values(const uint8_t* b, int) { return OF_IQ4[nibbles16(b + 2)]; }
};
template <> struct Codes<Format::MXFP4> : Coded<32> {
    static void one(__m512i raw, __m512& d, __m512&) {
        const __m512i e = _mm512_and_si512(raw, _mm512_set1_epi32(255)), small = _mm512_sllv_epi32(_mm512_set1_epi32(0x00200000), e);
        const __m512i usual = _mm512_slli_epi32(_mm512_sub_epi32(e, _mm512_set1_epi32(1)), 23);
        d = (__m512)_mm512_mask_mov_epi32(usual, _mm512_cmplt_epi32_mask(e, _mm512_set1_epi32(2)), small);
    }
    static __m512i values(const uint8_t* b, int) { return OF_E2M1[nibbles16(b + 1)]; }
};

// Q4_K and Q5_K: the 6-bit numbers of all eight scales and minima at once.
struct KScales {
    static void eight(const uint8_t* b, float* s) {
        const __m512 numbers = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(k_numbers(_mm_loadu_si128((const __m128i*)b))));
        const __m512 scale = _mm512_mask_sub_ps(half_all(b), 0xff00, _mm512_setzero_ps(), half_all(b + 2)); // minima are subtracted
        _mm512_store_ps(s, scale * numbers);
    }
};
template <> struct Codes<Format::Q4_K> : Coded<256, 1, true>, KScales {
    static __m512i values(const uint8_t* b, int j) { return FROM_0[nibbles32(b + 16 + j / 2 * 32, j & 1)]; }
};
template <> struct Codes<Format::Q5_K> : Coded<256, 1, true>, KScales {
    static __m512i values(const uint8_t* b, int j) {
        const __m512i bit = _mm512_inserti64x4(_mm512_set1_epi16((short)(1 << j)), _mm256_set1_epi16((short)(256 << j)), 1);
        const __mmask32 fifth = _mm512_test_epi16_mask(_mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i*)(b + 16))), bit);
        return both(FROM_0, FROM_16, fifth, nibbles32(b + 48 + j / 2 * 32, j & 1));
    }
};
template <> struct Codes<Format::IQ4_XS> : Coded<256> {
    static void eight(const uint8_t* b, float* s) {
        for (int j = 0; j < 8; j++) s[j] = scale_iq4_xs(b, j);
    }
    static __m512i values(const uint8_t* b, int j) { return OF_IQ4[nibbles16(b + 8 + 16 * j)]; }
};

// Magnitudes of 32 numbers with the four times seven sign bits of a word.
struct alignas(64) SignTable { // seven bits -> eight, an even number of them set
    uint8_t at[128];
    constexpr SignTable() : at() {
        for (int i = 0; i < 128; i++) at[i] = (uint8_t)(i | (std::popcount((unsigned)i) & 1) << 7);
    }
};
inline constexpr SignTable SIGNS;
inline __m512i signed_magnitudes(uint64_t a, uint64_t b, uint64_t c, uint64_t d, uint32_t signs) {
    const __mmask32 minus = SIGNS.at[signs & 127] | SIGNS.at[signs >> 7 & 127] << 8 | SIGNS.at[signs >> 14 & 127] << 16 |
                            (uint32_t)SIGNS.at[signs >> 21 & 127] << 24;
    const __m256i m = _mm256_set_epi64x((long long)d, (long long)c, (long long)b, (long long)a);
    const __m256i q = _mm256_mask_sub_epi8(m, minus, _mm256_setzero_si256(), m);
    return signed_bytes(_mm256_castsi256_si128(q), _mm256_extracti128_si256(q, 1));
}
template <> struct Codes<Format::IQ2_XXS> : Coded<256> {
    static void eight(const uint8_t* b, float* s) {
        const float d = half(b);
        for (int j = 0; j < 8; j++) s[j] = d * (0.5f + (float)(b[2 + 8 * j + 7] >> 4)) * 0.25f;
    }
    static __m512i values(const uint8_t* b, int j) {
        const uint8_t* p = b + 2 + 8 * j;
        const uint64_t* grid = IQ2_XXS_GRID.at;
        return signed_magnitudes(grid[p[0]], grid[p[1]], grid[p[2]], grid[p[3]], u32(p + 4));
    }
};
template <> struct Codes<Format::IQ3_XXS> : Coded<256> {
    static void eight(const uint8_t* b, float* s) {
        const float d = half(b);
        for (int j = 0; j < 8; j++) s[j] = d * (0.5f + (float)(b[66 + 4 * j + 3] >> 4)) * 0.5f;
    }
    static __m512i values(const uint8_t* b, int j) {
        const uint8_t* p = b + 2 + 8 * j;
        const auto pair = [p](int i) { return IQ3_XXS_GRID.at[p[i]] | IQ3_XXS_GRID.at[p[i + 1]] << 32; };
        return signed_magnitudes(pair(0), pair(2), pair(4), pair(6), u32(b + 66 + 4 * j));
    }
};

// e2m1 times e4m3: six significant bits, exact in bf16, so that only the scale of the whole matrix is left.
struct alignas(64) HalfE4m3 {
    float at[256];
    constexpr HalfE4m3() : at() {
        for (int x = 0; x < 256; x++) {
            float v = (float)((x & 7) + (x >> 3 & 15 ? 8 : 0)) / 1024.0f; // 2^-6 of the least exponent, times a half, over eight
            for (int e = x >> 3 & 15; e > 1; e--) v *= 2;
            at[x] = x == 0x7f ? 0 : v;
        }
    }
};
inline constexpr HalfE4m3 E4M3_HALF;
inline __m512i sixteens(const uint8_t* scales, const uint8_t* qs) {
    const __m512 numbers = _mm512_set_ps(-12, -8, -6, -4, -3, -2, -1, 0, 12, 8, 6, 4, 3, 2, 1, 0);
    const __m512 first = numbers * _mm512_set1_ps(E4M3_HALF.at[scales[0]]), second = numbers * _mm512_set1_ps(E4M3_HALF.at[scales[1]]);
    const __m512i index = _mm512_or_si512(nibbles16(qs), _mm512_set1_epi16(1)); // the upper word of a float
    return _mm512_mask_permutexvar_epi16(_mm512_permutexvar_epi16(index, (__m512i)first), 0xf0f0f0f0, index, (__m512i)second);
}
template <> struct Codes<Format::NVFP4> : Coded<64, 2> {
    static void one(__m512i, __m512& d, __m512&) { d = _mm512_set1_ps(1); }
    static __m512i values(const uint8_t* b, int j) { return sixteens(b + 2 * j, b + 4 + 16 * j); }
};
template <> struct Codes<Format::NVFP4_SCALED> : Coded<128, 4>, FloatScale {
    static __m512i values(const uint8_t* b, int j) { return Codes<Format::NVFP4>::values(b + 4 + j / 2 * 36, j & 1); }
};
struct alignas(64) Subnormals {
    uint16_t at[32];
    constexpr Subnormals() : at() {
        for (int i = 0; i < 8; i++) at[i] = Table::bf16((float)i / 512.0f);
    }
};
inline constexpr Subnormals E4M3_SUBNORMAL;
template <> struct Codes<Format::F8_E4M3> : Coded<128, 4>, FloatScale {
    static __m512i values(const uint8_t* b, int j) {
        // Exponent and mantissa move to their places, the exponent's bias grows by 120; the eight subnormals are looked up.
        const __m512i w = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i*)(b + 4 + 32 * j)));
        const __m512i number = _mm512_slli_epi16(_mm512_and_si512(w, _mm512_set1_epi16(0x7f)), 4);
        const __m512i normal = _mm512_add_epi16(number, _mm512_set1_epi16(120 << 7));
        const __mmask32 tiny = _mm512_testn_epi16_mask(w, _mm512_set1_epi16(0x78));
        const __m512i all = _mm512_mask_permutexvar_epi16(normal, tiny, _mm512_and_si512(w, _mm512_set1_epi16(7)), _mm512_load_si512(E4M3_SUBNORMAL.at));
        return _mm512_or_si512(all, _mm512_slli_epi16(_mm512_and_si512(w, _mm512_set1_epi16(0x80)), 8));
    }
};

} // namespace MOORAGE_ISA
