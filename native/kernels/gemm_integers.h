// out = x W^T for formats whose weights are small whole numbers times scales, with VNNI (AVX-512): exact integer sums of a group.
//
// Numerics: 32 values of x become whole numbers X = round(x 2^e), |X| <= 2^21, with the e of the largest of them: what is rounded away
// is at most 2^-21 of it, as float32 sums of such products lose too. X = 2^16 a + 2^8 b + c with a, b, c of 8 bits, and `vpdpbusd`
// multiplies numbers of 8 bits by 8 bits and adds exactly: a group's sum S of number times X is exact in 32 bits, in whatever order.
// Then acc = fma(d 2^-e, S, acc), and where the format has a p, acc = fma(p, 2^-e sum of X, acc): groups ascending, eight partial sums
// a row (sixteen where groups have 16 weights), folded at the end. One row of x or a thousand: the same operations.
#pragma once
#include "integers.h"
#include "steps.h"

namespace MOORAGE_ISA {

constexpr int UNIT = 8;  // weight rows that are read together
constexpr int ROUND = 8; // rows of x that meet numbers while those are in registers: their steps stay in L1

// 256 values of x, digits in the order of a format's vectors of numbers; lane by lane what its groups' sums meet.
struct alignas(64) XStep {
    int8_t digits[4][3][64];
    float scale[16]; // 2^-e
    union {
        int32_t offset[16]; // what to take from S, since numbers are stored without sign
        float sum[16];      // 2^-e times the sum of X
    };
    int32_t low[16]; // of WIDE formats: `offset` is of 2^8 a + b, this of c
};

// Whole numbers and the scale of 32 values.
inline float whole_numbers(const float* x, int32_t* to) {
    const __m512 a = _mm512_loadu_ps(x), b = _mm512_loadu_ps(x + 16);
    const float most = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(a), _mm512_abs_ps(b)));
    const int stray = _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q) | _mm512_cmp_ps_mask(b, b, _CMP_UNORD_Q);
    int e = 20 + 127 - (int)(float_bits(most) >> 23); // 2^20 <= most 2^e < 2^21
    if (stray || e == 20 + 127 - 255) {               // not finite: so is every product
        _mm512_storeu_si512(to, _mm512_setzero_si512()), _mm512_storeu_si512(to + 16, _mm512_setzero_si512());
        return __builtin_nanf("");
    }
    e = e < 126 ? e : 126;
    const __m512 up = _mm512_set1_ps(bits_float((uint32_t)(e + 127) << 23));
    _mm512_storeu_si512(to, _mm512_cvtps_epi32(_mm512_mul_ps(a, up)));
    _mm512_storeu_si512(to + 16, _mm512_cvtps_epi32(_mm512_mul_ps(b, up)));
    return bits_float((uint32_t)(127 - e) << 23);
}

template <class C> void pack_step(const float* x, XStep& to) {
    alignas(64) int32_t number[STEP];
    alignas(64) int8_t digit[3][STEP];
    float scale[8];
    int32_t sums[16], highs[16];
    for (int g = 0; g < 8; g++) scale[g] = whole_numbers(x + 32 * g, number + 32 * g);
    for (int k = 0; k < STEP; k += 16) {
        const __m512i c = _mm512_load_si512(number + k), half = _mm512_set1_epi32(128);
        const __m512i b = _mm512_srai_epi32(_mm512_add_epi32(c, half), 8), a = _mm512_srai_epi32(_mm512_add_epi32(b, half), 8);
        _mm_store_si128((__m128i*)(digit[0] + k), _mm512_cvtepi32_epi8(a));
        _mm_store_si128((__m128i*)(digit[1] + k), _mm512_cvtepi32_epi8(b));
        _mm_store_si128((__m128i*)(digit[2] + k), _mm512_cvtepi32_epi8(c));
        sums[k / 16] = _mm512_reduce_add_epi32(c), highs[k / 16] = _mm512_reduce_add_epi32(b);
    }
    for (int v = 0; v < 4; v++)
        for (int d = 0; d < 3; d++)
            for (int q = 0; q < 8; q++) memcpy(to.digits[v][d] + 8 * q, digit[d] + C::piece(v, q), 8);
    for (int lane = 0; lane < 16; lane++) {
        const int k = C::begins(lane), first = k / 16, last = first + C::GROUP / 16 - 1;
        const int sum = sums[first] + (last > first ? sums[last] : 0), high = highs[first] + (last > first ? highs[last] : 0);
        to.scale[lane] = scale[k / 32];
        if (C::PLUS)
            to.sum[lane] = (float)sum * scale[k / 32];
        else
            to.offset[lane] = (C::WIDE ? high : sum) * C::OFFSET, to.low[lane] = (sum - 256 * high) * C::OFFSET;
    }
}

template <class C> void pack_integers(XStep* to, int64_t rows, int64_t cols, int64_t b, const float* x, const int32_t* index) {
    pack_steps(to, rows, cols, b, x, index, [](const float* from, XStep& step) { pack_step<C>(from, step); });
}

