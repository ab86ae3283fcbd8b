// Many rows of x against floats with AVX2: rows of weights in the lanes of registers, numbers of x broadcast.
//
// Numerics: those of kernels/gemm.h. A product is sixteen partial sums, column k in sum k % 16, and they are computed one after
// the other, each in one chain of FMAs: all columns k % 16 == 0, then 8, 4, 12 ..., in the order in which folding 16, 8, 4, 2, 1 wants them. So a sum
// is one lane where the dot product of two rows has sixteen, what waits to be folded is at most four sums, and folding is vertical.
//
// 32 rows of weights are unpacked at once, sums apart: [16][step][row]. Rows of x lie alike as tiles of ABREAST, [16][tile][step][row], so that a tile
// is 4 x 3 registers of sums and seven loads for twelve FMAs. A part of a sum's columns stays in L1 while all of x comes by, two bytes a cycle.
#pragma once
#include "groups.h"
#include "kernels.h"
#include "panel.h"
#include <type_traits>

namespace MOORAGE_ISA {

inline int64_t lane_steps(int64_t cols) { return (cols + GROUP - 1) / GROUP * (GROUP / LANES); }
constexpr int DEEP = 128; // steps (sixteen columns, of which a sum has one) multiplied at a time: 16 KB of 32 rows of weights, half of L1

inline int turned(int lane) { return (lane & 1) << 3 | (lane & 2) << 1 | (lane & 4) >> 1 | lane >> 3; } // when a lane's sum comes, and whose sum comes then

constexpr int WAITING = 5; // sums at most: four that wait to be folded and the one that is computed
constexpr int MANY = 32; // more rows of x than this: with fewer, unpacking costs more than it brings (GFLOP/s of 8 rows in cache: 52, `blocked` 62; of 63: 88 and 84)
constexpr bool is_float(Format f) { return f == Format::BF16 || f == Format::F16 || f == Format::F32; }
template <class Body> void with_float(Format f, const Body& body) {
    f == Format::BF16 ? body.template operator()<Brain16>() : f == Format::F16 ? body.template operator()<Half16>() : body.template operator()<float>();
}
inline int64_t sum_floats(int64_t steps) { return (steps + 1) * BLOCK; } // of unpacked weights; one step more, or sixteen sums would share sets of L1
inline int64_t lane_floats(int64_t cols) { return LANES * sum_floats(lane_steps(cols)); }

// Steps [s0, s0 + n) of row i of `rows` of a panel, where `some_lanes` reads it.
inline void lay_lanes(float* panel, int64_t rows, int64_t i, int64_t s0, int64_t n, int64_t steps, const float* row) {
    const int64_t first = i / TOKENS * TOKENS, block = rows - first < TOKENS ? rows - first : TOKENS, at = (i - first) / ABREAST * ABREAST;
    const int64_t T = block - at < ABREAST ? block - at : ABREAST;
    for (int q = 0; q < LANES; q++) {
        float* to = panel + (first * LANES + q * block + at) * steps + s0 * T + (i - first - at);
        for (int64_t s = 0; s < n; s++) to[s * T] = row[s * LANES + turned(q)];
    }
}

// Dwords 0 to 3 of eight rows, a dword of each row in a register.
struct EightRows {
    const uint8_t* row[8];
    EightRows() {}
    EightRows(const Matrix& m, int64_t r0, int first, int n) { // r0 + first ...; for rows behind the n-th the last one again
        for (int i = 0; i < 8; i++) row[i] = m.data + (r0 + (first + i < n ? first + i : n - 1)) * m.stride;
    }
    void dwords(int64_t at, __m256i* to) const {
        __m256i a[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++)
            a[i] = _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128((const __m128i*)(row[i] + at))), _mm_loadu_si128((const __m128i*)(row[i + 4] + at)), 1);
        const __m256i b = _mm256_unpacklo_epi32(a[0], a[1]), c = _mm256_unpacklo_epi32(a[2], a[3]), d = _mm256_unpackhi_epi32(a[0], a[1]), e = _mm256_unpackhi_epi32(a[2], a[3]);
        to[0] = _mm256_unpacklo_epi64(b, c), to[1] = _mm256_unpackhi_epi64(b, c), to[2] = _mm256_unpacklo_epi64(d, e), to[3] = _mm256_unpackhi_epi64(d, e);
    }
};

// A step of eight rows: put(lane, eight weights).
template <class T> struct Spread {
    static constexpr int COLUMNS = 4 / sizeof(T); // of a dword
    template <class Put> static void step(const EightRows& rows, int64_t at, const Put& put) {
#pragma GCC unroll 4
        for (int part = 0; part < LANES / 4 / COLUMNS; part++) {
            __m256i d[4];
            rows.dwords(at + 16 * part, d);
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) {
                const int lane = (4 * part + i) * COLUMNS;
                if constexpr (std::is_same_v<T, Half16>) { // the first halves of eight dwords, then the second ones
                    const __m256i halves = _mm256_permute4x64_epi64(_mm256_packus_epi32(_mm256_and_si256(d[i], _mm256_set1_epi32(0xffff)), _mm256_srli_epi32(d[i], 16)), 0xd8);
                    put(lane, _mm256_cvtph_ps(_mm256_castsi256_si128(halves))), put(lane + 1, _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1)));
                } else if constexpr (std::is_same_v<T, Brain16>)
                    put(lane, (__m256)_mm256_slli_epi32(d[i], 16)), put(lane + 1, (__m256)_mm256_and_si256(d[i], _mm256_set1_epi32((int)0xffff0000)));
                else
                    put(lane, (__m256)d[i]);
            }
        }
    }
};

