// out = x W^T for formats of small whole numbers with AVX2: exact integer sums of a group.
//
// Numerics: as kernels/gemm_integers.h has them. 32 values of x become whole numbers X = round(x 2^e) in three signed digits of DIGIT bits:
// |X| <= 2^21 with 8, 2^20 with 7. `vpmaddubsw` multiplies them by a format's unsigned numbers and adds pairs in 16 bits, where the sums of
// ADDED vectors fit; a lane's sum S of a whole group is exact in 32 bits (what overflows on the way comes back with the offset). Then
// acc = fma(d 2^-e, S, acc): eight partial sums a row, 256 weights one or two groups each, ascending; where the format has a p,
// acc = fma(p, 2^-e sum of X, acc) after each. One row of x or a thousand: the same operations.
#pragma once
#include "bytes_grids.h"
#include "steps.h"

namespace MOORAGE_ISA {

constexpr int ROUND = 16; // rows of x that meet the numbers of a step: their sums and those stay in L1
constexpr int TOGETHER = 4; // weight rows that one row of x meets at once

// 256 values of x, digits in the order of a format's vectors of numbers; lane by lane what its groups' sums meet.
struct alignas(32) XStep {
    int8_t digits[3][8][32];
    float scale[2][8]; // 2^-e
    union {
        int32_t offset[2][8]; // what to take from S, since numbers are stored without sign
        float sum[2][8];      // 2^-e times the sum of X
    };
};

// 256 values as whole numbers below 2^BITS, and a scale for 32 of them.
template <int BITS> inline void whole_numbers(const float* x, int32_t* to, float* scale) {
    const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
    __m256i m[8]; // bits of magnitudes order as the magnitudes do, NaN above infinity
#pragma GCC unroll 8
    for (int g = 0; g < 8; g++) {
        m[g] = _mm256_and_si256(_mm256_loadu_si256((const __m256i*)(x + 32 * g)), magnitude);
        for (int i = 8; i < 32; i += 8)
            m[g] = _mm256_max_epu32(m[g], _mm256_and_si256(_mm256_loadu_si256((const __m256i*)(x + 32 * g + i)), magnitude));
    }
    const auto pair = [](__m256i a, __m256i b) { return _mm256_max_epu32(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b)); };
    const auto four = [&](const __m256i* a) {
        const __m256i b = pair(a[0], a[1]), c = pair(a[2], a[3]);
        return _mm256_max_epu32(_mm256_unpacklo_epi64(b, c), _mm256_unpackhi_epi64(b, c));
    };
    const __m256i low = four(m), high = four(m + 4);
    const __m256i most = _mm256_max_epu32(_mm256_permute2x128_si256(low, high, 0x20), _mm256_permute2x128_si256(low, high, 0x31)); // a lane a group
    const __m256i exponent = _mm256_srli_epi32(most, 23), bias = _mm256_set1_epi32(127);
    // 2^(BITS - 1) <= most 2^e < 2^BITS
    const __m256i e = _mm256_min_epi32(_mm256_sub_epi32(_mm256_set1_epi32(BITS - 1 + 127), exponent), _mm256_set1_epi32(126));
    alignas(32) float up[8];
    _mm256_store_si256((__m256i*)up, _mm256_slli_epi32(_mm256_add_epi32(bias, e), 23));
    _mm256_storeu_si256((__m256i*)scale, _mm256_slli_epi32(_mm256_sub_epi32(bias, e), 23));
    const __m256i top = _mm256_set1_epi32((1 << BITS) - 1), bottom = _mm256_set1_epi32(1 - (1 << BITS)); // the last half would round up to it
    for (int i = 0; i < STEP; i += 8) {
        const __m256i whole = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + i), _mm256_broadcast_ss(up + i / 32)));
        _mm256_store_si256((__m256i*)(to + i), _mm256_max_epi32(_mm256_min_epi32(whole, top), bottom));
    }
    const int odd = _mm256_movemask_ps((__m256)_mm256_cmpeq_epi32(exponent, _mm256_set1_epi32(255)));
    for (int g = 0; __builtin_expect(odd != 0, 0) && g < 8; g++)
        if (odd >> g & 1) { // not finite: so is every product
            memset(to + 32 * g, 0, 32 * sizeof *to);
            scale[g] = __builtin_nanf("");
        }
}

