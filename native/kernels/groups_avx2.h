// Readers of block formats with AVX2 (see kernels/groups.h): the formats whose products are float32. Bytes are widened out of memory, the
// conversion of eight of them is one instruction; what had to be put together first goes through 32 bytes of stack.
#pragma once

namespace MOORAGE_ISA {

struct ReaderQ8_0 {
    static constexpr int UNROLL = 1;
    const uint8_t* row;
    ReaderQ8_0(Format, const uint8_t* p, int64_t) : row(p) {}
    void begin(int64_t) const {}
    void group(int64_t g, F& a, F& b) const {
        const uint8_t* p = row + g * 34;
        const F scale = splat_half(p);
        a = load_i8((const int8_t*)p + 2) * scale, b = load_i8((const int8_t*)p + 18) * scale;
    }
    static F splat_half(const uint8_t* p) {
        const VF d = (VF)_mm256_cvtph_ps(_mm_set1_epi16((short)u16(p)));
        return {{d, d}};
    }
};

// Sixteen bytes of nibbles as 32 numbers of a table, low ones first.
inline void look_up(const uint8_t* qs, const int8_t* table, int8_t* to) {
    const __m128i q = _mm_loadu_si128((const __m128i*)qs), mask = _mm_set1_epi8(15), t = _mm_loadu_si128((const __m128i*)table);
    _mm_store_si128((__m128i*)to, _mm_shuffle_epi8(t, _mm_and_si128(q, mask)));
    _mm_store_si128((__m128i*)(to + 16), _mm_shuffle_epi8(t, _mm_and_si128(_mm_srli_epi16(q, 4), mask)));
}
struct ReaderIQ4_NL {
    static constexpr int UNROLL = 1;
    const uint8_t* row;
    ReaderIQ4_NL(Format, const uint8_t* p, int64_t) : row(p) {}
    void begin(int64_t) const {}
    void group(int64_t g, F& a, F& b) const {
        alignas(32) int8_t q[32];
        const uint8_t* p = row + g * 18;
        look_up(p + 2, IQ4_VALUES, q);
        const F scale = ReaderQ8_0::splat_half(p);
        a = load_i8(q) * scale, b = load_i8(q + 16) * scale;
    }
};
struct ReaderIQ4_XS {
    static constexpr int UNROLL = 1;
    const uint8_t* row;
    alignas(32) float d[8];
    ReaderIQ4_XS(Format, const uint8_t* p, int64_t) : row(p) {}
    void begin(int64_t g) {
        const uint8_t* p = row + (g >> 3) * 136;
        const __m256i fours = _mm256_set_epi32(28, 24, 20, 16, 12, 8, 4, 0), twos = _mm256_srli_epi32(fours, 1);
        const __m256i low = _mm256_and_si256(_mm256_srlv_epi32(_mm256_set1_epi32((int)u32(p + 4)), fours), _mm256_set1_epi32(15));
        const __m256i high = _mm256_and_si256(_mm256_srlv_epi32(_mm256_set1_epi32(u16(p + 2)), twos), _mm256_set1_epi32(3));
        const __m256i number = _mm256_sub_epi32(_mm256_or_si256(low, _mm256_slli_epi32(high, 4)), _mm256_set1_epi32(32));
        _mm256_store_ps(d, _mm256_mul_ps(_mm256_set1_ps(half(p)), _mm256_cvtepi32_ps(number)));
    }
    void group(int64_t g, F& a, F& b) const {
        alignas(32) int8_t q[32];
        look_up(row + (g >> 3) * 136 + 8 + 16 * (g & 7), IQ4_VALUES, q);
        const F scale = splat(d[g & 7]);
        a = load_i8(q) * scale, b = load_i8(q + 16) * scale;
    }
};
// Sixteen groups of 16 a block: their scales when it begins.
template <int BLOCK_BYTES> struct Halves {
    static constexpr int UNROLL = 8;
    const uint8_t* row;
    alignas(32) float d[16];
    Halves(Format, const uint8_t* p, int64_t) : row(p) {}
    const uint8_t* block(int64_t g) const { return row + (g >> 3) * BLOCK_BYTES; }
    void give(__m256i numbers, int j, F& a, F& b) const {
        alignas(32) int8_t q[32];
        _mm256_store_si256((__m256i*)q, numbers);
        a = load_i8(q) * splat(d[2 * j]), b = load_i8(q + 16) * splat(d[2 * j + 1]);
    }
};
inline __m256i thirty_two(const uint8_t* p) { return _mm256_loadu_si256((const __m256i*)p); }
struct ReaderQ3_K : Halves<110> {
    using Halves::Halves;
    void begin(int64_t g) {
        const uint8_t* p = block(g);
        for (int i = 0; i < 16; i++) d[i] = half(p + 108) * (float)scale_q3_k(p + 96, i);
    }
    void group(int64_t g, F& a, F& b) const {
        const int j = (int)(g & 7);
        const uint8_t* p = block(g);
        const __m256i low = _mm256_and_si256(_mm256_srli_epi16(thirty_two(p + 32 + j / 4 * 32), 2 * (j % 4)), _mm256_set1_epi8(3));
        const __m256i bit = _mm256_set1_epi8((char)(1 << j)), clear = _mm256_cmpeq_epi8(_mm256_and_si256(thirty_two(p), bit), _mm256_setzero_si256());
        give(_mm256_sub_epi8(low, _mm256_and_si256(clear, _mm256_set1_epi8(4))), j, a, b);
    }
};
struct ReaderQ2_K : Halves<84> {
    using Halves::Halves;
    alignas(32) float m[16];
    void begin(int64_t g) {
        const uint8_t* p = block(g);
        for (int i = 0; i < 16; i++) d[i] = half(p + 80) * (float)(p[i] & 15), m[i] = half(p + 82) * (float)(p[i] >> 4);
    }
    void group(int64_t g, F& a, F& b) const {
        const int j = (int)(g & 7);
        give(_mm256_and_si256(_mm256_srli_epi16(thirty_two(block(g) + 16 + j / 4 * 32), 2 * (j % 4)), _mm256_set1_epi8(3)), j, a, b);
        a = a - splat(m[2 * j]), b = b - splat(m[2 * j + 1]);
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
        const __m256i sign = _mm256_set1_epi8((char)0x80), nan = _mm256_set1_epi8((char)0xff);
        __m256i most = _mm256_setzero_si256();
        for (int i = 0; i < 4; i++) {
            most = _mm256_max_epu8(most, _mm256_or_si256(thirty_two(p + 4 + 32 * i), sign));
            most = _mm256_max_epu8(most, _mm256_or_si256(thirty_two(q + 4 + 32 * i), sign));
        }
        d[0] = f32(p) * 0x1p120f, d[1] = f32(q) * 0x1p120f;
        odd = _mm256_movemask_epi8(_mm256_cmpeq_epi8(most, nan)) != 0 || !(__builtin_isfinite(d[0]) && __builtin_isfinite(d[1]));
    }
    static F sixteen(const uint8_t* q, F scale) { // the bits of a float that is 2^-120 of it, subnormal where it is
        F f;
        MOORAGE_EACH {
            const __m256i w = _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(q + 8 * i_)));
            f.r[i_] = (VF)_mm256_and_si256(_mm256_slli_epi32(w, 20), _mm256_set1_epi32((int)0x87f00000));
        }
        return f * scale;
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
template <> struct Best<Format::IQ4_NL> { using Reader = ReaderIQ4_NL; };
template <> struct Best<Format::IQ4_XS> { using Reader = ReaderIQ4_XS; };
template <> struct Best<Format::Q2_K> { using Reader = ReaderQ2_K; };
template <> struct Best<Format::Q3_K> { using Reader = ReaderQ3_K; };
template <> struct Best<Format::F8_E4M3> { using Reader = ReaderF8_E4M3; };

} // namespace MOORAGE_ISA
