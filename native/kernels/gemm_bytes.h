// out = x W^T for formats of small whole numbers with AVX2: exact integer sums of a group.
//
// Numerics: as kernels/gemm_integers.h has them. 32 values of x become whole numbers X = round(x 2^e) in three signed digits of DIGIT bits:
// |X| <= 2^21 with 8, 2^20 with 7. `vpmaddubsw` multiplies them by a format's unsigned numbers and adds pairs in 16 bits, where the sums of
// ADDED vectors fit; a lane's sum S of a whole group is exact in 32 bits (what overflows on the way comes back with the offset). Then
// acc = fma(d 2^-e, S, acc): eight partial sums a row, 256 weights one or two groups each, ascending; where the format has a p,
// acc = fma(p, 2^-e sum of X, acc) after each. One row of x or a thousand: the same operations.
#pragma once
#include "bytes_row.h"

namespace MOORAGE_ISA {

constexpr int ROUND = 16; // rows of x that meet the numbers of a step: their sums and those stay in L1

// The sums of a part's numbers times x, without their scales.
template <class C>
inline __attribute__((always_inline)) __m256 part_sum(const __m256i (&numbers)[8 / C::PARTS], const XStep& x, int part) {
    constexpr int VECTORS = 8 / C::PARTS;
    const __m256i one = _mm256_set1_epi16(1), up = _mm256_set1_epi16(1 << C::DIGIT);
    __m256i sum;
#pragma GCC unroll 3
    for (int d = 0; d < 3; d++) {
#pragma GCC unroll 8
        for (int v0 = 0; v0 < VECTORS; v0 += C::ADDED) {
            __m256i words;
#pragma GCC unroll 8
            for (int v = v0; v < v0 + C::ADDED; v++) {
                const __m256i pairs = _mm256_maddubs_epi16(numbers[v], _mm256_load_si256((const __m256i*)x.digits[d][part * VECTORS + v]));
                words = v == v0 ? pairs : _mm256_add_epi16(words, pairs);
                if (C::PARTS == 1) __asm__("" : "+x"(words)); // one after the other: gcc would add in a tree and spill numbers for it
            }
            const __m256i fours = _mm256_madd_epi16(words, d ? one : up);
            sum = d == 0 && v0 == 0 ? fours : _mm256_add_epi32(sum, fours);
        }
        if (d == 1) sum = _mm256_slli_epi32(sum, C::DIGIT);
    }
    if (!C::PLUS) sum = _mm256_sub_epi32(sum, _mm256_load_si256((const __m256i*)x.offset[part]));
    return _mm256_cvtepi32_ps(sum);
}
template <class C> inline __attribute__((always_inline)) void numbers_of(const uint8_t* b, int part, __m256i* to) {
    __m256i raw[C::RAW];
    C::raw(b, part, raw);
#pragma GCC unroll 8
    for (int v = 0; v < 8 / C::PARTS; v++) to[v] = C::number(b, raw, v);
}

// T rows of x against rows [r0, r0 + nr), one after the other: so the hardware's streams follow what is read. Three or four rows of x are more than
// L1 holds and are multiplied PART steps at a time, with all rows; in between the sums are in memory.
template <class C, int T>
__attribute__((noinline)) void few_rows(const Matrix& m, int64_t r0, int nr, const XStep* x, int64_t rows, const uint8_t* next, float* c) {
    constexpr int LINES = (C::BYTES + 63) / 64;
    const int64_t steps = steps_of(m.cols), PART = T > 2 ? 4 : steps;
    const Steps<C> in(m);
    alignas(32) uint8_t last[C::BYTES];
    alignas(32) float kept[BLOCK][T][8];
    const uint8_t* base = m.data + r0 * m.stride;
    for (int64_t s0 = 0; s0 < steps; s0 += PART) {
        const int64_t end = s0 + PART < steps ? s0 + PART : steps;
        const uint8_t *here = base + s0 * C::BYTES, *then = end < steps ? here + PART * C::BYTES : next;
        for (int r = 0; r < nr; r++) {
            const uint8_t *row = base + r * m.stride, *line = rows_ahead(here, m.stride, r, nr, 1, then, PART * C::BYTES);
            __m256 acc[T];
#pragma GCC unroll 4
            for (int t = 0; t < T; t++) acc[t] = s0 ? _mm256_load_ps(kept[r][t]) : _mm256_setzero_ps();
            for (int64_t s = s0; s < end; s++, line += C::BYTES) {
#pragma GCC unroll 8
                for (int i = 0; i < LINES; i++) __builtin_prefetch(line + 64 * i, 0, 2);
                const uint8_t* b = in.at(row, s, last);
                in_order(); // x comes from memory for every row: kept in registers it would be spilled
                Scales<C> scales;
                C::scales(b, scales);
#pragma GCC unroll 2
                for (int part = 0; part < C::PARTS; part++) {
                    __m256i numbers[8 / C::PARTS];
                    numbers_of<C>(b, part, numbers);
#pragma GCC unroll 4
                    for (int t = 0; t < T; t++) {
                        const XStep& step = x[s * rows + t];
                        acc[t] = plus<C>(scales, step, part, _mm256_fmadd_ps(scaled<C>(scales, step, part), part_sum<C>(numbers, step, part), acc[t]));
                        if (T > 1) in_order();
                    }
                }
            }
#pragma GCC unroll 4
            for (int t = 0; t < T; t++)
                if (end < steps)
                    _mm256_store_ps(kept[r][t], acc[t]);
                else
                    c[t * BLOCK + r] = total(acc[t]);
        }
    }
}

// n rows of x, of a panel of `rows`, against rows [r0, r0 + nr): c[t * BLOCK + r].
template <class C>
__attribute__((noinline)) void integer_products(const Matrix& m, int64_t r0, int nr, const XStep* x, int64_t rows, int64_t n, const uint8_t* next, float* c) {
    if constexpr (Pieced<C>)
        if (n == 1) return one_row<C>(m, r0, nr, x, rows, next, c);
    if (n <= 4) {
        const auto few = n == 1 ? few_rows<C, Pieced<C> ? 2 : 1> : n == 2 ? few_rows<C, 2> : n == 3 ? few_rows<C, 3> : few_rows<C, 4>;
        return few(m, r0, nr, x, rows, next, c);
    }
    const int64_t steps = steps_of(m.cols);
    const Steps<C> in(m);
    alignas(32) float acc[ROUND][BLOCK][8];
    alignas(32) uint8_t last[C::BYTES];
    const uint8_t *base = m.data + r0 * m.stride, *line = next ? next : base;
    for (int64_t t0 = 0; t0 < n; t0 += ROUND) {
        const int round = (int)(n - t0 < ROUND ? n - t0 : ROUND);
        memset(acc, 0, round * sizeof acc[0]);
        for (int64_t s = 0; s < steps; s++)
            for (int r = 0; r < nr; r++) {
                if (t0 == 0) {
                    const uint8_t* to = line + m.stride / steps;
                    prefetch(line, to);
                }
                const uint8_t* b = in.at(base + r * m.stride, s, last);
                Scales<C> scales;
                C::scales(b, scales);
#pragma GCC unroll 2
                for (int part = 0; part < C::PARTS; part++) {
                    __m256i numbers[8 / C::PARTS];
                    numbers_of<C>(b, part, numbers);
                    for (int t = 0; t < round; t++) {
                        const XStep& step = x[s * rows + t0 + t];
                        const __m256 a = _mm256_fmadd_ps(scaled<C>(scales, step, part), part_sum<C>(numbers, step, part), _mm256_load_ps(acc[t][r]));
                        _mm256_store_ps(acc[t][r], plus<C>(scales, step, part, a));
                    }
                }
            }
        for (int t = 0; t < round; t++)
            for (int r = 0; r < nr; r++) c[(t0 + t) * BLOCK + r] = total(_mm256_load_ps(acc[t][r]));
    }
}

} // namespace MOORAGE_ISA
