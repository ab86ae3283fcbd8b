// Stored weight rows -> bf16 A tiles, one step of 32 k for 32 rows at a time: [32 rows][32] high parts and as many low parts of their
// float32 values. For plain floats and for block formats that kernels/codes.h does not hold as numbers times scales.
//
// A format is a struct with SPAN. SPAN 32: `weights` converts a step of one row (n real columns of plain floats). Longer: `scales`
// writes a row's sixteen numbers, `weights` converts step j with them.
#pragma once
#include "codes.h"
#include "tiles.h"

namespace MOORAGE_ISA {

inline __m512 rest(__m512 w) { return w - (__m512)_mm512_and_si512((__m512i)w, _mm512_set1_epi32((int)0xffff0000)); }
inline void put(uint8_t* high, uint8_t* low, __m512 first, __m512 second) { // order HALVES
    _mm512_store_si512(high, uppers(first, second));
    _mm512_store_si512(low, uppers(rest(first), rest(second)));
}
template <Format FORMAT> struct Tile { // any block format: through float32
    static constexpr int SPAN = FORMATS[(int)FORMAT].elements;
    static void scales(const uint8_t*, float*) {}
    static void weights(const uint8_t* b, int j, const float*, uint8_t* high, uint8_t* low) {
        alignas(64) float v[DEPTH];
        part(FORMAT, b, j, v);
        put(high, low, _mm512_load_ps(v), _mm512_load_ps(v + 16));
    }
    static void weights(const uint8_t* b, int, uint8_t* high, uint8_t* low) { weights(b, 0, nullptr, high, low); } // SPAN 32
};

template <> struct Tile<Format::BF16> {
    static constexpr int SPAN = DEPTH;
    static void weights(const uint8_t* b, int n, uint8_t* high, uint8_t*) {
        const __mmask32 live = n >= DEPTH ? ~0u : (1u << n) - 1;
        _mm512_store_si512(high, _mm512_maskz_loadu_epi16(live, b));
    }
};
template <> struct Tile<Format::F16> {
    static constexpr int SPAN = DEPTH;
    static void weights(const uint8_t* b, int n, uint8_t* high, uint8_t* low) {
        const __mmask32 live = n >= DEPTH ? ~0u : (1u << n) - 1;
        const __m512i h = _mm512_maskz_loadu_epi16(live, b);
        put(high, low, _mm512_cvtph_ps(_mm512_castsi512_si256(h)), _mm512_cvtph_ps(_mm512_extracti64x4_epi64(h, 1)));
    }
};
template <> struct Tile<Format::F32> {
    static constexpr int SPAN = DEPTH;
    static void weights(const uint8_t* b, int n, uint8_t* high, uint8_t* low) {
        const __mmask32 live = n >= DEPTH ? ~0u : (1u << n) - 1;
        put(high, low, _mm512_maskz_loadu_ps((__mmask16)live, b), _mm512_maskz_loadu_ps((__mmask16)(live >> 16), b + 64));
    }
};

template <> struct Tile<Format::Q6_K> {
    static constexpr int SPAN = 256;
    static void scales(const uint8_t* b, float* s) { _mm512_store_ps(s, _mm512_set1_ps(_cvtsh_ss(u16(b + 208))) * ints(_mm_loadu_si128((const __m128i*)(b + 192)))); }
    static void weights(const uint8_t* b, int j, const float* s, uint8_t* high, uint8_t* low) {
        const int half = j / 4, g = j & 3;
        __m256i l = _mm256_loadu_si256((const __m256i*)(b + 64 * half + 32 * (g & 1)));
        if (g >= 2) l = _mm256_srli_epi16(l, 4);
        const __m256i h = _mm256_loadu_si256((const __m256i*)(b + 128 + 32 * half));
        const __m256i up = g == 3 ? _mm256_srli_epi16(h, 2) : _mm256_slli_epi16(h, 4 - 2 * g); // its two bits at 4 and 5
        const __m256i q = _mm256_or_si256(_mm256_and_si256(l, _mm256_set1_epi8(15)), _mm256_and_si256(up, _mm256_set1_epi8(48)));
        const __m256i n = _mm256_sub_epi8(q, _mm256_set1_epi8(32));
        put(high, low, ints(_mm256_castsi256_si128(n)) * _mm512_set1_ps(s[2 * j]),
            ints(_mm256_extracti128_si256(n, 1)) * _mm512_set1_ps(s[2 * j + 1]));
    }
};

// Converts rows r0..r0+nr of a matrix step by step, in ascending order of steps. Rows past nr are left as they are: nobody
// reads their products.
//
// Every row and step also prefetches its share of the rows that come next, in address order: the hardware's streams cannot follow
// several rows inside one page, and a burst of prefetches would hold all fill buffers of L1 for a memory latency.
template <Format FORMAT> struct Steps {
    const uint8_t *base, *next;
    int64_t stride, cols;
    int rows;
    alignas(64) float s[32][16];

    Steps(const Matrix& m, int64_t r0, int nr, const uint8_t* following)
        : base(m.data + r0 * m.stride), next(following ? following : base), stride(m.stride), cols(m.cols), rows(nr) {}

    // Rows [first, last) of a step.
    inline __attribute__((always_inline)) void convert(int64_t step, int first, int last, uint8_t* high, uint8_t* low) {
        using T = Tile<FORMAT>;
        constexpr FormatInfo f = FORMATS[(int)FORMAT];
        constexpr int64_t PER_SPAN = T::SPAN / DEPTH, BYTES = T::SPAN * f.bytes / f.elements, AHEAD = BYTES / PER_SPAN;
        const int j = (int)(step % PER_SPAN), n = (int)(cols - step * DEPTH < DEPTH ? cols - step * DEPTH : DEPTH);
        const uint8_t *b = base + step / PER_SPAN * BYTES + first * stride, *ahead = next + (step * BLOCK_ROWS + first) * AHEAD;
        if (last > rows) last = rows;
        for (int r = first; r < last; r++, b += stride, ahead += AHEAD) {
            _mm_prefetch((const char*)ahead, _MM_HINT_T1);
            uint8_t *h = high + r * DEPTH * 2, *l = low + r * DEPTH * 2;
            if constexpr (T::SPAN == DEPTH) {
                T::weights(b, n, h, l);
            } else {
                if (j == 0) T::scales(b, s[r]);
                T::weights(b, j, s[r], h, l);
            }
        }
    }
};

} // namespace MOORAGE_ISA
