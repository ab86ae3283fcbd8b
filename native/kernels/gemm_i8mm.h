// out = x W^T for formats of small whole numbers with Arm's I8MM: exact integer sums of a group.
//
// Numerics: as kernels/gemm_integers.h has them. 32 values of x become whole numbers X = round(x 2^e), |X| <= 2^21, X = 2^16 a + 2^8 b + c with digits of
// 8 bits. SMMLA multiplies eight numbers of two rows of weights by eight digits of two columns, four sums of 32 bits. Columns are the same digit of two rows of x, or
// two digits of a single one: a group's sum S is the same whole number. acc = fma(d 2^-e, S, acc), and where the format has a p
// acc = fma(p, 2^-e sum of X, acc): one sum for a row of weights and a row of x, groups ascending. One row of x or a thousand: the same
// additions.
#pragma once
#include "bytes_neon.h"
#include "steps.h"

namespace MOORAGE_ISA {

constexpr int UNIT = 8, PAIRS = UNIT / 2; // weight rows whose numbers of a group are in registers, as pairs
constexpr int ROUND = BLOCK;              // rows of x that meet a step of weights: both stay in L1
constexpr int PIECES = STEP / 8;

// 256 values of x.
struct alignas(16) XStep {
    int8_t digits[3][STEP];
    float scale[8]; // 2^-e
    int32_t sums[16]; // of sixteen X
};

inline void pack_step(const float* x, XStep& to) {
    for (int g = 0; g < 8; g++, x += 32) {
        uint32x4_t most = vdupq_n_u32(0); // bits of magnitudes order as the magnitudes do, NaN above infinity
        for (int i = 0; i < 32; i += 4) most = vmaxq_u32(most, vandq_u32(vreinterpretq_u32_f32(vld1q_f32(x + i)), vdupq_n_u32(0x7fffffff)));
        const int exponent = (int)(vmaxvq_u32(most) >> 23);
        if (exponent == 255) { // not finite: so is every product
            for (int d = 0; d < 3; d++) memset(to.digits[d] + 32 * g, 0, 32);
            to.scale[g] = __builtin_nanf(""), to.sums[2 * g] = to.sums[2 * g + 1] = 0;
            continue;
        }
        const int e = 20 + 127 - exponent < 126 ? 20 + 127 - exponent : 126; // 2^20 <= most 2^e < 2^21
        const float up = bits_float((uint32_t)(e + 127) << 23);
        to.scale[g] = bits_float((uint32_t)(127 - e) << 23);
        for (int h = 0; h < 2; h++) {
            int32x4_t c[4], b[4], a[4], sum = vdupq_n_s32(0);
            for (int i = 0; i < 4; i++) {
                c[i] = vcvtnq_s32_f32(vmulq_n_f32(vld1q_f32(x + 16 * h + 4 * i), up));
                b[i] = vrshrq_n_s32(c[i], 8), a[i] = vrshrq_n_s32(b[i], 8);
                sum = vaddq_s32(sum, c[i]);
            }
            const auto bytes = [&](const int32x4_t* v, int digit) { // the low ones
                const int16x8_t low = vcombine_s16(vmovn_s32(v[0]), vmovn_s32(v[1])), high = vcombine_s16(vmovn_s32(v[2]), vmovn_s32(v[3]));
                vst1q_s8(to.digits[digit] + 32 * g + 16 * h, vcombine_s8(vmovn_s16(low), vmovn_s16(high)));
            };
            bytes(a, 0), bytes(b, 1), bytes(c, 2);
            to.sums[2 * g + h] = vaddvq_s32(sum);
        }
    }
}

template <class C> void pack_integers(XStep* to, int64_t rows, int64_t cols, int64_t b, const float* x, const int32_t* index) {
    pack_steps(to, rows, cols, b, x, index, pack_step);
}

inline int8x16_t lower(int8x16_t a, int8x16_t b) { return (int8x16_t)vzip1q_s64((int64x2_t)a, (int64x2_t)b); }
inline int8x16_t upper(int8x16_t a, int8x16_t b) { return (int8x16_t)vzip2q_s64((int64x2_t)a, (int64x2_t)b); }

// Eight digits of two columns: of two rows of x, digit by digit; or of one, its first two digits and its last one beside nothing.
struct Columns {
    int8x16_t pieces[PIECES][3];
    float scale[8][2], sum[16][2]; // of both rows; 2^-e times the sum of X

