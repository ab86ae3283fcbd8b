// The eight scales and eight minima of a Q4_K or Q5_K block as bytes.
#pragma once
#include <immintrin.h>

namespace MOORAGE_ISA {

// raw: a block's first 16 bytes, d and dmin (float16), then 6-bit numbers in three words, as scale_min (kernels/dequant.h) reads them.
inline __m128i k_numbers(__m128i raw) {
    const __m128i low = _mm_srlv_epi32(_mm_shuffle_epi32(raw, _MM_SHUFFLE(3, 2, 3, 1)), _mm_set_epi32(4, 0, 0, 0));
    const __m128i high = _mm_srli_epi32(_mm_shuffle_epi32(raw, _MM_SHUFFLE(2, 2, 1, 1)), 2);
    return _mm_or_si128(_mm_and_si128(low, _mm_set_epi32(0x0f0f0f0f, 0x3f3f3f3f, 0x0f0f0f0f, 0x3f3f3f3f)),
                        _mm_and_si128(high, _mm_set_epi32(0x30303030, 0, 0x30303030, 0)));
}

} // namespace MOORAGE_ISA
