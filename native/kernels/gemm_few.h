// A few rows of x against floats with AVX2: weights go from their stored bits into products, two to four rows of them at once, so that what is
// loaded of x meets all of them.
//
// Rows that are multiplied together lie far apart in their block (0, 8, 16 and 24, then 1, 9, 17 and 25), so that each is read from where the one
// before it ended: as many streams as rows, which the hardware follows from row to row. Of neighbours it begins four new ones every four
// rows; one row of x against bf16 then reads at three quarters of the rate.
//
// Numerics: those of kernels/gemm.h. Of bf16 a register has every other column, as a shift or a mask makes it of sixteen of them: x lies alike, and
// sums are folded in the order that all others are.
#pragma once
#include "gemm_lanes.h"

namespace MOORAGE_ISA {

constexpr int FEW_FLOATS = 4; // rows of x, at most

template <class T> constexpr bool IN_TURN = std::is_same_v<T, Brain16>; // a register has even columns, the next one odd ones

// Half h of sixteen columns.
inline VF half_of(const float* p, int h) { return (VF)_mm256_loadu_ps(p + 8 * h); }
inline VF half_of(const Half16* p, int h) { return (VF)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8 * h))); }
alignas(32) constexpr uint32_t UPPER[8] = {0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000};
inline VF half_of(const Brain16* p, int h) {
    __m256i all = _mm256_loadu_si256((const __m256i*)p);
    if (h)
        __asm__("vpand %1, %0, %0" : "+x"(all) : "m"(UPPER)); // out of memory: all registers hold sums and what they are made of
    else
        all = _mm256_slli_epi32(all, 16);
    return (VF)all;
}

// Packs block `b` of a panel as `pack` does (kernels/gemm.h): sixteen columns of a few rows side by side, more as `many_floats` reads them.
inline void pack_floats(float* panel, Format format, int64_t rows, int64_t cols, int64_t b, const float* x, const int32_t* index) {
    constexpr int64_t SOME = 512; // columns
    const int64_t ld = lane_steps(cols) * LANES;
    for (int64_t i = b * BLOCK; i < rows && i < (b + 1) * BLOCK; i++)
        for (int64_t k = 0; k < ld; k += SOME) {
            const int64_t some = ld - k < SOME ? ld - k : SOME, there = cols - k < some ? cols - k : some;
            float row[SOME];
            memcpy(row, x + (index ? index[i] : i) * cols + k, there * sizeof(float));
            memset(row + there, 0, (some - there) * sizeof(float));
            if (rows > MANY) {
                lay_lanes(panel, rows, i, k / LANES, some / LANES, ld / LANES, row);
                continue;
            }
            for (int64_t c = 0; c < some; c += LANES) {
                __m256 low = _mm256_loadu_ps(row + c), high = _mm256_loadu_ps(row + c + 8);
                if (format == Format::BF16) { // even columns, then odd ones
                    const __m256 even = _mm256_shuffle_ps(low, high, 0x88), odd = _mm256_shuffle_ps(low, high, 0xdd);
                    low = (__m256)_mm256_permute4x64_epi64((__m256i)even, 0xd8), high = (__m256)_mm256_permute4x64_epi64((__m256i)odd, 0xd8);
                }
                float* to = panel + (k + c) * rows + i * LANES;
                _mm256_storeu_ps(to, low), _mm256_storeu_ps(to + 8, high);
            }
        }
}

// Folds the sums of eight rows, `apart` floats apart, 16 to 8, 4, 2, 1, in lanes that are rows.
template <class T> inline void eight_rows(const float* from, int64_t apart, float* to) {
    const auto halves = [](__m256 a, __m256 b) { return _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31)); };
    const auto pairs = [](__m256 a, __m256 b) {
        const __m256d x = _mm256_castps_pd(a), y = _mm256_castps_pd(b);
        return _mm256_add_ps(_mm256_castpd_ps(_mm256_unpacklo_pd(x, y)), _mm256_castpd_ps(_mm256_unpackhi_pd(x, y)));
    };
    const auto others = [](__m256 a, __m256 b) { return _mm256_add_ps(_mm256_shuffle_ps(a, b, 0x88), _mm256_shuffle_ps(a, b, 0xdd)); };
    __m256 four[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) { // rows i and i + 4: four sums of each, those of bf16 in the order 0, 2, 1, 3
        const float *p = from + i * apart, *q = p + 4 * apart;
        if (IN_TURN<T>)
            four[i] = pairs(halves(_mm256_loadu_ps(p), _mm256_loadu_ps(q)), halves(_mm256_loadu_ps(p + 8), _mm256_loadu_ps(q + 8)));
        else
            four[i] = halves(_mm256_add_ps(_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)), _mm256_add_ps(_mm256_loadu_ps(q), _mm256_loadu_ps(q + 8)));
    }
    const auto two = [&](__m256 a, __m256 b) { return IN_TURN<T> ? others(a, b) : pairs(a, b); };
    _mm256_storeu_ps(to, others(two(four[0], four[1]), two(four[2], four[3])));
}

