// Readers of block formats with AVX-512 (see kernels/groups.h): tables of sixteen values, looked up by lane.
#pragma once
#include "kscales.h"

namespace MOORAGE_ISA {

inline F lanes(__m512 v) {
    F f;
    f.r[0] = (VF)v;
    return f;
}
struct alignas(64) Sixteen { // small numbers as floats
    float at[16];
    constexpr explicit Sixteen(int first, int period = 16) : at() {
        for (int i = 0; i < 16; i++) at[i] = (float)(first + i % period);
    }
    constexpr explicit Sixteen(const int8_t* values) : at() {
        for (int i = 0; i < 16; i++) at[i] = (float)values[i];
    }
    __m512 times(float d) const { return _mm512_mul_ps(_mm512_set1_ps(d), _mm512_load_ps(at)); }
};
inline constexpr Sixteen UP_0(0), UP_16(16), UP_MINUS_8(-8), UP_MINUS_16(-16), UP_IQ4(IQ4_VALUES), UP_E2M1(E2M1_DOUBLED);
inline constexpr Sixteen QUARTERS_0(0, 4), QUARTERS_MINUS_4(-4, 4);

inline __m512i dwords(const uint8_t* p) { return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)); }
inline __m512i dwords(__m128i bytes) { return _mm512_cvtepi8_epi32(bytes); }
inline F pick(__m512 table, __m512i index) { return lanes(_mm512_permutexvar_ps(index, table)); }
inline F pick(__m512 low, __m512 high, __mmask16 which, __m512i index) {
    return lanes(_mm512_mask_permutexvar_ps(_mm512_permutexvar_ps(index, low), which, index, high));
}
// 16 bytes of nibbles: low ones first, then high ones.
inline void pick_both(__m512 table, const uint8_t* qs, F& a, F& b) {
    const __m512i w = dwords(qs);
    a = pick(table, w), b = pick(table, _mm512_srli_epi32(w, 4));
}

// Words `bytes` apart, in two pieces of 64 bytes that begin at 0 and at `second`: the index that a two-source permutation takes.
struct alignas(64) Apart {
    uint16_t at[32];
    constexpr Apart(int bytes, int second, int first, int count) : at() {
        for (int i = 0; i < count; i++) {
            const int byte = i * bytes + first;
            at[i] = (uint16_t)(byte + 2 <= 64 ? byte / 2 : 32 + (byte - second) / 2);
        }
    }
};
template <int BYTES, int AT, int COUNT> struct Words {
    static constexpr int SECOND = COUNT == 8 ? 4 * BYTES : 4 * BYTES - 64 < 2 * BYTES ? 4 * BYTES - 64 : 2 * BYTES;
    static constexpr Apart INDEX{BYTES, SECOND, AT, COUNT};
    static __m128i of(const uint8_t* b) { // loads reach at most the end of the last block
        const __m512i first = _mm512_loadu_si512(b), second = _mm512_loadu_si512(b + SECOND);
        return _mm512_castsi512_si128(_mm512_permutex2var_epi16(first, _mm512_load_si512(INDEX.at), second));
    }
};
// The words at AT of eight blocks of BYTES. Insertions one by one would cost as much as the products of a block.
template <int BYTES, int AT> inline __m128i eight_words(const uint8_t* b) {
    if constexpr (3 * BYTES + AT + 2 <= 64)
        return Words<BYTES, AT, 8>::of(b);
    else
        return _mm_unpacklo_epi64(Words<BYTES, AT, 4>::of(b), Words<BYTES, AT, 4>::of(b + 4 * BYTES));
}

// The float16 in front of eight blocks of BYTES, at offset AT, as floats; fewer when the row ends.
template <int BYTES, int AT> inline void eight_halves(const uint8_t* b, int64_t left, float* to) {
    if (left >= 8)
        _mm256_store_ps(to, _mm256_cvtph_ps(eight_words<BYTES, AT>(b)));
    else
        for (int64_t i = 0; i < left; i++) to[i] = half(b + i * BYTES + AT);
}

