// out = x W^T for formats of 4 to 6 bits with AVX2: exact integer sums of a group.
//
// Numerics: as kernels/gemm_integers.h has them. 32 values of x become whole numbers X = round(x 2^e), |X| <= 2^21, in three digits of
// 8 bits; `vpmaddubsw` multiplies them by numbers of at most 63 and adds pairs, which fit 16 bits, and two of its sums do: a lane's sum S of
// eight products is exact in 32 bits. Then acc = fma(d 2^-e, S, acc), eight partial sums a row, pairs ascending; where the format has a p,
// acc = fma(p, 2^-e sum of X, acc) after the four pairs of a step. One row of x or a thousand: the same operations.
#pragma once
#include "bytes.h"
#include "steps.h"

namespace MOORAGE_ISA {

constexpr int UNIT = 8;   // weight rows that meet the same rows of x
constexpr int ROUND = 8;  // rows of x that meet numbers while those are in registers: their steps stay in L1
constexpr int TOGETHER = 4; // weight rows that one row of x meets at once

// 256 values of x, digits in the order of a format's vectors of numbers; lane by lane what its groups' sums meet.
struct alignas(32) XStep {
    int8_t digits[4][2][3][32];
    float scale[4][8], eighths[8]; // 2^-e: of the pairs, and of the eight groups as `spread` takes them
    union {
        int32_t offset[4][8]; // what to take from S, since numbers are stored without sign
        float sum[8];         // 2^-e times the sum of X
    };
};

// Whole numbers and the scale of 32 values.
inline float whole_numbers(const float* x, int32_t* to) {
    float most = 0;
    bool stray = false;
    for (int i = 0; i < 32; i++) most = __builtin_fabsf(x[i]) > most ? __builtin_fabsf(x[i]) : most, stray |= x[i] != x[i];
    int e = 20 + 127 - (int)(float_bits(most) >> 23); // 2^20 <= most 2^e < 2^21
    if (stray || e == 20 + 127 - 255) {               // not finite: so is every product
        memset(to, 0, 32 * sizeof *to);
        return __builtin_nanf("");
    }
    e = e < 126 ? e : 126;
    const __m256 up = _mm256_set1_ps(bits_float((uint32_t)(e + 127) << 23));
    for (int i = 0; i < 32; i += 8) _mm256_storeu_si256((__m256i*)(to + i), _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + i), up)));
    return bits_float((uint32_t)(127 - e) << 23);
}

template <class C> void pack_step(const float* x, XStep& to) {
    alignas(32) int32_t number[STEP];
    int8_t digit[3][STEP];
    float scale[8];
    int32_t fours[STEP / 4]; // sums of X
    for (int g = 0; g < 8; g++) scale[g] = whole_numbers(x + 32 * g, number + 32 * g);
    for (int k = 0; k < STEP; k++) {
        const int32_t c = number[k], b = (c + 128) >> 8, a = (b + 128) >> 8;
        digit[0][k] = (int8_t)a, digit[1][k] = (int8_t)b, digit[2][k] = (int8_t)c;
    }
    for (int k = 0; k < STEP; k += 4) fours[k / 4] = number[k] + number[k + 1] + number[k + 2] + number[k + 3];
    for (int pair = 0; pair < 4; pair++)
        for (int v = 0; v < 2; v++)
            for (int d = 0; d < 3; d++)
                for (int q = 0; q < 4; q++) memcpy(to.digits[pair][v][d] + 8 * q, digit[d] + C::piece(pair, v, q), 8);
    for (int pair = 0; pair < 4; pair++)
        for (int lane = 0; lane < 8; lane++) {
            const int first = C::piece(pair, 0, lane / 2) / 4 + lane % 2, second = C::piece(pair, 1, lane / 2) / 4 + lane % 2;
            to.scale[pair][lane] = to.eighths[pair + lane / 4 * 4] = scale[first / 8];
            if (!C::PLUS) to.offset[pair][lane] = (fours[first] + fours[second]) * C::OFFSET;
        }
    for (int j = 0; C::PLUS && j < 8; j++) {
        int32_t sum = 0;
        for (int i = 0; i < 8; i++) sum += fours[8 * C::group(j) + i];
        to.sum[j] = (float)sum * scale[C::group(j)];
    }
}