// Rows [r0, r0 + nr), R registers of them, as sixteen sums' columns. Of two steps all rows: lines are read and written whole.
template <class T, int R> __attribute__((noinline)) void spread(const Matrix& m, int64_t r0, int nr, float* w) {
    const int64_t steps = lane_steps(m.cols), whole = m.cols / GROUP * 2, apart = sum_floats(steps);
    constexpr int64_t BYTES = LANES * sizeof(T);
    EightRows rows[R];
    for (int r = 0; r < R; r++) rows[r] = EightRows(m, r0, 8 * r, nr);
    const auto two = [&](int64_t from, int64_t to) {
#pragma GCC unroll 4
        for (int r = 0; r < R; r++)
#pragma GCC unroll 2
            for (int s = 0; s < 2; s++)
                Spread<T>::step(rows[r], (from + s) * BYTES, [&](int lane, __m256 v) __attribute__((always_inline)) { _mm256_storeu_ps(w + turned(lane) * apart + ((to + s) * R + r) * 8, v); });
    };
    for (int64_t s = 0; s < whole; s += 2) two(s, s);
    if (whole == steps) return;
    T last[R][8][GROUP] = {};
    for (int r = 0; r < R; r++)
        for (int i = 0; i < 8; i++) {
            memcpy(last[r][i], rows[r].row[i] + whole * BYTES, m.cols % GROUP * sizeof(T));
            rows[r].row[i] = (const uint8_t*)last[r][i];
        }
    two(0, whole);
}

// What a tile adds to: its sums so far, if there are some; `joins` sums that wait below are folded with them and the result goes to `to`.
struct Fold {
    const float* so_far;
    const float* waiting;
    int joins;
    float* to;
};
template <int R, int T> struct TileSums {
    VF acc[T][R];
    template <class Each> inline __attribute__((always_inline)) void each(const Each& f) {
#pragma GCC unroll 4
        for (int t = 0; t < T; t++)
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) f(acc[t][r], t * BLOCK + r * RLANES);
    }
    inline __attribute__((always_inline)) void zero() {
        each([](VF& sum, int) { sum = VF{}; });
    }
    inline __attribute__((always_inline)) void load(const float* p) {
        each([&](VF& sum, int at) { memcpy(&sum, p + at, REG); });
    }
    inline __attribute__((always_inline)) void fold(const Fold& f) {
        for (int i = 0; i < f.joins; i++)
            each([&](VF& sum, int at) {
                VF other;
                memcpy(&other, f.waiting - i * TOKENS * BLOCK + at, REG);
                sum += other;
            });
        each([&](VF& sum, int at) { memcpy(f.to + at, &sum, REG); });
    }
    // += the products of n steps
    inline __attribute__((always_inline)) void multiply(const float*& w, const float*& x, int64_t n) {
        const float* end = x + n * T;
        do {
            VF a[T];
#pragma GCC unroll 4
            for (int t = 0; t < T; t++) a[t] = (VF)_mm256_broadcast_ss(x + t);
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) {
                VF row;
                memcpy(&row, w + r * RLANES, REG);
#pragma GCC unroll 4
                for (int t = 0; t < T; t++) add_product(acc[t][r], row, a[t]);
            }
            x += T, w += R * RLANES;
        } while (x < end);
    }
};
template <int R, int T> __attribute__((noinline)) void tile(const float* w, const float* x, int64_t n, const Fold& f) {
    TileSums<R, T> sums;
    f.so_far ? sums.load(f.so_far) : sums.zero();
    sums.multiply(w, x, n);
    sums.fold(f);
}

// n rows of x against R registers of weights, a sum after the other. Levels of c hold sums that wait; what is left at last is the product.
template <int R> __attribute__((noinline)) void some_lanes(const float* w, const float* x, int64_t steps, int64_t n, const uint8_t* next, int64_t bytes, float* c) {
    const int64_t parts = (steps + DEEP - 1) / DEEP, part = (steps + parts - 1) / parts;
    const int64_t some = next ? bytes / (LANES * parts * ((n + ABREAST - 1) / ABREAST)) + 1 : 0;
    for (int q = 0; q < LANES; q++) {
        const int below = __builtin_popcount(q), joins = __builtin_ctz(q + 1);
        for (int64_t k = 0; k < steps; k += part) {
            const bool last = k + part >= steps;
            const int64_t deep = last ? steps - k : part;
            for (int64_t t = 0; t < n; t += ABREAST) {
                const int64_t T = n - t < ABREAST ? n - t : ABREAST;
                const uint8_t* to = next + some;
                prefetch(next, to);
                float* own = c + (below * TOKENS + t) * BLOCK;
                const Fold f{k ? own : nullptr, own - TOKENS * BLOCK, last ? joins : 0, last ? own - joins * TOKENS * BLOCK : own};
                (T == 3 ? tile<R, 3> : T == 2 ? tile<R, 2> : tile<R, 1>)(w + q * sum_floats(steps) + k * R * RLANES, x + (q * n + t) * steps + k * T, deep, f);
            }
        }
    }
}

// n rows of a panel, which begin at x, against rows [r0, r0 + nr). w: lane_floats, c: WAITING times TOKENS rows of products
inline void many_floats(const Matrix& m, int64_t r0, int nr, const float* x, int64_t n, const uint8_t* next, float* c, float* w) {
    with_float(m.format, [&]<class T>() {
        const auto some = [&]<int R>() {
            spread<T, R>(m, r0, nr, w);
            some_lanes<R>(w, x, lane_steps(m.cols), n, next, BLOCK * m.stride, c);
        };
        nr > 8 ? some.template operator()<4>() : some.template operator()<1>();
    });
}

} // namespace MOORAGE_ISA
