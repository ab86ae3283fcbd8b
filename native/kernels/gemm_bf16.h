// out = x W^T for bf16 weights with Arm's BFMMLA: weights as stored, x as two bf16.
//
// Numerics: x = xh + xl, two bf16 (2^-17 of it lost). BFMMLA multiplies four weights of two rows by four values of two columns, here xh and xl of one
// row of x, and adds them to four sums (rounded to odd, subnormal numbers are zeros). Columns ascending, from zero in every SPAN of them; spans are added
// in order, at last the sum of xl to that of xh. A row of x meets the same instructions whatever its neighbours.
#pragma once
#include "kernels.h"
#include "panel.h"
#include "../simd.h"

namespace MOORAGE_ISA {

constexpr int64_t SPAN = 512;                          // columns of 32 rows: 32 KB, half of L1
constexpr int ROWS_BF16 = 8, PAIRS_BF16 = ROWS_BF16 / 2; // weight rows whose sums with four rows of x are in registers
constexpr int ACROSS = 4;                              // rows of x that lie side by side in a panel

inline int64_t fours(int64_t cols) { return (cols + 7) / 8 * 2; } // of columns, zeros behind the last
inline int across(int64_t rows, int64_t i) { return rows - i < ACROSS ? (int)(rows - i) : ACROSS; }

// Rows of block `b` of a panel: four values of a row of x as xh and xl, then those of the next of four rows.
inline void pack_bf16(bfloat16x8_t* panel, int64_t rows, int64_t cols, int64_t b, const float* x, const int32_t* index) {
    const int64_t count = fours(cols);
    for (int64_t i = b * BLOCK; i < rows && i < (b + 1) * BLOCK; i++) {
        const int64_t first = i / ACROSS * ACROSS;
        const float* from = x + (index ? index[i] : i) * cols;
        bfloat16x8_t* to = panel + first * count + i - first;
        for (int64_t j = 0; j < count; j++) {
            float last[4] = {};
            const bool whole = 4 * j + 4 <= cols;
            if (!whole && 4 * j < cols) memcpy(last, from + 4 * j, (cols - 4 * j) * sizeof(float));
            const float32x4_t v = vld1q_f32(whole ? from + 4 * j : last);
            const bfloat16x4_t high = vcvt_bf16_f32(v), low = vcvt_bf16_f32(vsubq_f32(v, vcvt_f32_bf16(high)));
            to[j * across(rows, first)] = vcombine_bf16(high, low);
        }
    }
}

// Columns [k0, k0 + 4 count) of rows [r0, r0 + nr), eight rows one behind the other: four weights of one row, the same four of the next. As much
// from `line` on comes nearer.
inline void pair_rows(const Matrix& m, int64_t r0, int nr, int64_t k0, int64_t count, const uint8_t*& line, bfloat16x8_t (*to)[SPAN / 4][PAIRS_BF16]) {
    const uint8_t* next = line;
    for (int r = 0; r < nr; r += 2) {
        const uint16_t* a = (const uint16_t*)(m.data + (r0 + r) * m.stride) + k0;
        const uint16_t* b = (const uint16_t*)(m.data + (r0 + (r + 1 < nr ? r + 1 : r)) * m.stride) + k0;
        bfloat16x8_t* at = &to[r / ROWS_BF16][0][r % ROWS_BF16 / 2];
        const auto put = [&](const uint16_t* a, const uint16_t* b) {
            const uint64x2_t first = (uint64x2_t)vld1q_u16(a), second = (uint64x2_t)vld1q_u16(b);
            at[0] = (bfloat16x8_t)vzip1q_u64(first, second), at[PAIRS_BF16] = (bfloat16x8_t)vzip2q_u64(first, second);
            at += 2 * PAIRS_BF16;
        };
        const int64_t there = m.cols - k0 < 4 * count ? m.cols - k0 : 4 * count;
        int64_t k = 0;
        for (; k + 32 <= there; k += 32) {
            next += 128;
            prefetch(line, next);
#pragma GCC unroll 4
            for (int i = 0; i < 32; i += 8) put(a + k + i, b + k + i);
        }
        for (; k + 8 <= there; k += 8) put(a + k, b + k);
        if (k < there) {
            uint16_t last[2][8] = {};
            memcpy(last[0], a + k, (there - k) * 2), memcpy(last[1], b + k, (there - k) * 2);
            put(last[0], last[1]);
        }
    }
}

// sum[t] += eight rows of weights times row t of T side by side.
template <int T> __attribute__((noinline)) void times_bf16(const bfloat16x8_t (*w)[PAIRS_BF16], const bfloat16x8_t* x, int64_t count, float32x4_t (*sum)[PAIRS_BF16]) {
    float32x4_t acc[T][PAIRS_BF16];
#pragma GCC unroll 4
    for (int t = 0; t < T; t++)
#pragma GCC unroll 4
        for (int i = 0; i < PAIRS_BF16; i++) acc[t][i] = vdupq_n_f32(0);
    for (int64_t j = 0; j < count; j++)
#pragma GCC unroll 4
        for (int t = 0; t < T; t++)
#pragma GCC unroll 4
            for (int i = 0; i < PAIRS_BF16; i++) acc[t][i] = vbfmmlaq_f32(acc[t][i], w[j][i], x[j * T + t]);
#pragma GCC unroll 4
    for (int t = 0; t < T; t++)
#pragma GCC unroll 4
        for (int i = 0; i < PAIRS_BF16; i++) sum[t][i] = vaddq_f32(sum[t][i], acc[t][i]);
}

// n rows of a panel of `rows`, from row `at`, against rows [r0, r0 + nr): c[t * BLOCK + r].
inline void products_bf16(const Matrix& m, int64_t r0, int nr, const bfloat16x8_t* panel, int64_t rows, int64_t at, int64_t n, const uint8_t* next, float* c) {
    constexpr int UNITS = BLOCK / ROWS_BF16;
    bfloat16x8_t w[UNITS][SPAN / 4][PAIRS_BF16]; // rows past nr: whatever was there, nobody reads their sums
    float32x4_t sums[UNITS][TOKENS][PAIRS_BF16];
    for (auto& unit : sums) memset(unit, 0, n * sizeof unit[0]);
    const int64_t all = fours(m.cols), spans = (all + SPAN / 4 - 1) / (SPAN / 4);
    const uint8_t* line = next ? next : m.data;
    for (int64_t span = 0; span < spans; span++) {
        const int64_t j = span * SPAN / 4, count = all - j < SPAN / 4 ? all - j : SPAN / 4;
        pair_rows(m, r0, nr, 4 * j, count, line, w);
        for (int64_t t = 0; t < n; t += ACROSS) {
            const int width = across(rows, at + t);
            const bfloat16x8_t* x = panel + (at + t) * all + j * width;
            const auto times = width == 1 ? times_bf16<1> : width == 2 ? times_bf16<2> : width == 3 ? times_bf16<3> : times_bf16<4>;
            for (int u = 0; u * ROWS_BF16 < nr; u++) times(w[u], x, count, sums[u] + t);
        }
    }
    for (int r = 0; r < nr; r++)
        for (int64_t t = 0; t < n; t++) {
            const float32x4_t s = sums[r / ROWS_BF16][t][r % ROWS_BF16 / 2];
            c[t * BLOCK + r] = s[r % 2 * 2] + s[r % 2 * 2 + 1];
        }
}

} // namespace MOORAGE_ISA
