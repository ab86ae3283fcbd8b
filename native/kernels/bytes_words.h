// Numbers of eight bits with AVX2: exact integer sums of a group by words, where kernels/gemm_bytes.h has bytes.
//
// X = 32 a + b, |X| < 2^20: a has 16 bits, b five without sign. `vpmaddwd` multiplies a by numbers as words, a vector's even bytes and its odd
// ones, `vpmaddubsw` b by the bytes as they are, and sums of four vectors fit 16 bits: 26 multiplications for 256 weights where three digits of
// seven bits take 48. A group's sums A and B are exact; S = fma(32, A, B), acc = fma(d 2^-e, S, acc).
#pragma once
#include "gemm_bytes.h"

namespace MOORAGE_ISA {

// A format of signed numbers whose groups have 32 (kernels/bytes.h). HALVES: times that `row`, `raw` and `number` are asked for a step's eight vectors.
template <class C> concept Worded = requires { C::HALVES; };
template <int TIMES> struct ByWords {
    static constexpr bool KNOWN = true;
    static constexpr int PARTS = 1, PLUS = 0, HALVES = TIMES;
};
template <> struct Integers<Format::Q8_0> : SmallBlocks<34, 2>, ByWords<2> {
    static constexpr int first(int v, int lane) { return 32 * lane + 4 * v; }
    static __m256i row(const uint8_t* b, int half, int i) { return SmallBlocks::row(b + 16 * half, 0, i); }
    static void raw(const uint8_t* b, int half, __m256i* t) { four_rows<Integers>(b, half, t); }
    static __m256i number(const uint8_t*, const __m256i* t, int v) { return t[v]; }
    template <class S> static void scales(const uint8_t* b, S& s) { s.d[0] = eight(b); }
};
template <int BLOCK_BYTES, int AT> struct Iq4Blocks : SmallBlocks<BLOCK_BYTES, AT>, ByWords<1> {
    static __m256i number(const uint8_t*, const __m256i* t, int v) { return iq4(nibbles_of(t[v / 2], v % 2)); }
};
template <> struct Integers<Format::IQ4_NL> : Iq4Blocks<18, 2> {
    template <class S> static void scales(const uint8_t* b, S& s) { s.d[0] = eight(b); }
};
template <> struct Integers<Format::IQ4_XS> : Iq4Blocks<16, 8> {
    static constexpr int BYTES = 136;
    template <class S> static void scales(const uint8_t* b, S& s) {
        const __m256i fours = _mm256_set_epi32(28, 24, 20, 16, 12, 8, 4, 0), twos = _mm256_srli_epi32(fours, 1);
        const __m256i low = _mm256_and_si256(_mm256_srlv_epi32(_mm256_set1_epi32((int)u32(b + 4)), fours), _mm256_set1_epi32(15));
        const __m256i high = _mm256_and_si256(_mm256_srlv_epi32(_mm256_set1_epi32(u16(b + 2)), twos), _mm256_set1_epi32(3));
        const __m256i number = _mm256_sub_epi32(_mm256_or_si256(low, _mm256_slli_epi32(high, 4)), _mm256_set1_epi32(32));
        s.d[0] = _mm256_mul_ps(_mm256_set1_ps(half(b)), _mm256_cvtepi32_ps(number));
    }
};

// An XStep has a of every vector's even bytes, of its odd ones, and b where others have three digits.
constexpr int LOW = 5; // bits of b
inline __m256i at(const void* p) { return _mm256_load_si256((const __m256i*)p); }
inline void set(void* p, __m256i v) { _mm256_store_si256((__m256i*)p, v); }
inline __m256i a_of(const XStep& x, int v, int odd) { return at(x.digits[odd][v]); }
inline __m256i b_of(const XStep& x, int v) { return at(x.digits[2][v]); }
inline __m256 whole(__m256 a, __m256i b) { return _mm256_fmadd_ps(a, _mm256_set1_ps(1 << LOW), _mm256_cvtepi32_ps(b)); }

template <Worded C> void pack_step(const float* x, XStep& to) {
    alignas(32) int32_t number[STEP];
    whole_numbers<15 + LOW>(x, number, to.scale[0]);
    const __m256i evens = _mm256_broadcastsi128_si256(_mm_set_epi8(15, 14, 11, 10, 13, 12, 9, 8, 7, 6, 3, 2, 5, 4, 1, 0)); // before odds, of four words
    for (int v = 0; v < 8; v++) {
        __m256i a[4], b[4]; // lanes i and i + 4, which packing brings together
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            const auto fours = [&](int lane) { return _mm_load_si128((const __m128i*)(number + C::first(v, lane))); };
            const __m256i both = _mm256_set_m128i(fours(i + 4), fours(i));
            a[i] = _mm256_srai_epi32(both, LOW), b[i] = _mm256_and_si256(both, _mm256_set1_epi32((1 << LOW) - 1));
        }
        const __m256i low = _mm256_shuffle_epi8(_mm256_packs_epi32(a[0], a[1]), evens), high = _mm256_shuffle_epi8(_mm256_packs_epi32(a[2], a[3]), evens);
        set(to.digits[0][v], dwords(low, high, 0)), set(to.digits[1][v], dwords(low, high, 1));
        set(to.digits[2][v], _mm256_packs_epi16(_mm256_packs_epi32(b[0], b[1]), _mm256_packs_epi32(b[2], b[3])));
    }
}

