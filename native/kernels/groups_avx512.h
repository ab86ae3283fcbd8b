// Readers of block formats with AVX-512 (see kernels/groups.h): tables of sixteen values, looked up by lane.
#pragma once

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

// The float16 in front of eight blocks of BYTES, at offset AT, as floats; the last block again past the row's end.
template <int BYTES, int AT> inline void eight_halves(const uint8_t* b, int64_t left, float* to) {
    const auto at = [&](int i) { return (short)u16(b + (i < left ? i : 0) * BYTES + AT); };
    _mm256_store_ps(to, _mm256_cvtph_ps(_mm_set_epi16(at(7), at(6), at(5), at(4), at(3), at(2), at(1), at(0))));
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
struct ReaderMXFP4 {
    static constexpr int UNROLL = 1, BYTES = 17;
    const uint8_t* row;
    ReaderMXFP4(Format, const uint8_t* p, int64_t) : row(p) {}
    void begin(int64_t) const {}
    void group(int64_t g, F& a, F& b) const {
        const uint8_t* p = row + g * 17;
        pick_both(UP_E2M1.times(e8m0_half(p[0])), p + 1, a, b);
    }
};

// Eight groups of 32 a block: their scales and minima when it begins.
template <int BLOCK_BYTES> struct BigBlocks {
    static constexpr int UNROLL = 4, BYTES = BLOCK_BYTES / 8;
    const uint8_t* row;
    alignas(64) float d[16]; // of eight groups, then their minima; or of sixteen halves of groups
    BigBlocks(Format, const uint8_t* p, int64_t) : row(p) {}
};
struct KBlocks { // Q4_K and Q5_K
    static void scales(const uint8_t* b, float* s) {
        uint32_t a[3], n[4];
        memcpy(a, b + 4, 12);
        n[0] = a[0] & 0x3f3f3f3f;
        n[1] = (a[2] & 0x0f0f0f0f) | (a[0] >> 6 & 0x03030303) << 4;
        n[2] = a[1] & 0x3f3f3f3f;
        n[3] = (a[2] >> 4 & 0x0f0f0f0f) | (a[1] >> 6 & 0x03030303) << 4;
        const __m512 numbers = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_set_epi32((int)n[3], (int)n[2], (int)n[1], (int)n[0])));
        const __m512 both = _mm512_mask_mov_ps(_mm512_set1_ps(half(b)), 0xff00, _mm512_set1_ps(half(b + 2)));
        _mm512_store_ps(s, _mm512_mul_ps(both, numbers));
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
struct ReaderIQ4_XS : BigBlocks<136> {
    using BigBlocks::BigBlocks;
    void begin(int64_t g) {
        for (int i = 0; i < 8; i++) d[i] = scale_iq4_xs(row + (g >> 3) * 136, i);
    }
    void group(int64_t g, F& a, F& b) {
        const int j = (int)(g & 7);
        const uint8_t* p = row + (g >> 3) * 136;
        pick_both(UP_IQ4.times(d[j]), p + 8 + 16 * j, a, b);
    }
};

// Eight bytes: the low nibbles first, then the high ones.
inline F sixteen_e2m1(const uint8_t* qs, float d) {
    const __m512i shift = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi32(4), 1);
    const __m512i w = _mm512_cvtepu8_epi32(_mm_set1_epi64x((long long)(u32(qs) | (uint64_t)u32(qs + 4) << 32)));
    return pick(UP_E2M1.times(d), _mm512_srlv_epi32(w, shift));
}
struct ReaderNVFP4 {
    static constexpr int UNROLL = 2, BYTES = 18;
    const uint8_t* row;
    ReaderNVFP4(Format, const uint8_t* p, int64_t) : row(p) {}
    void begin(int64_t) const {}
    static void half_block(const uint8_t* p, int j, F& a, F& b) {
        a = sixteen_e2m1(p + 4 + 16 * j, e4m3_half(p[2 * j])), b = sixteen_e2m1(p + 12 + 16 * j, e4m3_half(p[2 * j + 1]));
    }
    void group(int64_t g, F& a, F& b) const { half_block(row + (g >> 1) * 36, (int)(g & 1), a, b); }
};
struct ReaderNVFP4_SCALED {
    static constexpr int UNROLL = 4, BYTES = 19;
    const uint8_t* row;
    ReaderNVFP4_SCALED(Format, const uint8_t* p, int64_t) : row(p) {}
    void begin(int64_t) const {}
    void group(int64_t g, F& a, F& b) const {
        const uint8_t* p = row + (g >> 2) * 76;
        ReaderNVFP4::half_block(p + 4 + (g >> 1 & 1) * 36, (int)(g & 1), a, b);
        const F all = splat(f32(p));
        a = a * all, b = b * all;
    }
};
struct ReaderF8_E4M3 {
    static constexpr int UNROLL = 4, BYTES = 33;
    const uint8_t* row;
    int64_t blocks;
    bool odd[2] = {}; // a block holds a NaN, or its scale overflows with the 2^8 of `sixteen`
    ReaderF8_E4M3(Format, const uint8_t* p, int64_t cols) : row(p), blocks(cols / 128) {}
    void begin(int64_t g) {
        const uint8_t* p = row + (g >> 2) * 132;
        for (int i = 0; i < 2 && (g >> 2) + i < blocks; i++, p += 132) odd[i] = has_nan(p + 4) || !(__builtin_fabsf(f32(p)) < 0x1p119f);
    }
    static bool has_nan(const uint8_t* p) {
        const __m512i low = _mm512_set1_epi8(0x7f), a = _mm512_loadu_si512(p), b = _mm512_loadu_si512(p + 64);
        return _mm512_cmpeq_epi8_mask(_mm512_and_si512(a, low), low) | _mm512_cmpeq_epi8_mask(_mm512_and_si512(b, low), low);
    }
    static F sixteen(const uint8_t* q, F scale) { // the bits of a half that is 2^-8 of it
        const __m256i w = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)q));
        const __m256i bits = _mm256_and_si256(_mm256_slli_epi16(w, 7), _mm256_set1_epi16((short)0xbf80));
        return lanes(_mm512_cvtph_ps(bits)) * scale;
    }
    void group(int64_t g, F& a, F& b) {
        const uint8_t* p = row + (g >> 2) * 132;
        if (odd[g >> 2 & 1]) {
            float v[GROUP];
            part_f8(p, (int)((g & 3)), v);
            a = load(v), b = load(v + 16);
            return;
        }
        const F scale = splat(f32(p) * 256.0f);
        a = sixteen(p + 4 + (g & 3) * GROUP, scale), b = sixteen(p + 20 + (g & 3) * GROUP, scale);
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