// Formats of 32-weight blocks. PLUS: a second half follows the first.
template <Format FORMAT, bool PLUS = false> struct SmallBlocks {
    static constexpr int BYTES = FORMATS[(int)FORMAT].bytes, UNROLL = 1;
    const uint8_t* row;
    int64_t groups;
    alignas(32) float d[8], m[PLUS ? 8 : 1];

    SmallBlocks(Format, const uint8_t* p, int64_t cols) : row(p), groups(cols / GROUP) {}
    void begin(int64_t g) {
        eight_halves<BYTES, 0>(row + g * BYTES, groups - g, d);
        if (PLUS) eight_halves<BYTES, 2>(row + g * BYTES, groups - g, m);
    }
};

struct ReaderQ8_0 : SmallBlocks<Format::Q8_0> {
    using SmallBlocks::SmallBlocks;
    void group(int64_t g, F& a, F& b) {
        const uint8_t* p = row + g * BYTES + 2;
        const F scale = splat(d[g & 7]);
        a = load_i8((const int8_t*)p) * scale, b = load_i8((const int8_t*)p + 16) * scale;
    }
};
struct ReaderQ4_0 : SmallBlocks<Format::Q4_0> {
    using SmallBlocks::SmallBlocks;
    void group(int64_t g, F& a, F& b) {
        const uint8_t* p = row + g * BYTES;
        pick_both(UP_MINUS_8.times(d[g & 7]), p + 2, a, b);
    }
};
struct ReaderIQ4_NL : SmallBlocks<Format::IQ4_NL> {
    using SmallBlocks::SmallBlocks;
    void group(int64_t g, F& a, F& b) {
        const uint8_t* p = row + g * BYTES;
        pick_both(UP_IQ4.times(d[g & 7]), p + 2, a, b);
    }
};
struct ReaderQ4_1 : SmallBlocks<Format::Q4_1, true> {
    using SmallBlocks::SmallBlocks;
    void group(int64_t g, F& a, F& b) {
        const uint8_t* p = row + g * BYTES;
        pick_both(_mm512_add_ps(UP_0.times(d[g & 7]), _mm512_set1_ps(m[g & 7])), p + 4, a, b);
    }
};
struct ReaderQ5_0 : SmallBlocks<Format::Q5_0> {
    using SmallBlocks::SmallBlocks;
    void group(int64_t g, F& a, F& b) {
        const uint8_t* p = row + g * BYTES;
        const __m512 low = UP_MINUS_16.times(d[g & 7]), high = UP_0.times(d[g & 7]);
        const uint32_t fifth = u32(p + 2);
        const __m512i w = dwords(p + 6);
        a = pick(low, high, (__mmask16)fifth, w), b = pick(low, high, (__mmask16)(fifth >> 16), _mm512_srli_epi32(w, 4));
    }
};
struct ReaderQ5_1 : SmallBlocks<Format::Q5_1, true> {
    using SmallBlocks::SmallBlocks;
    void group(int64_t g, F& a, F& b) {
        const uint8_t* p = row + g * BYTES;
        const __m512 plus = _mm512_set1_ps(m[g & 7]);
        const __m512 low = _mm512_add_ps(UP_0.times(d[g & 7]), plus), high = _mm512_add_ps(UP_16.times(d[g & 7]), plus);
        const uint32_t fifth = u32(p + 4);
        const __m512i w = dwords(p + 8);
        a = pick(low, high, (__mmask16)fifth, w), b = pick(low, high, (__mmask16)(fifth >> 16), _mm512_srli_epi32(w, 4));
    }
};
struct ReaderMXFP4 : SmallBlocks<Format::MXFP4> {
    using SmallBlocks::SmallBlocks;
    void begin(int64_t g) {
        const uint8_t* b = row + g * BYTES;
        if (groups - g < 8) {
            for (int i = 0; i < groups - g; i++) d[i] = e8m0_half(b[i * BYTES]);
            return;
        }
        // A scale's byte is the low one of its word where its offset is even, else the high one.
        const __m128i words = _mm_srlv_epi16(eight_words<BYTES, 0>(b), _mm_set_epi16(8, 0, 8, 0, 8, 0, 8, 0));
        const __m256i e = _mm256_and_si256(_mm256_cvtepu16_epi32(words), _mm256_set1_epi32(255)), one = _mm256_set1_epi32(1);
        const __m256i usual = _mm256_slli_epi32(_mm256_sub_epi32(e, one), 23);
        const __m256i small = _mm256_sllv_epi32(_mm256_set1_epi32(0x00200000), e);
        _mm256_store_si256((__m256i*)d, _mm256_mask_mov_epi32(usual, _mm256_cmple_epu32_mask(e, one), small));
    }
    void group(int64_t g, F& a, F& b) { pick_both(UP_E2M1.times(d[g & 7]), row + g * BYTES + 1, a, b); }
};