// `sum` and the products of sum i's vectors with digit D of x.
template <class C, int D> inline __m512i sum_of(__m512i sum, const __m512i* w, const XStep& x, int i) {
    constexpr int N = 4 / C::SUMS;
    for (int v = N * i; v < N * i + N; v++) sum = _mm512_dpbusd_epi32(sum, w[v], _mm512_load_si512(x.digits[v][D]));
    return sum;
}

// acc + scaled sums of the two rows' numbers times x.
template <class C> inline __attribute__((always_inline)) void add_step(const __m512i (&w)[2][4], const typename C::Scales& s, const XStep& x, float* acc) {
    const __m512 down = _mm512_load_ps(x.scale);
    __m512i sums[2][C::SUMS], whole[2], low[2];
    for (int r = 0; r < 2; r++)
        for (int i = 0; i < C::SUMS; i++) {
            sums[r][i] = sum_of<C, 0>(_mm512_setzero_si512(), w[r], x, i);
            sums[r][i] = sum_of<C, 1>(_mm512_slli_epi32(sums[r][i], 8), w[r], x, i);
            if (!C::WIDE) sums[r][i] = sum_of<C, 2>(_mm512_slli_epi32(sums[r][i], 8), w[r], x, i);
        }
    C::fold(sums, whole);
    if constexpr (C::WIDE) {
        for (int r = 0; r < 2; r++)
            for (int i = 0; i < C::SUMS; i++) sums[r][i] = sum_of<C, 2>(_mm512_setzero_si512(), w[r], x, i);
        C::fold(sums, low);
    }
    for (int i = 0; i < C::HELD; i++) {
        if (!C::PLUS) whole[i] = _mm512_sub_epi32(whole[i], _mm512_load_si512(x.offset));
        __m512 a = _mm512_load_ps(acc + 16 * i), sum = _mm512_cvtepi32_ps(whole[i]);
        if constexpr (C::WIDE)
            sum = _mm512_fmadd_ps(sum, _mm512_set1_ps(256.0f), _mm512_cvtepi32_ps(_mm512_sub_epi32(low[i], _mm512_load_si512(x.low))));
        a = _mm512_fmadd_ps(_mm512_mul_ps(s.d[i], down), sum, a);
        if constexpr (C::PLUS) a = _mm512_fmadd_ps(s.p[i], _mm512_load_ps(x.sum), a);
        _mm512_store_ps(acc + 16 * i, a);
    }
}

// n rows of x against rows [r0, r0 + nr): c[t * BLOCK + r].
template <class C>
__attribute__((noinline)) void integer_products(const Matrix& m, int64_t r0, int nr, const XStep* x, int64_t rows, int64_t n, const uint8_t* next, float* c) {
    constexpr int PAIRS = UNIT / 2;
    const int64_t steps = steps_of(m.cols), whole = m.cols / STEP, rest = m.stride - whole * C::BYTES;
    const int lead = m.stride < 1024 ? 2 * UNIT : UNIT; // rows ahead that are fetched: a memory latency is 200 ns, 16 rows of Q4_0 350 at least
    alignas(64) float acc[ROUND][PAIRS][C::HELD * 16];
    alignas(64) uint8_t last[2][C::BYTES];
    for (int r = 0; r < nr; r += UNIT) {
        const uint8_t *base = m.data + (r0 + r) * m.stride, *line = base + lead * m.stride;
        if (r + lead >= nr) line = next ? next + (r + lead - nr) * m.stride : base;
        for (int64_t t0 = 0; t0 < n; t0 += ROUND) {
            const int round = (int)(n - t0 < ROUND ? n - t0 : ROUND);
            memset(acc, 0, round * sizeof acc[0]);
            for (int64_t s = 0; s < steps; s++)
                for (int pair = 0; pair < PAIRS; pair++) {
                    if (t0 == 0) {
                        const uint8_t* to = line + 2 * m.stride / steps;
                        prefetch(line, to);
                    }
                    const uint8_t* at[2];
                    for (int i = 0; i < 2; i++) {
                        const int row = r + 2 * pair + i < nr ? 2 * pair + i : nr - 1 - r; // the last row again past the end
                        at[i] = base + row * m.stride + s * C::BYTES;
                        if (s < whole) continue;
                        memset(last[i], 0, sizeof last[i]);
                        memcpy(last[i], at[i], rest);
                        at[i] = last[i];
                    }
                    __m512i w[2][4];
                    C::numbers(at[0], w[0]), C::numbers(at[1], w[1]);
                    const typename C::Scales scales(at[0], at[1]);
                    for (int t = 0; t < round; t++) add_step<C>(w, scales, x[s * rows + t0 + t], acc[t][pair]);
                }
            for (int t = 0; t < round; t++)
                for (int pair = 0; pair < PAIRS && r + 2 * pair < nr; pair++) { // a row past nr writes where nobody reads
                    float two[2];
                    C::totals(acc[t][pair], two);
                    memcpy(c + (t0 + t) * BLOCK + r + 2 * pair, two, sizeof two);
                }
        }
    }
}

} // namespace MOORAGE_ISA
