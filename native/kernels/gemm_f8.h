// out = x W^T for F8_E4M3 with AVX2: numbers as they are, scales where they meet sums.
//
// Numerics: the bits of a number's sign, exponent and mantissa, put where a float has its own, are a float 2^-120 times as large, subnormal where
// the number is. A row of x is therefore packed 2^e times as large, e such that its largest value lies in [2^120, 2^121): what is not below
// 2^-100 of that value loses nothing. Column k of a block's 128 goes to partial sum k % 2 * 8 + k / 4 % 8 of sixteen that begin at zero, in every
// 32 columns those of k % 4 < 2 before the others; then acc = fma(scale, sums, acc) in sixteen lanes, blocks ascending, folded by `sum`, times
// 2^(120 - e). One row of x or a thousand: the same operations.
#pragma once
#include "groups.h"
#include "kernels.h"
#include "panel.h"

namespace MOORAGE_ISA {

constexpr int F8_BLOCK = 128, F8_BYTES = 132; // numbers of a block; its scale stands in front of them

// x 2^e, of 32 columns those whose number is the first byte of a dword, then the second, third and fourth. 2^e is up times more: alone it may
// be no float.
inline void pack_f8(float* to, const float* x, int64_t cols, float up, float more) {
    const __m256 a = _mm256_set1_ps(up), b = _mm256_set1_ps(more);
    for (int64_t k = 0; k < cols; k += GROUP) {
        __m256 row[4], pair[4]; // four columns of four dwords and of the four behind them: a transposition in each half
        for (int i = 0; i < 4; i++) {
            const __m256 v = _mm256_set_m128(_mm_loadu_ps(x + k + 4 * i + 16), _mm_loadu_ps(x + k + 4 * i));
            row[i] = _mm256_mul_ps(_mm256_mul_ps(v, a), b);
        }
        for (int i = 0; i < 2; i++) pair[2 * i] = _mm256_unpacklo_ps(row[2 * i], row[2 * i + 1]), pair[2 * i + 1] = _mm256_unpackhi_ps(row[2 * i], row[2 * i + 1]);
        for (int i = 0; i < 4; i++) {
            const __m256d low = _mm256_castps_pd(pair[i / 2]), high = _mm256_castps_pd(pair[2 + i / 2]);
            _mm256_storeu_ps(to + k + 8 * i, _mm256_castpd_ps(i % 2 ? _mm256_unpackhi_pd(low, high) : _mm256_unpacklo_pd(low, high)));
        }
    }
}
// 2^(120 - e): what takes sums down again.
inline float exponent_f8(const float* x, int64_t cols, float& up, float& more) {
    __m256i most = _mm256_setzero_si256();
    for (int64_t k = 0; k < cols; k += 8)
        most = _mm256_max_epu32(most, _mm256_and_si256(_mm256_loadu_si256((const __m256i*)(x + k)), _mm256_set1_epi32(0x7fffffff)));
    uint32_t lanes[8], top = 1u << 23;
    memcpy(lanes, &most, sizeof lanes);
    for (uint32_t l : lanes) top = l > top ? l : top;
    const int exponent = (int)(top >> 23) - 127, e = 120 - exponent, first = e < 126 ? e : 126;
    up = bits_float((uint32_t)(first + 127) << 23), more = bits_float((uint32_t)(e - first + 127) << 23);
    return bits_float((uint32_t)(exponent + 127) << 23);
}

inline __m256i numbers_f8(const uint8_t* p) {
    __m256i bytes = _mm256_loadu_si256((const __m256i*)p);
    __asm__("" : "+x"(bytes)); // loaded once: gcc would load them for each instruction that wants them
    return bytes;
}
// 32 numbers as four registers of floats 2^-120 of them. Shifts and shuffles are scarce (two of Zen 3's pipes, where FMA has one of them too),
// so bytes are widened by a product.
inline void widen_f8(__m256i bytes, __m256* w) {
    const __m256i words = _mm256_set1_epi16((short)0x87f0), dwords = _mm256_set1_epi32((int)0x87f00000);
    const __m256i even = _mm256_maddubs_epi16(_mm256_set1_epi16(16), bytes), odd = _mm256_srai_epi16(bytes, 4); // sign, sign four times, exponent, mantissa
    w[0] = (__m256)_mm256_slli_epi32(_mm256_and_si256(even, words), 16), w[1] = (__m256)_mm256_slli_epi32(_mm256_and_si256(odd, words), 16);
    w[2] = (__m256)_mm256_and_si256(even, dwords), w[3] = (__m256)_mm256_and_si256(odd, dwords);
}
// `most` has 255 somewhere once a NaN was among the bytes.
inline void look_f8(__m256i bytes, __m256i& most) { most = _mm256_max_epu8(most, _mm256_or_si256(bytes, _mm256_set1_epi8((char)0x80))); }
inline void look_f8(const uint8_t* block, __m256i& most) {
#pragma GCC unroll 4
    for (int g = 0; g < 4; g++) look_f8(_mm256_loadu_si256((const __m256i*)(block + 4 + GROUP * g)), most);
}
inline bool nan_f8(__m256i most) { return _mm256_movemask_epi8(_mm256_cmpeq_epi8(most, _mm256_set1_epi8((char)0xff))) != 0; }
inline bool nan_f8(const uint8_t* p, int64_t blocks) {
    __m256i most = _mm256_setzero_si256();
    for (int64_t b = 0; b < blocks; b++, p += F8_BYTES) look_f8(p, most);
    return nan_f8(most);
}

// sums += 32 numbers times x; from zero with the first ones of a block.
inline __attribute__((always_inline)) void meet_f8(const __m256* w, const float* x, bool first, F& sums) {
#pragma GCC unroll 4
    for (int q = 0; q < 4; q++) {
        VF& s = sums.r[q % 2];
        s = fma_reg((VF)w[q], (VF)_mm256_loadu_ps(x + 8 * q), first && q < 2 ? VF{} : s);
    }
}

// T rows of x, `ld` apart, against rows [r0, r0 + nr), of which two are read at once, half of them apart: two streams that go on in address order. On
// Zen 3 both cores read 5 to 10 % more so than rows side by side. NaN is looked for in a whole row at once: three instructions a block less.
template <int T> __attribute__((noinline)) void few_f8(const Matrix& m, int64_t r0, int nr, const float* x, const float* down, const uint8_t* next, float* c) {
    constexpr int STREAMS = 2, R = T <= 2 ? STREAMS : 1; // rows of weights whose sums are in registers
    const int64_t ld = m.cols;
    const int apart = (nr + STREAMS - 1) / STREAMS;
    const uint8_t* base = m.data + r0 * m.stride;
    for (int r = 0; r < apart; r++) {
        int row[STREAMS];
        const uint8_t *p[STREAMS], *line[STREAMS];
        F acc[STREAMS][T];
        for (int i = 0; i < STREAMS; i++) {
            row[i] = r + i * apart < nr ? r + i * apart : nr - 1;
            p[i] = base + row[i] * m.stride;
            line[i] = stream_ahead(p[i], m.stride, apart - 1 - r, next ? next + i * apart * m.stride : nullptr);
            for (F& a : acc[i]) a = zero();
        }
        __m256i most = _mm256_setzero_si256();
        for (int64_t k = 0; k < ld; k += F8_BLOCK) {
#pragma GCC unroll 2
            for (int first = 0; first < STREAMS; first += R) {
                F sums[T][R];
                if (T > 1) // the sums want the registers
#pragma GCC unroll 2
                    for (int i = first; i < first + R; i++) look_f8(p[i], most);
#pragma GCC unroll 4
                for (int g = 0; g < 4; g++) {
#pragma GCC unroll 2
                    for (int i = first; i < first + R; i++)
                        if (g % 2 == 0) __builtin_prefetch(line[i] + GROUP * g, 0, 2);
                    in_order();
#pragma GCC unroll 2
                    for (int i = 0; i < R; i++) {
                        __m256 w[4];
                        const __m256i bytes = numbers_f8(p[first + i] + 4 + GROUP * g);
                        if (T == 1) look_f8(bytes, most);
                        widen_f8(bytes, w);
#pragma GCC unroll 4
                        for (int t = 0; t < T; t++) meet_f8(w, x + t * ld + k + GROUP * g, g == 0, sums[t][i]);
                    }
                }
#pragma GCC unroll 2
                for (int i = 0; i < R; i++) {
                    const int at = first + i;
                    const F d = splat(f32(p[at]));
#pragma GCC unroll 4
                    for (int t = 0; t < T; t++) acc[at][t] = fma(d, sums[t][i], acc[at][t]);
                    p[at] += F8_BYTES, line[at] += F8_BYTES;
                }
            }
        }
        const bool odd = nan_f8(most);
        for (int i = 0; i < STREAMS; i++) {
            const bool nan = __builtin_expect(odd, 0) && nan_f8(base + row[i] * m.stride, ld / F8_BLOCK);
            for (int t = 0; t < T; t++) c[t * BLOCK + row[i]] = nan ? __builtin_nanf("") : sum(acc[i][t]) * down[t];
        }
    }
}

// acc[t][r] = fma(d[r], the products of a block of R rows of weights and T rows of x, acc[t][r]), eight lanes after the others; w and x are where
// the block begins in tiles of `cols` columns.
template <int R, int T> __attribute__((noinline)) void dots_f8(const float* w, const float* d, const float* x, int64_t cols, float (*to)[8][LANES]) {
    for (int lane = 0; lane < LANES; lane += RLANES, w += cols / NREG * R, x += cols / NREG * T) {
        VF sums[T][R];
#pragma GCC unroll 4
        for (int t = 0; t < T; t++)
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) sums[t][r] = VF{};
        for (int i = 0; i < F8_BLOCK / LANES; i++) {
            VF a[T];
#pragma GCC unroll 4
            for (int t = 0; t < T; t++) memcpy(&a[t], x + (i * T + t) * RLANES, REG);
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) {
                VF row;
                memcpy(&row, w + (i * R + r) * RLANES, REG);
                __asm__("" : "+v"(row)); // as in `dots`
#pragma GCC unroll 4
                for (int t = 0; t < T; t++) sums[t][r] = fma_reg(row, a[t], sums[t][r]);
            }
        }
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
            const VF scale = (VF)_mm256_broadcast_ss(d + r);
#pragma GCC unroll 4
            for (int t = 0; t < T; t++) {
                VF sum;
                memcpy(&sum, &to[t][r][lane], REG);
                sum = fma_reg(scale, sums[t][r], sum);
                memcpy(&to[t][r][lane], &sum, REG);
            }
        }
    }
}

