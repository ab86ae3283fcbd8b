// Readers of block formats with AVX2 (see kernels/groups.h): the formats whose products are float32. Bytes are widened out of memory, the
// conversion of eight of them is one instruction; what had to be put together first goes through 32 bytes of stack.
#pragma once

namespace MOORAGE_ISA {

inline __m256i thirty_two(const uint8_t* p) { return _mm256_loadu_si256((const __m256i*)p); }
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

template <> struct Best<Format::F8_E4M3> { using Reader = ReaderF8_E4M3; };

} // namespace MOORAGE_ISA