// Eight groups of 32 a block: their scales and minima when it begins.
template <int BLOCK_BYTES> struct BigBlocks {
    static constexpr int UNROLL = 4;
    const uint8_t* row;
    alignas(64) float d[16]; // of eight groups, then their minima; or of sixteen halves of groups
    BigBlocks(Format, const uint8_t* p, int64_t) : row(p) {}
};
struct KBlocks { // Q4_K and Q5_K
    static void scales(const uint8_t* b, float* s) {
        const __m128i raw = _mm_loadu_si128((const __m128i*)b);
        const __m512i which = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi32(1), 1);
        const __m512 both = _mm512_permutexvar_ps(which, _mm512_castps128_ps512(_mm_cvtph_ps(raw)));
        _mm512_store_ps(s, _mm512_mul_ps(both, _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(k_numbers(raw)))));
    }
};
struct ReaderQ4_K : BigBlocks<144>, KBlocks {
    using BigBlocks::BigBlocks;
    void begin(int64_t g) { scales(row + (g >> 3) * 144, d); }
    void group(int64_t g, F& a, F& b) {
        const int j = (int)(g & 7);
        const uint8_t *p = row + (g >> 3) * 144, *qs = p + 16 + j / 2 * 32;
        const __m512 table = _mm512_sub_ps(UP_0.times(d[j]), _mm512_set1_ps(d[8 + j]));
        const int by = 4 * (j & 1);
        a = pick(table, _mm512_srli_epi32(dwords(qs), by)), b = pick(table, _mm512_srli_epi32(dwords(qs + 16), by));
    }
};
struct ReaderQ5_K : BigBlocks<176>, KBlocks {
    using BigBlocks::BigBlocks;
    void begin(int64_t g) { scales(row + (g >> 3) * 176, d); }
    void group(int64_t g, F& a, F& b) {
        const int j = (int)(g & 7);
        const uint8_t *p = row + (g >> 3) * 176, *qs = p + 48 + j / 2 * 32;
        const __m512 minus = _mm512_set1_ps(d[8 + j]);
        const __m512 low = _mm512_sub_ps(UP_0.times(d[j]), minus), high = _mm512_sub_ps(UP_16.times(d[j]), minus);
        const __mmask32 fifth = _mm256_test_epi8_mask(_mm256_loadu_si256((const __m256i*)(p + 16)), _mm256_set1_epi8((char)(1 << j)));
        const int by = 4 * (j & 1);
        a = pick(low, high, (__mmask16)fifth, _mm512_srli_epi32(dwords(qs), by));
        b = pick(low, high, (__mmask16)(fifth >> 16), _mm512_srli_epi32(dwords(qs + 16), by));
    }
};
struct ReaderQ6_K : BigBlocks<210> {
    using BigBlocks::BigBlocks;
    void begin(int64_t g) {
        const uint8_t* p = row + (g >> 3) * 210;
        _mm512_store_ps(d, _mm512_mul_ps(_mm512_set1_ps(half(p + 208)), _mm512_cvtepi32_ps(dwords(_mm_loadu_si128((const __m128i*)(p + 192))))));
    }
    void group(int64_t g, F& a, F& b) {
        const int j = (int)(g & 7), upper = j / 4, q = j & 3;
        const uint8_t* p = row + (g >> 3) * 210;
        const __m256i l = _mm256_srli_epi16(_mm256_loadu_si256((const __m256i*)(p + 64 * upper + 32 * (q & 1))), q & 2 ? 4 : 0);
        const __m256i h = _mm256_slli_epi16(_mm256_srli_epi16(_mm256_loadu_si256((const __m256i*)(p + 128 + 32 * upper)), 2 * q), 4);
        const __m256i n = _mm256_or_si256(_mm256_and_si256(l, _mm256_set1_epi8(15)), _mm256_and_si256(h, _mm256_set1_epi8(48)));
        const __m256i s = _mm256_sub_epi8(n, _mm256_set1_epi8(32));
        a = lanes(_mm512_cvtepi32_ps(dwords(_mm256_castsi256_si128(s)))) * splat(d[2 * j]);
        b = lanes(_mm512_cvtepi32_ps(dwords(_mm256_extracti128_si256(s, 1)))) * splat(d[2 * j + 1]);
    }
};
struct ReaderQ2_K : BigBlocks<84> {
    using BigBlocks::BigBlocks;
    alignas(64) float m[16];
    void begin(int64_t g) {
        const uint8_t* p = row + (g >> 3) * 84;
        const __m512i s = dwords(p);
        _mm512_store_ps(d, _mm512_mul_ps(_mm512_set1_ps(half(p + 80)), _mm512_cvtepi32_ps(_mm512_and_si512(s, _mm512_set1_epi32(15)))));
        _mm512_store_ps(m, _mm512_mul_ps(_mm512_set1_ps(half(p + 82)), _mm512_cvtepi32_ps(_mm512_srli_epi32(s, 4))));
    }
    void group(int64_t g, F& a, F& b) {
        const int j = (int)(g & 7);
        const uint8_t *p = row + (g >> 3) * 84, *qs = p + 16 + j / 4 * 32;
        const auto table = [&](int i) { return _mm512_sub_ps(QUARTERS_0.times(d[i]), _mm512_set1_ps(m[i])); };
        const int by = 2 * (j % 4);
        a = pick(table(2 * j), _mm512_srli_epi32(dwords(qs), by)), b = pick(table(2 * j + 1), _mm512_srli_epi32(dwords(qs + 16), by));
    }
};
struct ReaderQ3_K : BigBlocks<110> {
    using BigBlocks::BigBlocks;
    void begin(int64_t g) {
        const uint8_t* p = row + (g >> 3) * 110;
        for (int i = 0; i < 16; i++) d[i] = half(p + 108) * (float)scale_q3_k(p + 96, i);
    }
    void group(int64_t g, F& a, F& b) {
        const int j = (int)(g & 7);
        const uint8_t *p = row + (g >> 3) * 110, *qs = p + 32 + j / 4 * 32;
        const __mmask32 set = _mm256_test_epi8_mask(_mm256_loadu_si256((const __m256i*)p), _mm256_set1_epi8((char)(1 << j)));
        const int by = 2 * (j % 4);
        const auto half16 = [&](int i, __mmask16 which, const uint8_t* q) {
            return pick(QUARTERS_MINUS_4.times(d[i]), QUARTERS_0.times(d[i]), which, _mm512_srli_epi32(dwords(q), by));
        };
        a = half16(2 * j, (__mmask16)set, qs), b = half16(2 * j + 1, (__mmask16)(set >> 16), qs + 16);
    }
};
inline __m256 eight_scales_iq4_xs(const uint8_t* p) {
    const __m256i fours = _mm256_set_epi32(28, 24, 20, 16, 12, 8, 4, 0), twos = _mm256_srli_epi32(fours, 1);
    const __m256i low = _mm256_and_si256(_mm256_srlv_epi32(_mm256_set1_epi32((int)u32(p + 4)), fours), _mm256_set1_epi32(15));
    const __m256i high = _mm256_and_si256(_mm256_srlv_epi32(_mm256_set1_epi32(u16(p + 2)), twos), _mm256_set1_epi32(3));
    const __m256i number = _mm256_sub_epi32(_mm256_or_si256(low, _mm256_slli_epi32(high, 4)), _mm256_set1_epi32(32));
    return _mm256_mul_ps(_mm256_set1_ps(half(p)), _mm256_cvtepi32_ps(number));
}
struct ReaderIQ4_XS : BigBlocks<136> {
    using BigBlocks::BigBlocks;
    void begin(int64_t g) {
        _mm256_store_ps(d, eight_scales_iq4_xs(row + (g >> 3) * 136));
    }
    void group(int64_t g, F& a, F& b) {
        const int j = (int)(g & 7);
        const uint8_t* p = row + (g >> 3) * 136;
        pick_both(UP_IQ4.times(d[j]), p + 8 + 16 * j, a, b);
    }
};