    template <class C> void take(const XStep& x, int column) {
        for (int g = 0; g < 8; g++) scale[g][column] = x.scale[g];
        for (int g = 0; C::PLUS && g < STEP / C::GROUP; g++) {
            const int32_t whole = C::GROUP == 16 ? x.sums[g] : x.sums[2 * g] + x.sums[2 * g + 1];
            sum[g][column] = (float)whole * x.scale[g * C::GROUP / 32];
        }
    }
    void put(int j, int digit, int8x16_t a, int8x16_t b) { pieces[j][digit] = lower(a, b), pieces[j + 1][digit] = upper(a, b); }
    template <class C> void one(const XStep& x) {
        take<C>(x, 0);
        const auto at = [&](int digit, int j) { return vld1q_s8(x.digits[digit] + 8 * j); };
        for (int j = 0; j < PIECES; j += 2) put(j, 0, at(0, j), at(1, j)), put(j, 1, at(2, j), vdupq_n_s8(0));
    }
    template <class C> void two(const XStep& first, const XStep& second) {
        take<C>(first, 0), take<C>(second, 1);
        for (int j = 0; j < PIECES; j += 2)
            for (int d = 0; d < 3; d++) put(j, d, vld1q_s8(first.digits[d] + 8 * j), vld1q_s8(second.digits[d] + 8 * j));
    }
};

// A step of eight rows of weights.
struct Unit {
    int8x16_t numbers[PIECES][PAIRS];
    float d[16][UNIT], p[16][UNIT]; // of every group

