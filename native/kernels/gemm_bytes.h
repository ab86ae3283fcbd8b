// out = x W^T for formats of small whole numbers with AVX2: exact integer sums of a group.
//
// Numerics: as kernels/gemm_integers.h has them. 32 values of x become whole numbers X = round(x 2^e) in three signed digits, two of DIGIT bits and
// one of 7: |X| <= 2^21 with 8, 2^20 with 7. `vpmaddubsw` multiplies them by a format's unsigned numbers and adds pairs in 16 bits, where the sums of
// ADDED vectors fit; a lane's sum S of a whole group is exact in 32 bits (what overflows on the way comes back with the offset). Then
// acc = fma(d 2^-e, S, acc): eight partial sums a row, 256 weights one or two groups each, ascending; where the format has a p,
// acc = fma(p, 2^-e sum of X, acc) after each. One row of x or a thousand: the same operations.
#pragma once
#include "bytes_row.h"

namespace MOORAGE_ISA {

constexpr int ROUND = 16; // rows of x that meet the numbers of a step: their sums and those stay in L1

template <class C> inline __attribute__((always_inline)) void numbers_of(const uint8_t* b, int part, __m256i* to) {
    constexpr int VECTORS = 8 / C::PARTS;
    if constexpr (Booked<C>) {
        __m256i signs[C::SIGNS];
        C::signs(b, part, signs);
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++) {
            if (v % 2 == 0) C::looked(b, part, v / 2, to + v);
            to[v] = C::number(to[v], signs, v);
        }
    } else {
        __m256i raw[C::RAW];
        C::raw(b, part, raw);
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++) to[v] = C::number(b, raw, v);
    }
}

// The sums of all numbers times x, a part each, without their scales. Parts and digits of x in turn: products meet sums that do not wait for each other.
template <class C> inline __attribute__((always_inline)) void all_sums(const __m256i (&numbers)[8], const XStep& x, __m256 (&to)[C::PARTS]) {
    constexpr int VECTORS = 8 / C::PARTS;
    __m256i words[C::PARTS][3], sum[C::PARTS][3];
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; v++)
#pragma GCC unroll 2
        for (int part = 0; part < C::PARTS; part++) {
            const int at = part * VECTORS + v;
            __m256i pairs[3];
#pragma GCC unroll 3
            for (int d = 0; d < 3; d++) pairs[d] = here(_mm256_maddubs_epi16(numbers[at], _mm256_load_si256((const __m256i*)x.digits[d][at])));
#pragma GCC unroll 3
            for (int d = 0; d < 3; d++) {
                words[part][d] = v % C::ADDED ? here(_mm256_add_epi16(words[part][d], pairs[d])) : pairs[d];
                if (v % C::ADDED < C::ADDED - 1) continue;
                const __m256i fours = here(_mm256_madd_epi16(words[part][d], _mm256_load_si256((const __m256i*)up<C>(d).at)));
                sum[part][d] = v < C::ADDED ? fours : here(_mm256_add_epi32(sum[part][d], fours));
            }
        }
#pragma GCC unroll 2
    for (int part = 0; part < C::PARTS; part++) {
        __m256i whole = _mm256_add_epi32(_mm256_add_epi32(sum[part][0], sum[part][1]), sum[part][2]);
        if (!C::PLUS) whole = _mm256_sub_epi32(whole, _mm256_load_si256((const __m256i*)x.offset[part]));
        to[part] = _mm256_cvtepi32_ps(whole);
    }
}

// acc += a step of a row of weights times T rows of x.
template <class C, int T> inline __attribute__((always_inline)) void add_step(const uint8_t* b, const XStep* x, __m256 (&acc)[T]) {
    Scales<C> scales;
    C::scales(b, scales);
    __m256i numbers[8];
#pragma GCC unroll 2
    for (int part = 0; part < C::PARTS; part++) numbers_of<C>(b, part, numbers + part * (8 / C::PARTS));
#pragma GCC unroll 4
    for (int t = 0; t < T; t++) {
        __m256 sums[C::PARTS];
        all_sums<C>(numbers, x[t], sums);
#pragma GCC unroll 2
        for (int part = 0; part < C::PARTS; part++) acc[t] = plus<C>(scales, x[t], part, _mm256_fmadd_ps(scaled<C>(scales, x[t], part), sums[part], acc[t]));
    }
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
                add_step<C>(b, x + s * rows, acc);
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

// ROUND rows of x, or fewer, against all rows of weights, a step after the other. The next step of x comes to L2 meanwhile: more than 64 rows of 2,048 columns
// are more than it holds.
template <class C>
__attribute__((noinline)) void one_round(const Matrix& m, int64_t r0, int nr, const XStep* x, int64_t rows, int round, const uint8_t* line, float* c) {
    const int64_t steps = steps_of(m.cols), more = line ? m.stride / steps : 0;
    const int64_t share = (round * (int64_t)sizeof(XStep) / nr + 63) / 64 * 64;
    const Steps<C> in(m);
    const uint8_t* base = m.data + r0 * m.stride;
    alignas(32) float acc[BLOCK][ROUND][8] = {};
    alignas(32) uint8_t last[C::BYTES];
    for (int64_t s = 0; s < steps; s++) {
        const uint8_t* soon = (const uint8_t*)(s + 1 < steps ? x + (s + 1) * rows : x + round);
        for (int r = 0; r < nr; r++) {
            prefetch(soon, soon + share);
            prefetch(line, line + more);
            const uint8_t* b = in.at(base + r * m.stride, s, last);
            Scales<C> scales;
            C::scales(b, scales);
            __m256i numbers[8];
#pragma GCC unroll 2
            for (int part = 0; part < C::PARTS; part++) numbers_of<C>(b, part, numbers + part * (8 / C::PARTS));
            for (int t = 0; t < round; t++) {
                const XStep& step = x[s * rows + t];
                __m256 a = _mm256_load_ps(acc[r][t]), sums[C::PARTS];
                all_sums<C>(numbers, step, sums);
#pragma GCC unroll 2
                for (int part = 0; part < C::PARTS; part++) a = plus<C>(scales, step, part, _mm256_fmadd_ps(scaled<C>(scales, step, part), sums[part], a));
                _mm256_store_ps(acc[r][t], a);
            }
        }
    }
    for (int t = 0; t < round; t++)
        for (int r = 0; r < nr; r += 8) eight_totals(acc[r][t], ROUND * 8, c + t * BLOCK + r); // rows past nr are zeros that nobody reads
}

// n rows of x, of a panel of `rows`, against rows [r0, r0 + nr): c[t * BLOCK + r].
template <class C>
__attribute__((noinline)) void integer_products(const Matrix& m, int64_t r0, int nr, const XStep* x, int64_t rows, int64_t n, const uint8_t* next, float* c) {
    if constexpr (Pieced<C> || Booked<C>)
        if (n == 1) return one_row<C>(m, r0, nr, x, rows, next, c);
    if (n <= 4) {
        const auto few = n == 1 ? few_rows<C, Pieced<C> || Booked<C> ? 2 : 1> : n == 2 ? few_rows<C, 2> : n == 3 ? few_rows<C, 3> : few_rows<C, 4>;
        return few(m, r0, nr, x, rows, next, c);
    }
    for (int64_t t = 0; t < n; t += ROUND) one_round<C>(m, r0, nr, x + t, rows, (int)(n - t < ROUND ? n - t : ROUND), t ? nullptr : next ? next : m.data + r0 * m.stride, c + t * BLOCK);
}

} // namespace MOORAGE_ISA