template <class C> void pack_integers(XStep* to, int64_t rows, int64_t cols, int64_t b, const float* x, const int32_t* index) {
    pack_steps(to, rows, cols, b, x, index, [](const float* from, XStep& step) { pack_step<C>(from, step); });
}

// The sums of pair `pair`'s numbers of R rows times x, without their scales. x is loaded once: loads are what is scarce.
template <class C, int R> inline __attribute__((always_inline)) void pair_sums(const __m256i (&v)[R][2], const XStep& x, int pair, __m256 (&to)[R]) {
    const __m256i one = _mm256_set1_epi16(1);
    __m256i s[R];
#pragma GCC unroll 3
    for (int d = 0; d < 3; d++) {
        const __m256i a = _mm256_load_si256((const __m256i*)x.digits[pair][0][d]), b = _mm256_load_si256((const __m256i*)x.digits[pair][1][d]);
#pragma GCC unroll 2
        for (int r = 0; r < R; r++) {
            const __m256i both = _mm256_add_epi16(_mm256_maddubs_epi16(v[r][0], a), _mm256_maddubs_epi16(v[r][1], b));
            if (d == 0) s[r] = _mm256_madd_epi16(both, _mm256_set1_epi16(256));
            if (d == 1) s[r] = _mm256_slli_epi32(_mm256_add_epi32(s[r], _mm256_madd_epi16(both, one)), 8);
            if (d == 2) s[r] = _mm256_add_epi32(s[r], _mm256_madd_epi16(both, one));
        }
    }
#pragma GCC unroll 2
    for (int r = 0; r < R; r++) {
        if (!C::PLUS) s[r] = _mm256_sub_epi32(s[r], _mm256_load_si256((const __m256i*)x.offset[pair]));
        to[r] = _mm256_cvtepi32_ps(s[r]);
    }
}
template <class C> inline __m256 plus(__m256 p, const XStep& x, __m256 acc) {
    if (C::PLUS > 0) return _mm256_fmadd_ps(p, _mm256_load_ps(x.sum), acc);
    if (C::PLUS < 0) return _mm256_fnmadd_ps(p, _mm256_load_ps(x.sum), acc);
    return acc;
}