// What part of R rows of weights and N of x is multiplied: `steps` of sixteen columns.
template <class T, int R> struct FewRows {
    const T* row[R];
    const uint8_t* soon[R]; // lines that are read later
    int64_t steps;
    int apart; // rows
};
// sums[r * apart][t] += products, of H halves of every sixteen columns, from half FROM on. With the first half lines come nearer, as many as are read.
template <class T, int R, int N, int FROM, int H>
__attribute__((noinline)) void few_tile(const FewRows<T, R>& w, const float* x, bool first, float (*sums)[FEW_FLOATS][LANES]) {
    constexpr int64_t BYTES = LANES * sizeof(T), LINE = 64 / BYTES; // steps of a line
    VF acc[H][N][R];
    const auto each = [&](const auto& f) __attribute__((always_inline)) {
#pragma GCC unroll 2
        for (int h = 0; h < H; h++)
#pragma GCC unroll 4
            for (int t = 0; t < N; t++)
#pragma GCC unroll 4
                for (int r = 0; r < R; r++) f(acc[h][t][r], &sums[r * w.apart][t][(FROM + h) * RLANES]);
    };
    if (first)
        each([](VF& sum, float*) { sum = VF{}; });
    else
        each([](VF& sum, float* at) { memcpy(&sum, at, REG); });
    const T* row[R];
    const uint8_t* soon[R];
    for (int r = 0; r < R; r++) row[r] = w.row[r], soon[r] = w.soon[r];
    x += FROM * RLANES;
    const int64_t n = w.steps;
    int64_t s = 0;
    do {
        if (FROM == 0)
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) __builtin_prefetch(soon[r] + s * BYTES, 0, 2);
#pragma GCC unroll 2
        for (int64_t u = 0; u < LINE; u++)
#pragma GCC unroll 2
            for (int h = 0; h < H; h++) {
                if (H == 1 || (u == 0 && h == 0)) in_order(); // no more is loaded ahead than registers hold
                VF a[R];
#pragma GCC unroll 4
                for (int r = 0; r < R; r++) a[r] = half_of(row[r] + (s + u) * LANES, FROM + h);
#pragma GCC unroll 4
                for (int t = 0; t < N; t++) {
                    VF b;
                    memcpy(&b, x + ((s + u) * N + t) * LANES + h * RLANES, REG);
#pragma GCC unroll 4
                    for (int r = 0; r < R; r++) add_product(acc[h][t][r], a[r], b);
                }
            }
        s += LINE;
    } while (s < n);
    each([](VF& sum, float* at) { memcpy(at, &sum, REG); });
}

constexpr int64_t SOON = 512; // bytes between what is multiplied and what comes nearer in the same stream; 256 and 1,024 are as good, 4,096 is not

// N rows of x against rows [r0, r0 + nr). Two rows of x and more are multiplied a part of their columns at a time, 16 KB that stay in L1 beside three
// rows of weights; in between sums are in memory. Of four rows of x twelve sums are half a register's columns of three rows of weights: even, then odd.
template <class T, int N> __attribute__((noinline)) void few_floats(const Matrix& m, int64_t r0, int nr, const float* x, const uint8_t* next, float* c) {
    constexpr int R = N == 1 ? 4 : N == 3 ? 2 : 3, H = N == 4 ? 1 : 2;
    constexpr int64_t BYTES = LANES * sizeof(T);
    const int64_t steps = lane_steps(m.cols), whole = m.cols / GROUP * 2, PART = N == 1 ? whole + 1 : N == 2 ? 128 : 64;
    const int apart = (nr + R - 1) / R;
    alignas(32) float sums[BLOCK + R][FEW_FLOATS][LANES];
    const uint8_t* base = m.data + r0 * m.stride;
    const auto place = [&](int r, int i) { return r + i * apart < nr ? r + i * apart : nr - 1; };
    const auto multiply = [&](const FewRows<T, R>& w, int64_t k, int r) {
        const float* from = x + k * LANES * N;
        few_tile<T, R, N, 0, H>(w, from, !k, sums + r);
        if (H == 1) few_tile<T, R, N, 1, 1>(w, from, !k, sums + r);
    };
    for (int64_t k = 0; k < whole; k += PART) {
        const int64_t some = whole - k < PART ? whole - k : PART;
        const uint8_t *here = base + k * BYTES, *then = k + PART < whole ? here + some * BYTES : next;
        // What comes nearer meanwhile. Parts of rows are no streams: then the next block's rows, evenly.
        const auto soon = [&](int r, int i) {
            const int64_t stream = i * apart * m.stride;
            if (PART < whole && next) return next + stream + (k * apart + r * some) * BYTES;
            return r + 1 == apart && then ? then + stream : here + place(r, i) * m.stride + SOON;
        };
        for (int r = 0; r < apart; r++) {
            FewRows<T, R> w{{}, {}, some, apart};
            for (int i = 0; i < R; i++) w.row[i] = (const T*)(here + place(r, i) * m.stride), w.soon[i] = soon(r, i);
            multiply(w, k, r);
        }
    }
    if (whole < steps)
        for (int r = 0; r < apart; r++) { // columns behind the last whole group
            T end[R][GROUP] = {};
            FewRows<T, R> w{{}, {}, 2, apart};
            for (int i = 0; i < R; i++) {
                memcpy(end[i], base + place(r, i) * m.stride + whole * BYTES, m.cols % GROUP * sizeof(T));
                w.row[i] = end[i], w.soon[i] = (const uint8_t*)end[i];
            }
            multiply(w, whole, r);
        }
    for (int t = 0; t < N; t++)
        for (int r = 0; r < nr; r += 8) eight_rows<T>(sums[r][t], FEW_FLOATS * LANES, c + t * BLOCK + r); // rows past nr nobody reads
}

inline void few_floats(const Matrix& m, int64_t r0, int nr, const float* x, int64_t n, const uint8_t* next, float* c) {
    with_float(m.format, [&]<class T>() { (n == 1 ? few_floats<T, 1> : n == 2 ? few_floats<T, 2> : n == 3 ? few_floats<T, 3> : few_floats<T, 4>)(m, r0, nr, x, next, c); });
}

} // namespace MOORAGE_ISA
