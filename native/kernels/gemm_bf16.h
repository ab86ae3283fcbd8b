// out = x W^T for bf16 and F8_E4M3 weights with Arm's BFMMLA: weights as stored, or as the bf16 they are; x as two bf16.
//
// Numerics: a row of x is 2^e times as large, e such that its largest value lies in [1, 2), and then x = xh + xl, two bf16 (2^-17 of it lost). BFMMLA
// multiplies four weights of two rows by four values of two columns, here xh and xl of one row of x, and adds them to four sums (rounded to odd,
// subnormal numbers are zeros). Columns ascending, from zero in every SPAN of them; spans are added in order. F8_E4M3: from zero in every block of 128, and
// acc = fma(scale, sums, acc). At last the sum of xl is added to that of xh, times 2^-e. A row of x meets the same instructions whatever its neighbours.
#pragma once
#include "groups.h"
#include "kernels.h"
#include "panel.h"
#include <bit>

namespace MOORAGE_ISA {

constexpr int64_t SPAN = 512;                          // columns of 32 rows: 32 KB, half of L1
constexpr int ROWS_BF16 = 8, PAIRS_BF16 = ROWS_BF16 / 2; // weight rows whose sums with four rows of x are in registers
constexpr int ACROSS = 4;                              // rows of x that lie side by side in a panel
constexpr int64_t F8_BLOCK = 128, F8_BYTES = 132;      // numbers of a block; its scale stands in front of them
constexpr int64_t F8_FOURS = F8_BLOCK / 4;

// A span of rows, eight one behind the other: four weights of one row, the same four of the next; a a b b of the scales of two rows' blocks.
struct SpanBf16 {
    bfloat16x8_t weights[SPAN / 4][PAIRS_BF16];
    float32x4_t scales[SPAN / F8_BLOCK][PAIRS_BF16];
};

inline int64_t fours(int64_t cols) { return (cols + 7) / 8 * 2; } // of columns, zeros behind the last
inline int across(int64_t rows, int64_t i) { return rows - i < ACROSS ? (int)(rows - i) : ACROSS; }

// 2^-e of a row of x; up: 2^e.
inline float taken_up(const float* x, int64_t cols, float& up) {
    uint32_t most = 0;
    for (int64_t k = 0; k < cols; k++) {
        const uint32_t bits = float_bits(x[k]) & 0x7fffffff;
        most = bits > most ? bits : most;
    }
    const uint32_t exponent = most >> 23, usual = exponent < 1 ? 1 : exponent > 253 ? 253 : exponent, e = exponent == 255 ? 127 : usual; // not finite: as it is
    up = bits_float((254 - e) << 23);
    return bits_float(e << 23);
}

// Rows of block `b` of a panel: four values of a row of x as xh and xl, then those of the next of four rows; 2^-e of all rows behind them.
inline void pack_bf16(bfloat16x8_t* panel, int64_t rows, int64_t cols, int64_t b, const float* x, const int32_t* index) {
    const int64_t count = fours(cols);
    for (int64_t i = b * BLOCK; i < rows && i < (b + 1) * BLOCK; i++) {
        const int64_t first = i / ACROSS * ACROSS;
        const float* from = x + (index ? index[i] : i) * cols;
        bfloat16x8_t* to = panel + first * count + i - first;
        float up;
        ((float*)(panel + rows * count))[i] = taken_up(from, cols, up);
        for (int64_t j = 0; j < count; j++) {
            float last[4] = {};
            const bool whole = 4 * j + 4 <= cols;
            if (!whole && 4 * j < cols) memcpy(last, from + 4 * j, (cols - 4 * j) * sizeof(float));
            const float32x4_t v = vmulq_n_f32(vld1q_f32(whole ? from + 4 * j : last), up);
            const bfloat16x4_t high = vcvt_bf16_f32(v), low = vcvt_bf16_f32(vsubq_f32(v, vcvt_f32_bf16(high)));
            to[j * across(rows, first)] = vcombine_bf16(high, low);
        }
    }
}

// bf16 of four weights of one row and the same four of another: `low` and `high` bytes of numbers 0 to 15, and of the others by their bits.
struct SmallF8 {
    uint8_t low[16], high[16];
    constexpr SmallF8() : low(), high() { // subnormal ones too are multiples of 2^-9
        for (int i = 0; i < 16; i++) low[i] = (uint8_t)(std::bit_cast<uint32_t>((float)i * 0x1p-9f) >> 16), high[i] = (uint8_t)(std::bit_cast<uint32_t>((float)i * 0x1p-9f) >> 24);
    }
};
inline constexpr SmallF8 SMALL_F8;
inline void widen_f8(uint8x16_t bytes, bfloat16x8_t& first, bfloat16x8_t& second) {
    const uint8x16_t most = vdupq_n_u8(0x7f), number = vandq_u8(bytes, most);
    const uint8x16_t low = vqtbx1q_u8(vshlq_n_u8(number, 4), vld1q_u8(SMALL_F8.low), number);
    const uint8x16_t finite = vqtbx1q_u8(vaddq_u8(vshrq_n_u8(number, 4), vdupq_n_u8(60)), vld1q_u8(SMALL_F8.high), number); // 2^120 times as large
    const uint8x16_t high = vbslq_u8(vdupq_n_u8(0x80), bytes, vorrq_u8(finite, vceqq_u8(number, most)));
    first = (bfloat16x8_t)vzip1q_u8(low, high), second = (bfloat16x8_t)vzip2q_u8(low, high);
}

// Columns of two rows from their bytes a and b on, and as much from `line` on comes nearer.
inline void pair_f8(const uint8_t* a, const uint8_t* b, int64_t blocks, const uint8_t*& line, SpanBf16& to, int pair) {
    const uint8_t* next = line;
    bfloat16x8_t* at = &to.weights[0][pair];
    for (int64_t block = 0; block < blocks; block++, a += F8_BYTES, b += F8_BYTES) {
        const float one = f32(a), other = f32(b);
        to.scales[block][pair] = float32x4_t{one, one, other, other};
        for (int k = 4; k < F8_BYTES; k += 16, at += 4 * PAIRS_BF16) {
            next += 2 * F8_BYTES / 8;
            prefetch(line, next);
            const uint32x4_t first = (uint32x4_t)vld1q_u8(a + k), second = (uint32x4_t)vld1q_u8(b + k);
            widen_f8((uint8x16_t)vtrn1q_u32(first, second), at[0], at[2 * PAIRS_BF16]);
            widen_f8((uint8x16_t)vtrn2q_u32(first, second), at[PAIRS_BF16], at[3 * PAIRS_BF16]);
        }
    }
}
inline void pair_bf16(const uint16_t* a, const uint16_t* b, int64_t cols, const uint8_t*& line, SpanBf16& to, int pair) {
    const uint8_t* next = line;
    bfloat16x8_t* at = &to.weights[0][pair];
    const auto put = [&](const uint16_t* a, const uint16_t* b) {
        const uint64x2_t first = (uint64x2_t)vld1q_u16(a), second = (uint64x2_t)vld1q_u16(b);
        at[0] = (bfloat16x8_t)vzip1q_u64(first, second), at[PAIRS_BF16] = (bfloat16x8_t)vzip2q_u64(first, second);
        at += 2 * PAIRS_BF16;
    };
    int64_t k = 0;
    for (; k + 32 <= cols; k += 32) {
        next += 128;
        prefetch(line, next);
#pragma GCC unroll 4
        for (int i = 0; i < 32; i += 8) put(a + k + i, b + k + i);
    }
    for (; k + 8 <= cols; k += 8) put(a + k, b + k);
    if (k < cols) {
        uint16_t last[2][8] = {};
        memcpy(last[0], a + k, (cols - k) * 2), memcpy(last[1], b + k, (cols - k) * 2);
        put(last[0], last[1]);
    }
}

// sum[t] += eight rows of weights times row t of T side by side.
template <int T, bool SCALED> __attribute__((noinline)) void times_bf16(const SpanBf16& w, const bfloat16x8_t* x, int64_t count, float32x4_t (*sum)[PAIRS_BF16]) {
    for (int64_t j = 0, end; j < count; j = end) {
        end = SCALED ? j + F8_FOURS : count;
        float32x4_t acc[T][PAIRS_BF16];
#pragma GCC unroll 4
        for (int t = 0; t < T; t++)
#pragma GCC unroll 4
            for (int i = 0; i < PAIRS_BF16; i++) acc[t][i] = vdupq_n_f32(0);
        for (int64_t k = j; k < end; k++)
#pragma GCC unroll 4
            for (int t = 0; t < T; t++)
#pragma GCC unroll 4
                for (int i = 0; i < PAIRS_BF16; i++) acc[t][i] = vbfmmlaq_f32(acc[t][i], w.weights[k][i], x[k * T + t]);
#pragma GCC unroll 4
        for (int t = 0; t < T; t++)
#pragma GCC unroll 4
            for (int i = 0; i < PAIRS_BF16; i++) sum[t][i] = SCALED ? vfmaq_f32(sum[t][i], w.scales[j / F8_FOURS][i], acc[t][i]) : vaddq_f32(sum[t][i], acc[t][i]);
    }
}

// n rows of a panel of `rows`, from row `at`, against rows [r0, r0 + nr): c[t * BLOCK + r].
template <bool F8>
__attribute__((noinline)) void products_bf16(const Matrix& m, int64_t r0, int nr, const bfloat16x8_t* panel, int64_t rows, int64_t at, int64_t n, const uint8_t* next, float* c) {
    constexpr int UNITS = BLOCK / ROWS_BF16;
    SpanBf16 w[UNITS]; // rows past nr: whatever was there, nobody reads their sums
    float32x4_t sums[UNITS][TOKENS][PAIRS_BF16];
    for (auto& unit : sums) memset(unit, 0, n * sizeof unit[0]);
    const int64_t all = fours(m.cols);
    const float* down = (const float*)(panel + rows * all) + at;
    const uint8_t* line = next ? next : m.data;
    for (int64_t j = 0; j < all; j += SPAN / 4) {
        const int64_t k0 = 4 * j, count = all - j < SPAN / 4 ? all - j : SPAN / 4, cols = m.cols - k0 < SPAN ? m.cols - k0 : SPAN;
        for (int r = 0; r < nr; r += 2) {
            const uint8_t *a = m.data + (r0 + r) * m.stride, *b = r + 1 < nr ? a + m.stride : a;
            if (F8)
                pair_f8(a + k0 / F8_BLOCK * F8_BYTES, b + k0 / F8_BLOCK * F8_BYTES, cols / F8_BLOCK, line, w[r / ROWS_BF16], r % ROWS_BF16 / 2);
            else
                pair_bf16((const uint16_t*)a + k0, (const uint16_t*)b + k0, cols, line, w[r / ROWS_BF16], r % ROWS_BF16 / 2);
        }
        for (int64_t t = 0; t < n; t += ACROSS) {
            const int width = across(rows, at + t);
            const bfloat16x8_t* x = panel + (at + t) * all + j * width;
            const auto times = width == 1 ? times_bf16<1, F8> : width == 2 ? times_bf16<2, F8> : width == 3 ? times_bf16<3, F8> : times_bf16<4, F8>;
            for (int u = 0; u * ROWS_BF16 < nr; u++) times(w[u], x, count, sums[u] + t);
        }
    }
    for (int r = 0; r < nr; r++)
        for (int64_t t = 0; t < n; t++) {
            const float32x4_t s = sums[r / ROWS_BF16][t][r % ROWS_BF16 / 2];
            c[t * BLOCK + r] = (s[r % 2 * 2] + s[r % 2 * 2 + 1]) * down[t];
        }
}

} // namespace MOORAGE_ISA
