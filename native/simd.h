// Sixteen float lanes on any machine: one __m512, two __m256, or four 128-bit registers.
//
// Owns: the lane type `F`, its loads, conversions and the few functions kernels need. Kernels are written once against it
// and compiled once per ISA inside `namespace MOORAGE_ISA`, so the order of every sum is the same everywhere: sixteen
// partial sums, index i goes to lane i % 16, k ascending, and `sum` folds 16 -> 8 -> 4 -> 2 -> 1. Only the rounding of `fma`
// differs (fused with AVX2, AVX-512 and NEON; two roundings in the baseline).
#pragma once
#include <stdint.h>
#include <string.h>
#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace MOORAGE_ISA {

#if defined(__AVX512F__)
constexpr int REG = 64;
#elif defined(__AVX2__)
constexpr int REG = 32;
#else
constexpr int REG = 16;
#endif
constexpr int LANES = 16;
constexpr int NREG = 64 / REG;      // registers in one F
constexpr int RLANES = LANES / NREG; // lanes of one register

typedef float VF __attribute__((vector_size(REG)));
typedef int32_t VI __attribute__((vector_size(REG)));
typedef uint32_t VU __attribute__((vector_size(REG)));
typedef int8_t VB8 __attribute__((vector_size(REG / 4)));
typedef uint8_t VU8 __attribute__((vector_size(REG / 4)));
typedef uint16_t VU16 __attribute__((vector_size(REG / 2)));

#if defined(__AVX2__) && !defined(__AVX512F__)
// sum += a b where the sum lies: gcc 12 picks forms that put it into the register of a or b, copies it back, and then has some of twelve sums in memory.
inline __attribute__((always_inline)) void add_product(VF& sum, VF a, VF b) { __asm__("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b)); }
#endif

struct F {
    VF r[NREG];
};

// Register by register, unrolled early: a struct that is copied whole stays in memory, where gcc 12 writes it in halves that no load
// of a register can be forwarded from (twenty cycles each, measured on Zen 3).
#define MOORAGE_EACH _Pragma("GCC unroll 4") for (int i_ = 0; i_ < NREG; i_++)

inline F splat(float x) {
    F f;
    MOORAGE_EACH f.r[i_] = x - VF{};
    return f;
}
inline F zero() {
    F f;
    MOORAGE_EACH f.r[i_] = VF{};
    return f;
}
inline F load(const float* p) {
    F f;
    MOORAGE_EACH memcpy(&f.r[i_], p + i_ * RLANES, REG);
    return f;
}
inline void store(float* p, F f) { MOORAGE_EACH memcpy(p + i_ * RLANES, &f.r[i_], REG); }
inline F operator+(F a, F b) {
    MOORAGE_EACH a.r[i_] += b.r[i_];
    return a;
}
inline F operator-(F a, F b) {
    MOORAGE_EACH a.r[i_] -= b.r[i_];
    return a;
}
inline F operator*(F a, F b) {
    MOORAGE_EACH a.r[i_] *= b.r[i_];
    return a;
}
inline F operator/(F a, F b) {
    MOORAGE_EACH a.r[i_] /= b.r[i_];
    return a;
}
inline VF fma_reg(VF a, VF b, VF c) {
#if defined(__AVX512F__)
    return (VF)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (VF)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__ARM_NEON)
    return (VF)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}
inline F fma(F a, F b, F c) { // a * b + c
    MOORAGE_EACH c.r[i_] = fma_reg(a.r[i_], b.r[i_], c.r[i_]);
    return c;
}
inline F max(F a, F b) {
    MOORAGE_EACH a.r[i_] = a.r[i_] > b.r[i_] ? a.r[i_] : b.r[i_];
    return a;
}
inline F min(F a, F b) {
    MOORAGE_EACH a.r[i_] = a.r[i_] < b.r[i_] ? a.r[i_] : b.r[i_];
    return a;
}

inline float sum(F f) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    const __m256 a = (__m256)f.r[0] + (__m256)f.r[1];
    const __m128 b = _mm256_castps256_ps128(a) + _mm256_extractf128_ps(a, 1), c = b + _mm_movehl_ps(b, b);
    return c[0] + c[1];
#endif
    float v[16];
    store(v, f);
    for (int half = 8; half; half >>= 1)
        for (int i = 0; i < half; i++) v[i] += v[i + half];
    return v[0];
}
inline float top(F f) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    const __m256 a = _mm256_max_ps((__m256)f.r[0], (__m256)f.r[1]);
    const __m128 b = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1)), c = _mm_max_ps(b, _mm_movehl_ps(b, b));
    return c[0] > c[1] ? c[0] : c[1];