// Where the four weights of every dword of the vectors of numbers begin, in dwords.
template <class C> struct Order {
    uint8_t at[8][8];
    constexpr Order() : at() {
        for (int v = 0; v < 8; v++)
            for (int lane = 0; lane < 8; lane++) at[v][lane] = (uint8_t)(C::first(v, lane) / 4);
    }
};
template <class C> inline constexpr Order<C> ORDER;

// Digit 0, 1, 2 of eight whole numbers, highest first.
template <int D> inline void digits_of(__m256i c, __m256i* digit) {
    const __m256i half = _mm256_set1_epi32(1 << (D - 1));
    const __m256i b = _mm256_srai_epi32(_mm256_add_epi32(c, half), D), a = _mm256_srai_epi32(_mm256_add_epi32(b, half), D);
    digit[0] = a, digit[1] = _mm256_sub_epi32(b, _mm256_slli_epi32(a, D)), digit[2] = _mm256_sub_epi32(c, _mm256_slli_epi32(b, D));
}

template <class C> void pack_step(const float* x, XStep& to) {
    constexpr int D = C::DIGIT, VECTORS = 8 / C::PARTS;
    alignas(32) int32_t number[STEP];
    float scale[8];
    whole_numbers<3 * D - (D == 8 ? 3 : 1)>(x, number, scale);
    __m256i sums[4];
    for (int v = 0; v < 8; v++) {
        __m256i digit[4][3]; // lanes i and i + 4, which packing brings together
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            const auto fours = [&](int lane) { return _mm_load_si128((const __m128i*)(number + 4 * ORDER<C>.at[v][lane])); };
            const __m256i both = _mm256_set_m128i(fours(i + 4), fours(i));
            digits_of<D>(both, digit[i]);
            sums[i] = v % VECTORS ? _mm256_add_epi32(sums[i], both) : both;
        }
#pragma GCC unroll 3
        for (int d = 0; d < 3; d++) {
            const __m256i low = _mm256_packs_epi32(digit[0][d], digit[1][d]), high = _mm256_packs_epi32(digit[2][d], digit[3][d]);
            _mm256_store_si256((__m256i*)to.digits[d][v], _mm256_packs_epi16(low, high));
        }
        if (v % VECTORS < VECTORS - 1) continue;
        const int part = v / VECTORS;
        const __m256i sum = _mm256_hadd_epi32(_mm256_hadd_epi32(sums[0], sums[1]), _mm256_hadd_epi32(sums[2], sums[3])); // of X
        for (int lane = 0; lane < 8; lane++) to.scale[part][lane] = scale[ORDER<C>.at[v][lane] / 8];
        if (C::PLUS)
            _mm256_store_ps(to.sum[part], _mm256_mul_ps(_mm256_cvtepi32_ps(sum), _mm256_load_ps(to.scale[part])));
        else
            _mm256_store_si256((__m256i*)to.offset[part], _mm256_mullo_epi32(sum, _mm256_set1_epi32(C::OFFSET)));
    }
}

template <class C> void pack_integers(XStep* to, int64_t rows, int64_t cols, int64_t b, const float* x, const int32_t* index) {
    pack_steps(to, rows, cols, b, x, index, [](const float* from, XStep& step) { pack_step<C>(from, step); });
}

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
template <class C> inline __m256 plus(const Scales<C>& scales, const XStep& x, int part, __m256 acc) {
    if constexpr (C::PLUS > 0) return _mm256_fmadd_ps(scales.p[part], _mm256_load_ps(x.sum[part]), acc);
    if constexpr (C::PLUS < 0) return _mm256_fnmadd_ps(scales.p[part], _mm256_load_ps(x.sum[part]), acc);
    return acc;
}
template <class C> inline __m256 scaled(const Scales<C>& scales, const XStep& x, int part) {
    return _mm256_mul_ps(scales.d[part], _mm256_load_ps(x.scale[part]));
}