// One row of x (kernels/bytes_row.h). Even numbers become words by a multiplication with (1, 0): with shifts they were two instructions for two pipes.
template <Worded C>
inline __attribute__((always_inline)) __m256 turn_then(const uint8_t* b, int, __m256i* t, const XStep& x, const uint8_t* next, Scales<C>& scales, __m256 acc) {
    constexpr int HERE = 8 / C::HALVES, FIRST = C::HALVES == 1 ? 7 : 1, EVERY = C::HALVES == 1 ? 2 : 1, SCALES = C::HALVES == 1 ? 1 : 11; // as measured
    __m256i a, words, low;
#pragma GCC unroll 2
    for (int half = 0; half < C::HALVES; half++) {
        __m256i then[4];
#pragma GCC unroll 8
        for (int i = 0; i < HERE; i++) {
            const int v = half * HERE + i;
            const __m256i number = here(C::number(b, t, i));
#pragma GCC unroll 3
            for (int k = 0; k < 3; k++) {
                if (k == 2) {
                    const __m256i pairs = _mm256_maddubs_epi16(b_of(x, v), number);
                    words = here(v % 4 ? _mm256_add_epi16(words, pairs) : pairs);
                } else {
                    const __m256i sums = _mm256_madd_epi16(k ? _mm256_srai_epi16(number, 8) : _mm256_maddubs_epi16(at(ONE.at), number), a_of(x, v, k));
                    a = here(v || k ? _mm256_add_epi32(a, sums) : sums);
                }
                const int done = 3 * i + k, from = half + 1 < C::HALVES ? half + 1 : 0;
                if (done >= FIRST && (done - FIRST) % EVERY == 0 && (done - FIRST) / EVERY < PIECES<C>) piece<C>((done - FIRST) / EVERY, from ? b : next, from, then);
                if (done == SCALES && half == 0) C::scales(b, scales);
            }
            if (v % 4 < 3) continue;
            const __m256i wide = _mm256_madd_epi16(words, at(ONE.at));
            low = v == 3 ? wide : _mm256_add_epi32(low, wide);
        }
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) t[i] = then[i];
    }
    return _mm256_fmadd_ps(scaled<C>(scales, x, 0), whole(_mm256_cvtepi32_ps(a), low), acc);
}

// A few rows of x: a vector's words are made once for all of them, sums are in registers.
template <Worded C, int T> inline __attribute__((always_inline)) void add_step(const uint8_t* b, const XStep* x, __m256 (&acc)[T]) {
    constexpr int HERE = 8 / C::HALVES;
    Scales<C> scales;
    C::scales(b, scales);
    __m256i t[4], a[T], words[T], low[T];
#pragma GCC unroll 8
    for (int v = 0; v < 8; v++) {
        if (v % HERE == 0) C::raw(b, v / HERE, t);
        const __m256i number = here(C::number(b, t, v % HERE)), even = here(_mm256_maddubs_epi16(at(ONE.at), number)), odd = here(_mm256_srai_epi16(number, 8));
#pragma GCC unroll 4
        for (int n = 0; n < T; n++) {
            const __m256i evens = _mm256_madd_epi16(even, a_of(x[n], v, 0)), pairs = _mm256_maddubs_epi16(b_of(x[n], v), number);
            a[n] = here(v ? _mm256_add_epi32(a[n], evens) : evens);
            a[n] = here(_mm256_add_epi32(a[n], _mm256_madd_epi16(odd, a_of(x[n], v, 1))));
            words[n] = here(v % 4 ? _mm256_add_epi16(words[n], pairs) : pairs);
            if (v % 4 < 3) continue;
            const __m256i wide = _mm256_madd_epi16(words[n], at(ONE.at));
            low[n] = v == 3 ? wide : here(_mm256_add_epi32(low[n], wide));
        }
    }
#pragma GCC unroll 4
    for (int n = 0; n < T; n++) acc[n] = _mm256_fmadd_ps(scaled<C>(scales, x[n], 0), whole(_mm256_cvtepi32_ps(a[n]), low[n]), acc[n]);
}

// A step of a row of weights, as many rows of x read it.
struct alignas(32) Numbers {
    int16_t words[8][2][16];
    int8_t bytes[8][32];
};
template <Worded C> inline void numbers_of(const uint8_t* b, Numbers& to) {
    __m256i t[4];
#pragma GCC unroll 8
    for (int v = 0; v < 8; v++) {
        constexpr int HERE = 8 / C::HALVES;
        if (v % HERE == 0) C::raw(b, v / HERE, t);
        const __m256i number = C::number(b, t, v % HERE);
        set(to.words[v][0], _mm256_maddubs_epi16(at(ONE.at), number)), set(to.words[v][1], _mm256_srai_epi16(number, 8)), set(to.bytes[v], number);
    }
}