#endif
    float v[16];
    store(v, f);
    for (int half = 8; half; half >>= 1)
        for (int i = 0; i < half; i++) v[i] = v[i] > v[i + half] ? v[i] : v[i + half];
    return v[0];
}

// out[i] = sum(f[i]) for four of them, the same additions.
inline void four_sums(const F* f, float* out) {
#if defined(__AVX512F__)
    const auto halves = [](const F& a, const F& b) { // lanes i and i + 8: eight of a, eight of b
        const __m512 x = (__m512)a.r[0], y = (__m512)b.r[0];
        return _mm512_add_ps(_mm512_shuffle_f32x4(x, y, 0x44), _mm512_shuffle_f32x4(x, y, 0xee));
    };
    const __m512 ab = halves(f[0], f[1]), cd = halves(f[2], f[3]);
    __m512 all = _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xdd)); // four of each
    all = _mm512_add_ps(all, _mm512_shuffle_ps(all, all, 0x4e));
    all = _mm512_add_ps(all, _mm512_shuffle_ps(all, all, 0xb1));
    const __m512i firsts = _mm512_set_epi32(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 12, 8, 4, 0);
    _mm_storeu_ps(out, _mm512_castps512_ps128(_mm512_permutexvar_ps(firsts, all)));
#else
    for (int i = 0; i < 4; i++) out[i] = sum(f[i]);
#endif
}

inline float bits_float(uint32_t u) {
    float f;
    memcpy(&f, &u, 4);
    return f;
}
inline uint32_t float_bits(float f) {
    uint32_t u;
    memcpy(&u, &f, 4);
    return u;
}
inline float bf16_float(uint16_t h) { return bits_float((uint32_t)h << 16); }
inline uint16_t float_bf16(float f) { // round to nearest even, NaN stays a (quiet) NaN
    uint32_t u = float_bits(f);
    if ((u & 0x7fffffffu) > 0x7f800000u) return (uint16_t)(u >> 16 | 64);
    return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}
inline float f16_float(uint16_t h) {
#if defined(__F16C__)
    return _cvtsh_ss(h);
#elif defined(__ARM_NEON)
    __fp16 half;
    memcpy(&half, &h, sizeof half);
    return (float)half;
#endif
    float f = bits_float((uint32_t)(h & 0x7fff) << 13) * 0x1p112f; // exact, subnormals included
    uint32_t u = float_bits(f);
    if ((h & 0x7c00) == 0x7c00) u |= 0x7f800000u;
    return bits_float(u | (uint32_t)(h & 0x8000) << 16);
}

inline VF widen(const uint16_t* p) { // bf16, a register of them
#if defined(__AVX512F__)
    return (VF)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
#elif defined(__AVX2__)
    return (VF)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16);
#elif defined(__ARM_NEON)
    return (VF)vshll_n_u16(vld1_u16(p), 16); // gcc 12 would widen lane by lane
#else
    VU16 h;
    memcpy(&h, p, sizeof h);
    return (VF)(__builtin_convertvector(h, VU) << 16);
#endif
}
inline F load_bf16(const uint16_t* p) {
    F f;
    MOORAGE_EACH f.r[i_] = widen(p + i_ * RLANES);
    return f;
}
inline F load_f16(const uint16_t* p) {
    F f;
#if defined(__AVX512F__)
    f.r[0] = (VF)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__AVX2__)
    MOORAGE_EACH f.r[i_] = (VF)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8 * i_)));
#elif defined(__ARM_NEON)
    MOORAGE_EACH {
        uint16x4_t h = vld1_u16(p + 4 * i_);
        f.r[i_] = (VF)vcvt_f32_f16(vreinterpret_f16_u16(h));
    }
#else
    float v[16];
    for (int i = 0; i < 16; i++) v[i] = f16_float(p[i]);
    f = load(v);
#endif
    return f;
}
#if defined(__ARM_NEON)
inline F floats_of(int16x8_t low, int16x8_t high) {
    F f;
    f.r[0] = (VF)vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))), f.r[1] = (VF)vcvtq_f32_s32(vmovl_s16(vget_high_s16(low)));
    f.r[2] = (VF)vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))), f.r[3] = (VF)vcvtq_f32_s32(vmovl_s16(vget_high_s16(high)));
    return f;
}
#endif
inline F load_i8(const int8_t* p) {
    F f;
#if defined(__AVX512F__)
    f.r[0] = (VF)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
    return f;
#elif defined(__AVX2__)
    MOORAGE_EACH f.r[i_] = (VF)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(p + 8 * i_))));
    return f;