// Eight partial sums of one row, folded 4, 2, 1.
inline float total(__m256 a) {
    const __m128 s = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1)), t = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(t, _mm_movehdup_ps(t)));
}

// Where step s of a row lies: the last one, if it is not whole, is copied to where zeros stand behind it.
template <class C> struct Steps {
    const int64_t whole, rest, stride;
    explicit Steps(const Matrix& m) : whole(m.cols / STEP), rest(m.stride - m.cols / STEP * C::BYTES), stride(m.stride) {}
    const uint8_t* at(const uint8_t* row, int64_t s, uint8_t* last) const {
        if (__builtin_expect(s < whole, 1)) return row + s * C::BYTES;
        memset(last, 0, C::BYTES);
        memcpy(last, row + s * C::BYTES, rest);
        return last;
    }
};

// A step's lines of R rows that follow each other come nearer, in as many parts.
template <int BYTES, int R> inline __attribute__((always_inline)) void fetch(const uint8_t* at, int part) {
    constexpr int LINES = (R * BYTES + 63) / 64;
#pragma GCC unroll 8
    for (int i = part * LINES / R; i < (part + 1) * LINES / R; i++) __builtin_prefetch(at + 64 * i, 0, 2);
}

// T rows of x against rows [r0, r0 + nr): TOGETHER of them at once meet one row of x; several rows of x meet one. Sums stay in registers.
template <class C, int T>
__attribute__((noinline)) void few_rows(const Matrix& m, int64_t r0, int nr, const XStep* x, int64_t rows, const uint8_t* next, float* c) {
    constexpr int R = T == 1 ? TOGETHER : 1;
    const int64_t steps = steps_of(m.cols);
    const Steps<C> in(m);
    alignas(32) uint8_t last[C::BYTES];
    for (int r = 0; r < nr; r += R) {
        const uint8_t *base = m.data + (r0 + r) * m.stride, *line = base + TOGETHER * m.stride;
        if (r + TOGETHER >= nr) line = next ? next + (R == 1 ? r + TOGETHER - nr : 0) * m.stride : base;
        const uint8_t* row[R];
        for (int i = 0; i < R; i++) row[i] = base + (r + i < nr ? i : nr - 1 - r) * m.stride; // the last row again past the end
        __m256 acc[R][T];
#pragma GCC unroll 4
        for (int i = 0; i < R; i++)
#pragma GCC unroll 4
            for (int t = 0; t < T; t++) acc[i][t] = _mm256_setzero_ps();
        for (int64_t s = 0; s < steps; s++, line += R * C::BYTES) {
#pragma GCC unroll 4
            for (int i = 0; i < R; i++) {
                fetch<C::BYTES, R>(line, i);
                const uint8_t* b = in.at(row[i], s, last);
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
                        acc[i][t] = plus<C>(scales, step, part, _mm256_fmadd_ps(scaled<C>(scales, step, part), part_sum<C>(numbers, step, part), acc[i][t]));
                        if (T > 1) in_order();
                    }
                }
            }
        }
        for (int i = 0; i < R && r + i < nr; i++)
            for (int t = 0; t < T; t++) c[t * BLOCK + r + i] = total(acc[i][t]);
    }
}

// n rows of x, of a panel of `rows`, against rows [r0, r0 + nr): c[t * BLOCK + r].
template <class C>
__attribute__((noinline)) void integer_products(const Matrix& m, int64_t r0, int nr, const XStep* x, int64_t rows, int64_t n, const uint8_t* next, float* c) {
    if (n <= 4) {
        const auto few = n == 1 ? few_rows<C, 1> : n == 2 ? few_rows<C, 2> : n == 3 ? few_rows<C, 3> : few_rows<C, 4>;
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