// Eight bytes: the low nibbles first, then the high ones.
inline F sixteen_e2m1(const uint8_t* qs, __m512 table) {
    const __m512i shift = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi32(4), 1);
    long long bytes;
    memcpy(&bytes, qs, 8);
    return pick(table, _mm512_srlv_epi32(_mm512_cvtepu8_epi32(_mm_set1_epi64x(bytes)), shift));
}
// Sixteen e4m3_half: the bits of a half that is 2^-8 of a number.
inline __m512 sixteen_scales(__m128i bytes) {
    const __mmask16 number = _mm_cmpneq_epi8_mask(bytes, _mm_set1_epi8(0x7f));
    const __m256i bits = _mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_and_si128(bytes, _mm_set1_epi8(0x7f))), 7);
    return _mm512_maskz_mul_ps(number, _mm512_cvtph_ps(bits), _mm512_set1_ps(128.0f));
}
struct ReaderNVFP4 {
    static constexpr int UNROLL = 2;
    const uint8_t* row;
    int64_t blocks;
    alignas(64) float d[16];
    ReaderNVFP4(Format, const uint8_t* p, int64_t cols) : row(p), blocks(cols / 64) {}
    void begin(int64_t g) {
        const uint8_t* p = row + (g >> 1) * 36;
        const auto four = [&](int i) { return (int)u32(p + ((g >> 1) + i < blocks ? 36 * i : 0)); };
        _mm512_store_ps(d, sixteen_scales(_mm_set_epi32(four(3), four(2), four(1), four(0))));
    }
    void group(int64_t g, F& a, F& b) const {
        const uint8_t* p = row + (g >> 1) * 36 + 4 + 16 * (g & 1);
        const float* s = d + 2 * (g & 7);
        a = sixteen_e2m1(p, UP_E2M1.times(s[0])), b = sixteen_e2m1(p + 8, UP_E2M1.times(s[1]));
    }
};
struct ReaderNVFP4_SCALED {
    static constexpr int UNROLL = 4;
    const uint8_t* row;
    int64_t blocks;
    alignas(64) float d[16];
    ReaderNVFP4_SCALED(Format, const uint8_t* p, int64_t cols) : row(p), blocks(cols / 128) {}
    void begin(int64_t g) {
        const uint8_t *p = row + (g >> 2) * 76, *q = p + ((g >> 2) + 1 < blocks ? 76 : 0);
        _mm512_store_ps(d, sixteen_scales(_mm_set_epi32((int)u32(q + 40), (int)u32(q + 4), (int)u32(p + 40), (int)u32(p + 4))));
    }
    void group(int64_t g, F& a, F& b) const {
        const uint8_t *p = row + (g >> 2) * 76, *qs = p + 4 + (g >> 1 & 1) * 36 + 4 + 16 * (g & 1);
        const float* s = d + 2 * (g & 7);
        const __m512 all = _mm512_set1_ps(f32(p)); // number times scale is exact: times `all` before or after the lookup is the same
        a = sixteen_e2m1(qs, _mm512_mul_ps(UP_E2M1.times(s[0]), all)), b = sixteen_e2m1(qs + 8, _mm512_mul_ps(UP_E2M1.times(s[1]), all));
    }
};
struct ReaderF8_E4M3 {
    static constexpr int UNROLL = 4;
    const uint8_t* row;
    int64_t blocks;
    float d[2];
    bool odd; // one of the two blocks holds a NaN, or its scale overflows with the 2^120 of `sixteen`
    ReaderF8_E4M3(Format, const uint8_t* p, int64_t cols) : row(p), blocks(cols / 128) {}
    void begin(int64_t g) {
        const uint8_t *p = row + (g >> 2) * 132, *q = (g >> 2) + 1 < blocks ? p + 132 : p;
        const __m512i low = _mm512_set1_epi8(0x7f);
        const auto number = [&](const uint8_t* at) { return _mm512_and_si512(_mm512_loadu_si512(at), low); };
        const __m512i most = _mm512_max_epu8(_mm512_max_epu8(number(p + 4), number(p + 68)), _mm512_max_epu8(number(q + 4), number(q + 68)));
        d[0] = f32(p) * 0x1p120f, d[1] = f32(q) * 0x1p120f;
        odd = _mm512_cmpeq_epi8_mask(most, low) != 0 || !(__builtin_isfinite(d[0]) && __builtin_isfinite(d[1]));
    }
    static F sixteen(const uint8_t* q, F scale) { // the bits of a float that is 2^-120 of it, subnormal where it is
        const __m512i w = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)q));
        return lanes((__m512)_mm512_and_si512(_mm512_slli_epi32(w, 20), _mm512_set1_epi32((int)0x87f00000))) * scale;
    }
    void group(int64_t g, F& a, F& b) const {
        const uint8_t* p = row + (g >> 2) * 132 + 4 + (g & 3) * GROUP;
        const F scale = splat(d[g >> 2 & 1]);
        a = sixteen(p, scale), b = sixteen(p + 16, scale);
    }
    __attribute__((noinline)) void odd_group(int64_t g, F& a, F& b) const {
        float v[GROUP];
        part_f8(row + (g >> 2) * 132, (int)(g & 3), v);
        a = load(v), b = load(v + 16);
    }
};