// A step's scales; and those times 2^-e of one row of x, the same products with fewer instructions.
template <class C> inline __attribute__((always_inline)) Scales scales_of(const uint8_t* b) {
    Scales s;
    if constexpr (C::EIGHT)
        C::spread(C::eight(b, s.p), s.d);
    else
        C::sixteen(b, s.d);
    return s;
}
template <class C> inline __attribute__((always_inline)) Scales scales_of(const uint8_t* b, const XStep& x) {
    Scales s;
    if constexpr (C::EIGHT)
        C::spread(_mm256_mul_ps(C::eight(b, s.p), _mm256_load_ps(x.eighths)), s.d);
    else {
        C::sixteen(b, s.d);
        for (int pair = 0; pair < 4; pair++) s.d[pair] = _mm256_mul_ps(s.d[pair], _mm256_load_ps(x.scale[pair]));
    }
    return s;
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

// The lines of a step of TOGETHER rows that follow each other come nearer, in as many parts; how many is known when compiled, a loop whose
// length changes would be predicted wrongly once a step.
template <int BYTES, int PART> inline __attribute__((always_inline)) void fetch(const uint8_t* at) {
    constexpr int LINES = (TOGETHER * BYTES + 63) / 64, PARTS = TOGETHER / 2;
#pragma GCC unroll 8
    for (int i = PART * LINES / PARTS; i < (PART + 1) * LINES / PARTS; i++) __builtin_prefetch(at + 64 * i, 0, 2);
}

// One row of x against rows [r0, r0 + nr).
template <class C>
__attribute__((noinline)) void one_row(const Matrix& m, int64_t r0, int nr, const XStep* x, const uint8_t* next, float* c) {
    const int64_t steps = steps_of(m.cols);
    const Steps<C> in(m);
    alignas(32) uint8_t last[2][C::BYTES];
    for (int r = 0; r < nr; r += TOGETHER) {
        const uint8_t *base = m.data + (r0 + r) * m.stride, *line = r + TOGETHER < nr ? base + TOGETHER * m.stride : next ? next : base;
        const uint8_t* row[TOGETHER];
        for (int i = 0; i < TOGETHER; i++) row[i] = base + (r + i < nr ? i : nr - 1 - r) * m.stride; // the last row again past the end
        __m256 acc[TOGETHER];
        for (auto& a : acc) a = _mm256_setzero_ps();
        for (int64_t s = 0; s < steps; s++, line += TOGETHER * C::BYTES) {
            const auto rows = [&]<int I>() __attribute__((always_inline)) { // two of them
                fetch<C::BYTES, I / 2>(line);
                const uint8_t* b[2] = {in.at(row[I], s, last[0]), in.at(row[I + 1], s, last[1])};
                in_order(); // x comes from memory for every two rows: kept in registers it would be spilled
                const Scales scales[2] = {scales_of<C>(b[0], x[s]), scales_of<C>(b[1], x[s])};
#pragma GCC unroll 4
                for (int pair = 0; pair < 4; pair++) {
                    __m256i v[2][2];
                    __m256 sums[2];
                    C::numbers(b[0], pair, v[0][0], v[0][1]), C::numbers(b[1], pair, v[1][0], v[1][1]);
                    pair_sums<C>(v, x[s], pair, sums);
                    for (int i = 0; i < 2; i++) acc[I + i] = _mm256_fmadd_ps(scales[i].d[pair], sums[i], acc[I + i]);
                }
                for (int i = 0; i < 2; i++) acc[I + i] = plus<C>(scales[i].p, x[s], acc[I + i]);
            };
            rows.template operator()<0>(), rows.template operator()<2>();
        }
        for (int i = 0; i < TOGETHER && r + i < nr; i++) c[r + i] = total(acc[i]);
    }
}

// n rows of x against rows [r0, r0 + nr): c[t * BLOCK + r].
template <class C>
__attribute__((noinline)) void integer_products(const Matrix& m, int64_t r0, int nr, const XStep* x, int64_t n, const uint8_t* next, float* c) {
    if (n == 1) return one_row<C>(m, r0, nr, x, next, c);
    const int64_t steps = steps_of(m.cols);
    const Steps<C> in(m);
    alignas(32) float acc[ROUND][UNIT][8];
    alignas(32) uint8_t last[C::BYTES];
    for (int r = 0; r < nr; r += UNIT) {
        const uint8_t *base = m.data + (r0 + r) * m.stride, *line = r + UNIT < nr ? base + UNIT * m.stride : next ? next : base;
        for (int64_t t0 = 0; t0 < n; t0 += ROUND) {
            const int round = (int)(n - t0 < ROUND ? n - t0 : ROUND);
            memset(acc, 0, round * sizeof acc[0]);
            for (int64_t s = 0; s < steps; s++)
                for (int i = 0; i < UNIT && r + i < nr; i++) {
                    if (t0 == 0) {
                        const uint8_t* to = line + m.stride / steps;
                        prefetch(line, to);
                    }
                    const uint8_t* b = in.at(base + i * m.stride, s, last);
                    const Scales scales = scales_of<C>(b);
                    __m256i v[4][1][2];
#pragma GCC unroll 4
                    for (int pair = 0; pair < 4; pair++) C::numbers(b, pair, v[pair][0][0], v[pair][0][1]);
                    for (int t = 0; t < round; t++) {
                        const XStep& step = x[(t0 + t) * steps + s];
                        __m256 a = _mm256_load_ps(acc[t][i]);
#pragma GCC unroll 4
                        for (int pair = 0; pair < 4; pair++) {
                            const __m256 d = _mm256_mul_ps(scales.d[pair], _mm256_load_ps(step.scale[pair]));
                            __m256 sum[1];
                            pair_sums<C>(v[pair], step, pair, sum);
                            a = _mm256_fmadd_ps(d, sum[0], a);
                        }
                        _mm256_store_ps(acc[t][i], plus<C>(scales.p, step, a));
                    }
                }
            for (int t = 0; t < round; t++)
                for (int i = 0; i < UNIT && r + i < nr; i++) c[(t0 + t) * BLOCK + r + i] = total(_mm256_load_ps(acc[t][i]));
        }
    }
}

} // namespace MOORAGE_ISA