#elif defined(__ARM_NEON)
    return floats_of(vmovl_s8(vld1_s8(p)), vmovl_s8(vld1_s8(p + 8)));
#endif
    MOORAGE_EACH {
        VB8 b;
        memcpy(&b, p + i_ * RLANES, sizeof b);
        f.r[i_] = __builtin_convertvector(__builtin_convertvector(b, VI), VF);
    }
    return f;
}
inline F load_u8(const uint8_t* p) { // through int32: a signed conversion is one instruction everywhere
    F f;
#if defined(__AVX512F__)
    f.r[0] = (VF)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)));
    return f;
#elif defined(__AVX2__)
    MOORAGE_EACH f.r[i_] = (VF)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(p + 8 * i_))));
    return f;
#elif defined(__ARM_NEON)
    return floats_of((int16x8_t)vmovl_u8(vld1_u8(p)), (int16x8_t)vmovl_u8(vld1_u8(p + 8)));
#endif
    MOORAGE_EACH {
        VU8 b;
        memcpy(&b, p + i_ * RLANES, sizeof b);
        f.r[i_] = __builtin_convertvector(__builtin_convertvector(b, VI), VF);
    }
    return f;
}
inline void store_bf16(uint16_t* p, F f) { // round to nearest even
#if defined(__AVX512BF16__)
    __m256bh h = _mm512_cvtneps_pbh((__m512)f.r[0]);
    memcpy(p, &h, 32);
#else
    float v[16];
    store(v, f);
    for (int i = 0; i < 16; i++) p[i] = float_bf16(v[i]);
#endif
}
// The first n (< 16) floats, zero behind them.
inline F load_part(const float* p, int n) {
    float v[16] = {};
    memcpy(v, p, n * sizeof(float));
    return load(v);
}
inline void store_part(float* p, F f, int n) {
    float v[16];
    store(v, f);
    memcpy(p, v, n * sizeof(float));
}

// e^x to about 2 ulp (degree-6 minimax on [-ln2/2, ln2/2], Cephes' reduction); 0 below -87.33, inf above 88.73, NaN kept.
inline F exp(F x) {
    F out;
    MOORAGE_EACH {
        VF v = x.r[i_];
        VF shift = 12582912.0f - VF{}; // 1.5 * 2^23: adding it rounds to an integer held in the low mantissa bits
        VF n = fma_reg(v, 1.44269504088896341f - VF{}, shift);
        VI e = (VI)n;
        n -= shift;
        VF r = fma_reg(n, -0.693359375f - VF{}, v);
        r = fma_reg(n, 2.12194440e-4f - VF{}, r);
        VF p = 1.9875691500e-4f - VF{};
        p = fma_reg(p, r, 1.3981999507e-3f - VF{});
        p = fma_reg(p, r, 8.3334519073e-3f - VF{});
        p = fma_reg(p, r, 4.1665795894e-2f - VF{});
        p = fma_reg(p, r, 1.6666665459e-1f - VF{});
        p = fma_reg(p, r, 5.0000001201e-1f - VF{});
        p = fma_reg(p * r, r, r) + 1.0f;
        p = (VF)((VI)p + (e << 23)); // e is n + a multiple of 2^9 above the mantissa's low bits: the shift keeps n alone
        p = (VF)((VI)p & (v >= -87.33f)); // what comes of other numbers is thrown away
        out.r[i_] = v <= 88.72f ? p : v + __builtin_inff();
    }
    return out;
}
inline F sigmoid(F x) { return splat(1.0f) / (splat(1.0f) + exp(zero() - x)); }

enum Act : int { SILU = 0, GELU_TANH = 1, SIGMOID = 2 };

inline F activate(F x, int act) {
    if (act == SIGMOID) return sigmoid(x);
    if (act == SILU) return x * sigmoid(x);
    F inner = splat(0.7978845608028654f) * fma(splat(0.044715f) * x * x, x, x); // sqrt(2/pi) (x + 0.044715 x^3)
    return x * sigmoid(inner + inner);                                         // 0.5 (1 + tanh(y)) = sigmoid(2y)
}

} // namespace MOORAGE_ISA
