// x for formats of small whole numbers with AVX2: 256 values as whole numbers in three digits (kernels/gemm_bytes.h), and what a step's sums meet.
#pragma once
#include "bytes_grids.h"
#include "steps.h"

namespace MOORAGE_ISA {

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

// Digit 0, 1, 2 of eight whole numbers, highest first; the last one has seven bits. 2^15 is no word but -2^15 is: of 8 bits the first is negative.
template <int D> inline void digits_of(__m256i c, __m256i* digit) {
    const __m256i b = _mm256_srai_epi32(_mm256_add_epi32(c, _mm256_set1_epi32(1 << 6)), 7);
    if constexpr (D == 8) { // minus what is rounded down is rounded up
        digit[0] = _mm256_srai_epi32(_mm256_sub_epi32(_mm256_set1_epi32(127), b), D), digit[1] = _mm256_add_epi32(b, _mm256_slli_epi32(digit[0], D));
    } else {
        digit[0] = _mm256_srai_epi32(_mm256_add_epi32(b, _mm256_set1_epi32(1 << (D - 1))), D), digit[1] = _mm256_sub_epi32(b, _mm256_slli_epi32(digit[0], D));
    }
    digit[2] = _mm256_sub_epi32(c, _mm256_slli_epi32(b, 7));
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
        for (int lane = 0; lane < 8; lane++) to.scale[part][lane] = scale[ORDER<C>.at[v][lane] / 8] * C::UNIT;
        if (C::PLUS)
            _mm256_store_ps(to.sum[part], _mm256_mul_ps(_mm256_cvtepi32_ps(sum), _mm256_load_ps(to.scale[part])));
        else
            _mm256_store_si256((__m256i*)to.offset[part], _mm256_mullo_epi32(sum, _mm256_set1_epi32(C::OFFSET)));
    }
}

template <class C> void pack_integers(XStep* to, int64_t rows, int64_t cols, int64_t b, const float* x, const int32_t* index) {
    pack_steps(to, rows, cols, b, x, index, [](const float* from, XStep& step) { pack_step<C>(from, step); });
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

// `total` of eight rows whose partial sums lie `apart` floats apart.
inline void eight_totals(const float* from, int apart, float* to) {
    __m256 two[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) { // rows i and i + 4
        const __m256 a = _mm256_load_ps(from + i * apart), b = _mm256_load_ps(from + (i + 4) * apart);
        two[i] = _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
    }
    const auto halves = [](__m256 a, __m256 b) {
        const __m256d x = _mm256_castps_pd(a), y = _mm256_castps_pd(b);
        return _mm256_add_ps(_mm256_castpd_ps(_mm256_unpacklo_pd(x, y)), _mm256_castpd_ps(_mm256_unpackhi_pd(x, y)));
    };
    const __m256 low = halves(two[0], two[1]), high = halves(two[2], two[3]);
    _mm256_storeu_ps(to, _mm256_add_ps(_mm256_shuffle_ps(low, high, 0x88), _mm256_shuffle_ps(low, high, 0xdd)));
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

} // namespace MOORAGE_ISA