// n rows of a panel of `rows`, from row `at`: eight rows of weights are widened a piece at a time and meet all of x while they are in L1.
template <int HELD, int64_t PIECE, class Scratch>
__attribute__((noinline)) void many_f8(const Matrix& m, int64_t r0, int nr, const float* x, const float* down, int64_t rows, int64_t at, int64_t n,
                                       const uint8_t* next, Scratch& s) {
    constexpr int R = 4;
    const int64_t ld = m.cols;
    for (int r = 0; r < nr; r += HELD) {
        const uint8_t* ahead = r + HELD < nr ? m.data + (r0 + r + HELD) * m.stride : next ? next : m.data;
        const int64_t bytes = HELD * m.stride / ((ld + PIECE - 1) / PIECE * ((n + ABREAST - 1) / ABREAST)) + 1;
        memset(s.acc, 0, n * sizeof s.acc[0]);
        for (int64_t k = 0; k < ld; k += PIECE) {
            const int64_t some = ld - k < PIECE ? ld - k : PIECE;
            float d[PIECE / F8_BLOCK][HELD];
            for (int i = 0; i < HELD; i++) {
                const uint8_t* p = m.data + (r0 + (r + i < nr ? r + i : nr - 1)) * m.stride + k / F8_BLOCK * F8_BYTES;
                const TileRow<R> to(s.w + i / R * R * PIECE, some, i % R);
                for (int64_t b = 0; b < some / F8_BLOCK; b++, p += F8_BYTES) {
                    for (int g = 0; g < 4; g++) {
                        __m256 w[4];
                        widen_f8(numbers_f8(p + 4 + GROUP * g), w);
                        for (int q = 0; q < 4; q += 2) to((b * F8_BLOCK + g * GROUP + 8 * q) / LANES, {{(VF)w[q], (VF)w[q + 1]}});
                    }
                    d[b][i] = nan_f8(p, 1) ? __builtin_nanf("") : f32(p);
                }
            }
            for (int64_t t = 0; t < n; t += ABREAST) {
                const uint8_t* to = ahead + bytes;
                prefetch(ahead, to);
                const int64_t T = n - t < ABREAST ? n - t : ABREAST;
                for (int64_t b = 0; b < some / F8_BLOCK; b++) {
                    const float* a = x + k * rows + (at + t) * some + b * F8_BLOCK / NREG * T;
                    for (int i = 0; i < HELD; i += R) {
                        const float *w = s.w + i * PIECE + b * F8_BLOCK / NREG * R, *scales = d[b] + i;
                        const auto sums = (float(*)[HELD][LANES])s.acc[t][i];
                        const auto dots = T == 3 ? dots_f8<R, 3> : T == 2 ? dots_f8<R, 2> : dots_f8<R, 1>;
                        dots(w, scales, a, some, sums);
                    }
                }
            }
        }
        for (int64_t t = 0; t < n; t++) // rows past nr write where nobody reads
            for (int i = 0; i < HELD; i++) s.c[t * BLOCK + r + i] = sum(load(s.acc[t][i])) * down[t];
    }
}

} // namespace MOORAGE_ISA
