// One row of x against weight rows of small whole numbers with AVX2: what the next part of a row stores is read and transposed between the products
// of this one.
//
// The products want two of Zen 3's four pipes, what brings the numbers into their dwords the two others, and 64 operations wait at most: one
// after the other they do not overlap (31 cycles for 256 weights of Q4_0, interleaved 28). gcc would sort and spill them; `here` says where they stand. The
// sums are those of `few_rows`: integers know no order.
#pragma once
#include "bytes_steps.h"

namespace MOORAGE_ISA {

inline __attribute__((always_inline)) __m256i here(__m256i v) { // computed here, neither before nor after
    __asm__ volatile("" : "+x"(v));
    return v;
}

template <class C> concept Pieced = C::RAW <= 4 && requires(const uint8_t* b) { C::row(b, 0, 0); };
template <class C> constexpr int PIECES = C::RAW == 4 ? 8 : C::ROWS == 4 ? 7 : 3;

// Piece i of `C::raw`: two instructions, three at most. t holds four registers.
template <class C> inline __attribute__((always_inline)) void piece(int i, const uint8_t* b, int part, __m256i* t) {
    const auto read = [&](int to, int row) { t[to] = here(C::row(b, part, row)); };
    const auto both = [&](int k, int l, const auto& low, const auto& high) { // of two registers: low halves to k, high ones to l
        const __m256i a = here(low(t[k], t[l]));
        t[l] = here(high(t[k], t[l])), t[k] = a;
    };
    const auto low32 = [](__m256i a, __m256i b) { return _mm256_unpacklo_epi32(a, b); }, high32 = [](__m256i a, __m256i b) { return _mm256_unpackhi_epi32(a, b); };
    const auto low64 = [](__m256i a, __m256i b) { return _mm256_unpacklo_epi64(a, b); }, high64 = [](__m256i a, __m256i b) { return _mm256_unpackhi_epi64(a, b); };
    if (i < 2) return read(i, i);
    if constexpr (C::ROWS == 2) {
        both(0, 1, [](__m256i a, __m256i b) { return dwords(a, b, 0); }, [](__m256i a, __m256i b) { return dwords(a, b, 1); });
    } else if constexpr (C::RAW == 2) {
        const auto half = [&](int k) { t[k] = here(part ? high32(t[k], t[k + 1]) : low32(t[k], t[k + 1])); };
        i == 2 ? half(0) : i == 5 ? half(1) : i == 6 ? both(0, 1, low64, high64) : read(i - 2, i - 1);
    } else {
        i == 2 ? both(0, 1, low32, high32) : i == 5 ? both(2, 3, low32, high32) : i == 6 ? both(0, 2, low64, high64) : i < 5 ? read(i - 1, i - 1) : both(1, 3, low64, high64);
        if (i == 7) {
            const __m256i one = t[1];
            t[1] = t[2], t[2] = one;
        }
    }
}
template <class C> inline __attribute__((always_inline)) void all_pieces(const uint8_t* b, __m256i* t) { // of part 0
#pragma GCC unroll 8
    for (int i = 0; i < PIECES<C>; i++) piece<C>(i, b, 0, t);
}

struct alignas(32) Words {
    int16_t at[16];
    constexpr explicit Words(int n) : at() {
        for (int16_t& w : at) w = (int16_t)n;
    }
};
inline constexpr Words ONE{1};
template <int D> inline constexpr Words UP{1 << D};

// The sums of a part's numbers times x, which are taken from t; the next part's come into t meanwhile.
template <class C> inline __attribute__((always_inline)) __m256 part_sum_then(const uint8_t* b, int part, __m256i* t, const XStep& x, const uint8_t* next, Scales<C>& scales) {
    constexpr int VECTORS = 8 / C::PARTS, FIRST = C::PARTS == 1 ? 3 : 2, EVERY = C::PARTS == 1 ? 2 : 1; // products before and between pieces, as measured
    constexpr int SCALES = C::PARTS == 1 ? 1 : 3 * VECTORS - 1;
    __m256i words[3], sum[3], then[4];
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; v++) {
        const __m256i number = here(C::number(b, t, v));
#pragma GCC unroll 3
        for (int d = 0; d < 3; d++) {
            const __m256i pairs = _mm256_maddubs_epi16(number, _mm256_load_si256((const __m256i*)x.digits[d][part * VECTORS + v]));
            words[d] = here(v % C::ADDED == 0 ? pairs : _mm256_add_epi16(words[d], pairs));
            if (v % C::ADDED == C::ADDED - 1) {
                const __m256i fours = _mm256_madd_epi16(words[d], _mm256_load_si256((const __m256i*)(d ? ONE.at : UP<C::DIGIT>.at)));
                sum[d] = v < C::ADDED ? fours : here(_mm256_add_epi32(sum[d], fours));
            }
            const int done = 3 * v + d;
            if (done >= FIRST && (done - FIRST) % EVERY == 0 && (done - FIRST) / EVERY < PIECES<C>) piece<C>((done - FIRST) / EVERY, next, (part + 1) % C::PARTS, then);
            if (done == SCALES && part == 0) C::scales(b, scales);
        }
    }
#pragma GCC unroll 4
    for (int i = 0; i < C::RAW; i++) t[i] = then[i];
    __m256i whole = _mm256_add_epi32(_mm256_slli_epi32(_mm256_add_epi32(sum[0], sum[1]), C::DIGIT), sum[2]);
    if (!C::PLUS) whole = _mm256_sub_epi32(whole, _mm256_load_si256((const __m256i*)x.offset[part]));
    return _mm256_cvtepi32_ps(whole);
}

template <class C> __attribute__((noinline)) void one_row(const Matrix& m, int64_t r0, int nr, const XStep* x, int64_t rows, const uint8_t* next, float* c) {
    constexpr int LINES = (C::BYTES + 63) / 64;
    const int64_t steps = steps_of(m.cols);
    const Steps<C> in(m);
    alignas(32) uint8_t last[2][C::BYTES]; // of a row and of the one behind it
    const uint8_t *base = m.data + r0 * m.stride, *b = in.at(base, 0, last[0]);
    __m256i t[4];
    all_pieces<C>(b, t);
    for (int r = 0; r < nr; r++) {
        const uint8_t *row = base + r * m.stride, *line = rows_ahead(base, m.stride, r, nr, 1, next);
        __m256 acc = _mm256_setzero_ps();
        for (int64_t s = 0; s < steps; s++, line += C::BYTES) {
#pragma GCC unroll 8
            for (int i = 0; i < LINES; i++) __builtin_prefetch(line + 64 * i, 0, 2);
            const uint8_t* then = s + 1 < steps ? in.at(row, s + 1, last[r % 2]) : r + 1 < nr ? in.at(row + m.stride, 0, last[1 - r % 2]) : b;
            const XStep& step = x[s * rows];
            Scales<C> scales;
#pragma GCC unroll 2
            for (int part = 0; part < C::PARTS; part++) {
                const __m256 sum = part_sum_then<C>(b, part, t, step, part + 1 < C::PARTS ? b : then, scales);
                acc = plus<C>(scales, step, part, _mm256_fmadd_ps(scaled<C>(scales, step, part), sum, acc));
            }
            b = then;
        }
        c[r] = total(acc);
    }
}

} // namespace MOORAGE_ISA