template <> struct Best<Format::Q8_0> { using Reader = ReaderQ8_0; };
template <> struct Best<Format::Q4_0> { using Reader = ReaderQ4_0; };
template <> struct Best<Format::IQ4_NL> { using Reader = ReaderIQ4_NL; };
template <> struct Best<Format::Q4_1> { using Reader = ReaderQ4_1; };
template <> struct Best<Format::Q5_0> { using Reader = ReaderQ5_0; };
template <> struct Best<Format::Q5_1> { using Reader = ReaderQ5_1; };
template <> struct Best<Format::MXFP4> { using Reader = ReaderMXFP4; };
template <> struct Best<Format::Q4_K> { using Reader = ReaderQ4_K; };
template <> struct Best<Format::Q5_K> { using Reader = ReaderQ5_K; };
template <> struct Best<Format::Q6_K> { using Reader = ReaderQ6_K; };
template <> struct Best<Format::Q2_K> { using Reader = ReaderQ2_K; };
template <> struct Best<Format::Q3_K> { using Reader = ReaderQ3_K; };
template <> struct Best<Format::IQ4_XS> { using Reader = ReaderIQ4_XS; };
template <> struct Best<Format::NVFP4> { using Reader = ReaderNVFP4; };
template <> struct Best<Format::NVFP4_SCALED> { using Reader = ReaderNVFP4_SCALED; };
template <> struct Best<Format::F8_E4M3> { using Reader = ReaderF8_E4M3; };

} // namespace MOORAGE_ISA