// Two rows of weights meet four rows of x at once: what is loaded is used four times or twice, sums are in registers. Four rows of x, 3.5 KB, meet HELD
// rows of weights, 12 KB: L1 keeps both. Many rows of x side by side do not stay there, which took a sixth longer.
constexpr int TWO = 2, FOUR = 4, HELD_STEPS = 16;

// acc[t] += `held` rows' numbers times T rows of x.
template <int T> __attribute__((noinline)) void words_tile(const Numbers* w, const __m256* d, int held, const XStep* x, float (*acc)[BLOCK][8]) {
    const auto each = [](const auto& f) __attribute__((always_inline)) {
#pragma GCC unroll 4
        for (int t = 0; t < T; t++)
#pragma GCC unroll 2
            for (int r = 0; r < TWO; r++) f(t, r);
    };
    for (int h = 0; h < held; h += TWO, w += TWO) {
        __m256i sum[T][TWO], low[T][TWO], factor;
        alignas(32) float a[T][TWO][8];
#pragma GCC unroll 16
        for (int v = 0; v < 16; v++) {
            const __m256i number[TWO] = {here(at(w[0].words[v / 2][v % 2])), here(at(w[1].words[v / 2][v % 2]))};
            each([&](int t, int r) __attribute__((always_inline)) {
                if (r == 0) factor = here(a_of(x[t], v / 2, v % 2));
                const __m256i sums = _mm256_madd_epi16(number[r], factor);
                sum[t][r] = here(v ? _mm256_add_epi32(sum[t][r], sums) : sums);
            });
        }
        each([&](int t, int r) __attribute__((always_inline)) { _mm256_store_ps(a[t][r], _mm256_cvtepi32_ps(sum[t][r])); });
#pragma GCC unroll 8
        for (int v = 0; v < 8; v++) {
            const __m256i number[TWO] = {here(at(w[0].bytes[v])), here(at(w[1].bytes[v]))};
            each([&](int t, int r) __attribute__((always_inline)) {
                if (r == 0) factor = here(b_of(x[t], v));
                const __m256i pairs = _mm256_maddubs_epi16(factor, number[r]);
                sum[t][r] = here(v % 4 ? _mm256_add_epi16(sum[t][r], pairs) : pairs);
                if (v % 4 < 3) return;
                const __m256i wide = _mm256_madd_epi16(sum[t][r], at(ONE.at));
                low[t][r] = v == 3 ? wide : _mm256_add_epi32(low[t][r], wide);
            });
        }
        each([&](int t, int r) __attribute__((always_inline)) {
            float* to = acc[t][h + r];
            const __m256 scale = _mm256_mul_ps(d[h + r], _mm256_load_ps(x[t].scale[0]));
            _mm256_store_ps(to, _mm256_fmadd_ps(scale, whole(_mm256_load_ps(a[t][r]), low[t][r]), _mm256_load_ps(to)));
        });
    }
}

template <Worded C>
__attribute__((noinline)) void integer_products(const Matrix& m, int64_t r0, int nr, const XStep* x, int64_t rows, int64_t n, const uint8_t* next, float* c) {
    if (n == 1) return one_row<C>(m, r0, nr, x, rows, next, c);
    if (n <= 4) return (n == 2 ? few_rows<C, 2> : n == 3 ? few_rows<C, 3> : few_rows<C, 4>)(m, r0, nr, x, rows, next, c);
    const int64_t steps = steps_of(m.cols);
    const Steps<C> in(m);
    alignas(32) float acc[TOKENS][BLOCK][8];
    alignas(32) uint8_t last[C::BYTES];
    Numbers numbers[HELD_STEPS];
    __m256 d[HELD_STEPS];
    const uint8_t *base = m.data + r0 * m.stride, *line = next ? next : base;
    memset(acc, 0, n * sizeof acc[0]);
    for (int g = 0; g < nr; g += HELD_STEPS)
        for (int64_t s = 0; s < steps; s++) {
            const int held = nr - g < HELD_STEPS ? nr - g : HELD_STEPS;
            for (int i = 0; i < held + held % TWO; i++) { // the last row twice where they are odd
                const uint8_t* to = line + m.stride / steps;
                prefetch(line, to);
                const uint8_t* b = in.at(base + (g + (i < held ? i : i - 1)) * m.stride, s, last);
                Scales<C> scales;
                C::scales(b, scales), numbers_of<C>(b, numbers[i]);
                d[i] = scales.d[0];
            }
            const XStep* step = x + s * rows;
            for (int64_t t = 0; t < n; t += FOUR) {
                const auto tile = n - t >= 4 ? words_tile<4> : n - t == 3 ? words_tile<3> : n - t == 2 ? words_tile<2> : words_tile<1>;
                tile(numbers, d, held, step + t, (float(*)[BLOCK][8])acc[t][g]);
            }
        }
    for (int64_t t = 0; t < n; t++) // rows past nr write where nobody reads
        for (int r = 0; r < nr; r += 8) eight_totals(acc[t][r], 8, c + t * BLOCK + r);
}

} // namespace MOORAGE_ISA