    template <class C> __attribute__((noinline)) void read(const uint8_t* const* row) {
        for (int pair = 0; pair < PAIRS; pair++) {
            const Two two{row[2 * pair], row[2 * pair + 1]};
#pragma GCC unroll 2
            for (int j = 0; j < PIECES; j += 16) {
                int8x16_t some[16]; // all before the first is stored, or what they share would be read anew
#pragma GCC unroll 16
                for (int i = 0; i < 16; i++) some[i] = C::number(two, j + i);
#pragma GCC unroll 16
                for (int i = 0; i < 16; i++) numbers[j + i][pair] = some[i];
            }
        }
        for (int r = 0; r < UNIT; r++) {
            float one[16], more[16];
            C::scales(row[r], one, more);
            for (int g = 0; g < STEP / C::GROUP; g++) d[g][r] = one[g];
            for (int g = 0; C::PLUS && g < STEP / C::GROUP; g++) p[g][r] = more[g];
        }
    }
};

template <bool WIDE> inline float32x4_t joined(int32x4_t high, int32x4_t low) { // of WIDE formats: 2^8 high + low
    return WIDE ? vfmaq_n_f32(vcvtq_f32_s32(low), vcvtq_f32_s32(high), 256.0f) : vcvtq_f32_s32(low);
}

// One row of x: acc is a sum for each row of weights.
template <int GROUP, bool WIDE, bool PLUS> __attribute__((noinline)) void times_one(const Unit& w, const Columns& x, float32x4_t* to) {
    constexpr int V = GROUP / 8;
    const int32x4_t places = WIDE ? int32x4_t{8, 0, 8, 0} : int32x4_t{16, 8, 16, 8}; // of the first two digits
    float32x4_t acc[2] = {to[0], to[1]};
    for (int g = 0; g < STEP / GROUP; g++) {
        const auto numbers = &w.numbers[V * g];
        const auto digits = &x.pieces[V * g];
        int32x4_t high[PAIRS], low[PAIRS];
#pragma GCC unroll 4
        for (int i = 0; i < PAIRS; i++) high[i] = vdupq_n_s32(0);
#pragma GCC unroll 4
        for (int v = 0; v < V; v++)
#pragma GCC unroll 4
            for (int i = 0; i < PAIRS; i++) high[i] = vmmlaq_s32(high[i], numbers[v][i], digits[v][0]);
#pragma GCC unroll 4
        for (int i = 0; i < PAIRS; i++) high[i] = vshlq_s32(high[i], places), low[i] = WIDE ? vdupq_n_s32(0) : high[i];
#pragma GCC unroll 4
        for (int v = 0; v < V; v++)
#pragma GCC unroll 4
            for (int i = 0; i < PAIRS; i++) low[i] = vmmlaq_s32(low[i], numbers[v][i], digits[v][1]);
#pragma GCC unroll 2
        for (int q = 0; q < 2; q++) {
            const float32x4_t sum = joined<WIDE>(vpaddq_s32(high[2 * q], high[2 * q + 1]), vpaddq_s32(low[2 * q], low[2 * q + 1]));
            acc[q] = vfmaq_f32(acc[q], vmulq_n_f32(vld1q_f32(w.d[g] + 4 * q), x.scale[g * GROUP / 32][0]), sum);
            if (PLUS) acc[q] = vfmaq_n_f32(acc[q], vld1q_f32(w.p[g] + 4 * q), x.sum[g][0]);
        }
    }
    to[0] = acc[0], to[1] = acc[1];
}

// n pairs of rows of x: acc[t][i] is two rows of weights times two of x.
template <int GROUP, bool WIDE, bool PLUS> __attribute__((noinline)) void times_pairs(const Unit& w, const Columns* x, int n, float32x4_t (*acc)[PAIRS]) {
    constexpr int V = GROUP / 8;
    for (int g = 0; g < STEP / GROUP; g++) {
        int8x16_t numbers[V][PAIRS];
        float32x4_t d[PAIRS], p[PAIRS];
        const auto both = [](const float* two) { // a a b b
            const float32x2_t pair = vld1_f32(two);
            return vcombine_f32(vdup_lane_f32(pair, 0), vdup_lane_f32(pair, 1));
        };
#pragma GCC unroll 4
        for (int i = 0; i < PAIRS; i++) {
#pragma GCC unroll 4
            for (int v = 0; v < V; v++) numbers[v][i] = w.numbers[V * g + v][i];
            d[i] = both(w.d[g] + 2 * i);
            if (PLUS) p[i] = both(w.p[g] + 2 * i);
        }
        for (int t = 0; t < n; t++) {
            const auto digits = &x[t].pieces[V * g];
            const auto in_turn = [](const float* two) { return (float32x4_t)vld1q_dup_f64((const double*)two); };
            int32x4_t high[PAIRS], low[PAIRS];
            const auto add = [&](int32x4_t* to, int digit) __attribute__((always_inline)) {
#pragma GCC unroll 4
                for (int v = 0; v < V; v++)
#pragma GCC unroll 4
                    for (int i = 0; i < PAIRS; i++) to[i] = vmmlaq_s32(to[i], numbers[v][i], digits[v][digit]);
            };
            const auto up = [&] __attribute__((always_inline)) () {
#pragma GCC unroll 4
                for (int i = 0; i < PAIRS; i++) high[i] = vshlq_n_s32(high[i], 8);
            };
#pragma GCC unroll 4
            for (int i = 0; i < PAIRS; i++) high[i] = vdupq_n_s32(0);
            add(high, 0), up(), add(high, 1);
            if (!WIDE) up();
#pragma GCC unroll 4
            for (int i = 0; i < PAIRS; i++) low[i] = WIDE ? vdupq_n_s32(0) : high[i];
            add(low, 2);
            const float32x4_t scale = in_turn(x[t].scale[g * GROUP / 32]);
#pragma GCC unroll 4
            for (int i = 0; i < PAIRS; i++) {
                float32x4_t sum = vfmaq_f32(acc[t][i], vmulq_f32(d[i], scale), joined<WIDE>(high[i], low[i]));
                if (PLUS) sum = vfmaq_f32(sum, p[i], in_turn(x[t].sum[g]));
                acc[t][i] = sum;
            }
        }
    }
}

// n rows of x, of a panel of `rows`, against rows [r0, r0 + nr): c[t * BLOCK + r].
template <class C>
__attribute__((noinline)) void integer_products(const Matrix& m, int64_t r0, int nr, const XStep* x, int64_t rows, int64_t n, const uint8_t* next, float* c) {
    const int64_t steps = steps_of(m.cols), whole = m.cols / STEP, rest = m.stride - whole * C::BYTES;
    const uint8_t *base = m.data + r0 * m.stride, *line = next ? next : base;
    Columns columns[ROUND / 2];
    float32x4_t acc[BLOCK / UNIT][ROUND / 2][PAIRS];
    Unit unit;
    uint8_t last[UNIT][C::BYTES];
    for (int64_t t0 = 0; t0 < n; t0 += ROUND) {
        const int round = (int)(n - t0 < ROUND ? n - t0 : ROUND), pairs = (round + 1) / 2;
        memset(acc, 0, sizeof acc);
        for (int64_t s = 0; s < steps; s++) {
            const XStep* here = x + s * rows + t0;
            for (int t = 0; round > 1 && t < pairs; t++) columns[t].template two<C>(here[2 * t], here[2 * t + 1 < round ? 2 * t + 1 : 2 * t]);
            if (round == 1) columns[0].template one<C>(here[0]);
            for (int r = 0; r < nr; r += UNIT) {
                const uint8_t* row[UNIT];
                for (int i = 0; i < UNIT; i++) {
                    row[i] = base + (r + i < nr ? r + i : nr - 1) * m.stride + s * C::BYTES; // the last row again past the end
                    if (s < whole) continue;
                    memset(last[i], 0, sizeof last[i]);
                    memcpy(last[i], row[i], rest);
                    row[i] = last[i];
                }
                if (t0 == 0) {
                    const uint8_t* to = line + UNIT * m.stride / steps;
                    prefetch(line, to);
                }
                unit.template read<C>(row);
                if (round == 1)
                    times_one<C::GROUP, C::WIDE, C::PLUS>(unit, columns[0], acc[r / UNIT][0]);
                else
                    times_pairs<C::GROUP, C::WIDE, C::PLUS>(unit, columns, pairs, acc[r / UNIT]);
            }
        }
        for (int r = 0; r < nr; r += UNIT) // rows past nr write where nobody reads
            for (int t = 0; t < round; t++)
                for (int i = 0; i < UNIT; i++) c[(t0 + t) * BLOCK + r + i] = round == 1 ? acc[r / UNIT][0][i / 4][i % 4] : acc[r / UNIT][t / 2][i / 2][i % 2 * 2 + t % 2];
    }
}

} // namespace MOORAGE_ISA
