// Formats of small whole numbers, NEON: stored rows -> signed bytes, and the scales of their groups.
//
// 256 weights of two rows are 32 vectors: eight bytes of one row, the same eight of the other, which is what SMMLA takes. `number` gives
// vector j, weights 8j to 8j + 7; `scales` what a group's sum meets. GROUP: weights of a group; WIDE: a sum of 32 numbers times X would not fit 32 bits, so
// that of the last digit is kept apart; PLUS: p is added to number times d.
#pragma once
#include "groups.h"

namespace MOORAGE_ISA {

constexpr int64_t STEP = 256; // weights of a row that are multiplied at once

struct Two { // rows
    const uint8_t *a, *b;
    uint8x16_t at(int i) const { return vcombine_u8(vld1_u8(a + i), vld1_u8(b + i)); }
    uint8x16_t bits(int i) const { // of the byte there: all ones where a bit is set
        const uint8x16_t bit = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
        return vtstq_u8(vcombine_u8(vld1_dup_u8(a + i), vld1_dup_u8(b + i)), bit);
    }
};
inline uint8x16_t nibble(uint8x16_t bytes, int high) { return high ? vshrq_n_u8(bytes, 4) : vandq_u8(bytes, vdupq_n_u8(15)); }
inline uint8x16_t two_bits(uint8x16_t bytes, int which) { return vandq_u8(vshlq_u8(bytes, vdupq_n_s8((int8_t)(-2 * which))), vdupq_n_u8(3)); }
inline int8x16_t less(uint8x16_t number, int by) { return vsubq_s8((int8x16_t)number, vdupq_n_s8((int8_t)by)); }
inline int8x16_t looked_up(const int8_t* values, uint8x16_t nibble) { return vqtbl1q_s8(vld1q_s8(values), nibble); }
inline void times(float d, int8x16_t numbers, float* to) { // sixteen
    const int16x8_t words[2] = {vmovl_s8(vget_low_s8(numbers)), vmovl_s8(vget_high_s8(numbers))};
    for (int i = 0; i < 2; i++) {
        vst1q_f32(to + 8 * i, vmulq_n_f32(vcvtq_f32_s32(vmovl_s16(vget_low_s16(words[i]))), d));
        vst1q_f32(to + 8 * i + 4, vmulq_n_f32(vcvtq_f32_s32(vmovl_s16(vget_high_s16(words[i]))), d));
    }
}

template <int GROUP_SIZE, bool P = false, bool W = false> struct Whole {
    static constexpr bool KNOWN = true, PLUS = P, WIDE = W;
    static constexpr int GROUP = GROUP_SIZE;
};
template <Format> struct Integers {
    static constexpr bool KNOWN = false;
};

// Eight blocks of 32: low nibbles are the first half, high ones the last.
template <int BLOCK_BYTES, int AT> struct SmallBlocks {
    static constexpr int BYTES = 8 * BLOCK_BYTES;
    static uint8x16_t number4(const Two& t, int j) { return nibble(t.at(j / 4 * BLOCK_BYTES + AT + j % 2 * 8), j % 4 / 2); }
    static uint8x16_t number5(const Two& t, int j, int high) { // bit i of a block's 32 at `high` belongs to weight i
        return vorrq_u8(number4(t, j), vandq_u8(t.bits(j / 4 * BLOCK_BYTES + high + j % 4), vdupq_n_u8(16)));
    }
    static void halves(const uint8_t* b, int at, float* to) {
        for (int g = 0; g < 8; g++) to[g] = half(b + g * BLOCK_BYTES + at);
    }
    static void scales(const uint8_t* b, float* d, float*) { halves(b, 0, d); }
};
template <int BLOCK_BYTES, int AT> struct SmallBlocksPlus : SmallBlocks<BLOCK_BYTES, AT> {
    static void scales(const uint8_t* b, float* d, float* p) { SmallBlocksPlus::halves(b, 0, d), SmallBlocksPlus::halves(b, 2, p); }
};
template <> struct Integers<Format::Q4_0> : SmallBlocks<18, 2>, Whole<32> {
    static int8x16_t number(const Two& t, int j) { return less(number4(t, j), 8); }
};
template <> struct Integers<Format::Q4_1> : SmallBlocksPlus<20, 4>, Whole<32, true> {
    static int8x16_t number(const Two& t, int j) { return (int8x16_t)number4(t, j); }
};
template <> struct Integers<Format::Q5_0> : SmallBlocks<22, 6>, Whole<32> {
    static int8x16_t number(const Two& t, int j) { return less(number5(t, j, 2), 16); }
};
template <> struct Integers<Format::Q5_1> : SmallBlocksPlus<24, 8>, Whole<32, true> {
    static int8x16_t number(const Two& t, int j) { return (int8x16_t)number5(t, j, 4); }
};
template <> struct Integers<Format::Q8_0> : SmallBlocks<34, 2>, Whole<32, false, true> {
    static int8x16_t number(const Two& t, int j) { return (int8x16_t)t.at(j / 4 * 34 + 2 + j % 4 * 8); }
};
template <> struct Integers<Format::IQ4_NL> : SmallBlocks<18, 2>, Whole<32, false, true> {
    static int8x16_t number(const Two& t, int j) { return looked_up(IQ4_VALUES, number4(t, j)); }
};
template <> struct Integers<Format::IQ4_XS> : SmallBlocks<16, 8>, Whole<32, false, true> {
    static constexpr int BYTES = 136;
    static int8x16_t number(const Two& t, int j) { return looked_up(IQ4_VALUES, number4(t, j)); }
    static void scales(const uint8_t* b, float* d, float*) {
        for (int g = 0; g < 8; g++) d[g] = scale_iq4_xs(b, g);
    }
};
template <> struct Integers<Format::MXFP4> : SmallBlocks<17, 1>, Whole<32> {
    static int8x16_t number(const Two& t, int j) { return looked_up(E2M1_DOUBLED, number4(t, j)); }
    static void scales(const uint8_t* b, float* d, float*) {
        for (int g = 0; g < 8; g++) d[g] = e8m0_half(b[17 * g]);
    }
};

// Blocks of 64: four scales, then four groups of 16, low nibbles first.
template <int BLOCK_BYTES, int AT> struct NvBlocks : Whole<16> {
    static constexpr int BYTES = STEP / 64 * 36 + 2 * AT;
    static constexpr int block(int i) { return i / 2 * BLOCK_BYTES + AT + i % 2 * 36; }
    static int8x16_t number(const Two& t, int j) { return looked_up(E2M1_DOUBLED, nibble(t.at(block(j / 8) + 4 + j % 8 / 2 * 8), j % 2)); }
    static void eight(const uint8_t* b, int i, float by, float* d) { // e4m3_half: the bits of a half that is 2^-8 of a number
        const uint8x8_t bytes = vreinterpret_u8_u32(uint32x2_t{u32(b + block(i)), u32(b + block(i + 1))}), most = vdup_n_u8(0x7f);
        const uint8x8_t number = vand_u8(bytes, most), valid = vbic_u8(number, vceq_u8(bytes, most));
        const float16x8_t small = vreinterpretq_f16_u16(vshll_n_u8(valid, 7));
        vst1q_f32(d, vmulq_n_f32(vcvt_f32_f16(vget_low_f16(small)), 128.0f * by));
        vst1q_f32(d + 4, vmulq_n_f32(vcvt_high_f32_f16(small), 128.0f * by));
    }
};
template <> struct Integers<Format::NVFP4> : NvBlocks<72, 0> {
    static void scales(const uint8_t* b, float* d, float*) { eight(b, 0, 1.0f, d), eight(b, 2, 1.0f, d + 8); }
};
template <> struct Integers<Format::NVFP4_SCALED> : NvBlocks<76, 4> {
    static void scales(const uint8_t* b, float* d, float*) { eight(b, 0, f32(b), d), eight(b, 2, f32(b + 76), d + 8); }
};

// Q4_K and Q5_K: 32 bytes are two groups.
template <int NIBBLES> struct KGroups : Whole<32, true> {
    static uint8x16_t number4(const Two& t, int j) { return nibble(t.at(NIBBLES + j / 8 * 32 + j % 4 * 8), j % 8 / 4); }
    static void scales(const uint8_t* b, float* d, float* p) { // 6-bit numbers in three words, as scale_min (kernels/dequant.h) reads them
        const uint32_t s = u32(b + 4), m = u32(b + 8), more = u32(b + 12), low = 0x0f0f0f0f, two = 0x30303030, six = 0x3f3f3f3f;
        const uint32x4_t all = {s & six, (more & low) | (s >> 2 & two), m & six, (more >> 4 & low) | (m >> 2 & two)};
        float products[16];
        times(1.0f, (int8x16_t)all, products);
        for (int g = 0; g < 8; g++) d[g] = half(b) * products[g], p[g] = -half(b + 2) * products[8 + g];
    }
};
template <> struct Integers<Format::Q4_K> : KGroups<16> {
    static constexpr int BYTES = 144;
    static int8x16_t number(const Two& t, int j) { return (int8x16_t)number4(t, j); }
};
template <> struct Integers<Format::Q5_K> : KGroups<48> {
    static constexpr int BYTES = 176;
    static int8x16_t number(const Two& t, int j) { // bit g of 32 bytes belongs to group g
        const uint8x16_t set = vtstq_u8(t.at(16 + j % 4 * 8), vdupq_n_u8((uint8_t)(1 << j / 4)));
        return (int8x16_t)vorrq_u8(number4(t, j), vandq_u8(set, vdupq_n_u8(16)));
    }
};

// K-quants with groups of 16.
template <> struct Integers<Format::Q6_K> : Whole<16> {
    static constexpr int BYTES = 210;
    static int8x16_t number(const Two& t, int j) {
        const int part = j / 16, g = j / 4 % 4, i = j % 4 * 8;
        const uint8x16_t high = two_bits(t.at(128 + 32 * part + i), g);
        return less(vorrq_u8(nibble(t.at(64 * part + g % 2 * 32 + i), g / 2), vshlq_n_u8(high, 4)), 32);
    }
    static void scales(const uint8_t* b, float* d, float*) { times(half(b + 208), vld1q_s8((const int8_t*)b + 192), d); }
};
template <> struct Integers<Format::Q2_K> : Whole<16, true> {
    static constexpr int BYTES = 84;
    static int8x16_t number(const Two& t, int j) { return (int8x16_t)two_bits(t.at(16 + j / 16 * 32 + j % 4 * 8), j / 4 % 4); }
    static void scales(const uint8_t* b, float* d, float* p) {
        const uint8x16_t both = vld1q_u8(b);
        times(half(b + 80), (int8x16_t)nibble(both, 0), d), times(-half(b + 82), (int8x16_t)nibble(both, 1), p);
    }
};
template <> struct Integers<Format::Q3_K> : Whole<16> {
    static constexpr int BYTES = 110;
    static int8x16_t number(const Two& t, int j) { // bit j / 4 of 32 bytes: four are not to be taken away
        const uint8x16_t set = vtstq_u8(t.at(j % 4 * 8), vdupq_n_u8((uint8_t)(1 << j / 4))), low = two_bits(t.at(32 + j / 16 * 32 + j % 4 * 8), j / 4 % 4);
        return (int8x16_t)vsubq_u8(low, vbicq_u8(vdupq_n_u8(4), set));
    }
    static void scales(const uint8_t* b, float* d, float*) { // as scale_q3_k reads them
        const uint8x8_t eight = vld1_u8(b + 96);
        const uint8x16_t low = vcombine_u8(vand_u8(eight, vdup_n_u8(15)), vshr_n_u8(eight, 4)), four = (uint8x16_t)vdupq_n_u32(u32(b + 104));
        const int8x16_t by = {0, 0, 0, 0, -2, -2, -2, -2, -4, -4, -4, -4, -6, -6, -6, -6};
        times(half(b + 108), less(vorrq_u8(low, vshlq_n_u8(vandq_u8(vshlq_u8(four, by), vdupq_n_u8(3)), 4)), 32), d);
    }
};

// Magnitudes in code books (kernels/grids.h), a bit of sign each: seven are given, the eighth makes their number even.
struct AllEight {
    uint8_t of[128];
    constexpr AllEight() : of() {
        for (int i = 0; i < 128; i++) of[i] = (uint8_t)(i | __builtin_parity(i) << 7);
    }
};
inline constexpr AllEight ALL_EIGHT;
struct Books {
    static int8x16_t with_signs(uint64_t a, uint64_t b, uint32_t signs_a, uint32_t signs_b) { // magnitudes; the low seven bits of signs
        const uint8_t *sign_a = &ALL_EIGHT.of[signs_a & 127], *sign_b = &ALL_EIGHT.of[signs_b & 127];
        const int8x16_t magnitudes = (int8x16_t)uint64x2_t{a, b}, minus = (int8x16_t)Two{sign_a, sign_b}.bits(0);
        return vsubq_s8(veorq_s8(magnitudes, minus), minus);
    }
};
template <> struct Integers<Format::IQ2_XXS> : Books, Whole<32, false, true> {
    static constexpr int BYTES = 66;
    static int8x16_t number(const Two& t, int j) {
        const int group = 2 + j / 4 * 8, i = j % 4;
        return with_signs(IQ2_XXS_GRID.at[t.a[group + i]], IQ2_XXS_GRID.at[t.b[group + i]], u32(t.a + group + 4) >> 7 * i, u32(t.b + group + 4) >> 7 * i);
    }
    static void scales(const uint8_t* b, float* d, float*) {
        for (int g = 0; g < 8; g++) d[g] = half(b) * (0.5f + (float)(b[9 + 8 * g] >> 4)) * 0.25f;
    }
};
template <> struct Integers<Format::IQ2_XS> : Books, Whole<16> {
    static constexpr int BYTES = 74;
    static int8x16_t number(const Two& t, int j) {
        const uint32_t a = u16(t.a + 2 + 2 * j), b = u16(t.b + 2 + 2 * j);
        return with_signs(IQ2_XS_GRID.at[a & 511], IQ2_XS_GRID.at[b & 511], a >> 9, b >> 9);
    }
    static void scales(const uint8_t* b, float* d, float*) { // half of a byte each, low ones first; 2n + 1 eighths
        const uint8x8_t bytes = vld1_u8(b + 66);
        const uint8x16_t both = (uint8x16_t)vcombine_u8(vzip1_u8(vand_u8(bytes, vdup_n_u8(15)), vshr_n_u8(bytes, 4)), vzip2_u8(vand_u8(bytes, vdup_n_u8(15)), vshr_n_u8(bytes, 4)));
        times(half(b) * 0.125f, (int8x16_t)vaddq_u8(vaddq_u8(both, both), vdupq_n_u8(1)), d);
    }
};
template <> struct Integers<Format::IQ3_XXS> : Books, Whole<32, false, true> {
    static constexpr int BYTES = 98;
    static uint64_t eight(const uint8_t* codes) { return IQ3_XXS_GRID.at[codes[0]] | IQ3_XXS_GRID.at[codes[1]] << 32; }
    static int8x16_t number(const Two& t, int j) {
        const int codes = 2 + 2 * j, signs = 66 + j / 4 * 4;
        return with_signs(eight(t.a + codes), eight(t.b + codes), u32(t.a + signs) >> j % 4 * 7, u32(t.b + signs) >> j % 4 * 7);
    }
    static void scales(const uint8_t* b, float* d, float*) {
        for (int g = 0; g < 8; g++) d[g] = half(b) * (0.5f + (float)(b[69 + 4 * g] >> 4)) * 0.5f;
    }
};

} // namespace MOORAGE_ISA
