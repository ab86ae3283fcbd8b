// Formats whose magnitudes stand in code books (kernels/grids.h), for kernels/gemm_bytes.h: eight (four) magnitudes a code, a bit of sign each.
//
// Lanes: groups 0 1 4 5 2 3 6 7 of eight. Signs come as dwords whose low seven bits are given, the eighth makes their number even.
#pragma once
#include "bytes.h"

namespace MOORAGE_ISA {

// Vectors 2i and 2i + 1: the halves of a code's eight weights, four bits of sign each.
template <int MOST> struct Signed {
    static constexpr int lane_group(int lane) { return lane % 2 + lane % 4 / 2 * 4 + lane / 4 * 2; }
    static __m256i all_eight(__m256i seven) { // of every byte
        const __m256i low = _mm256_and_si256(seven, _mm256_set1_epi8(127)), folded = low_nibbles(_mm256_xor_si256(low, _mm256_srli_epi16(low, 4)));
        const __m128i odd = _mm_set_epi8(0, (char)128, (char)128, 0, (char)128, 0, 0, (char)128, (char)128, 0, 0, (char)128, 0, (char)128, (char)128, 0);
        return _mm256_or_si256(low, looked_up(odd, folded));
    }
    static __m256i four_sevens(__m256i dword) { // 28 bits as bytes
        const auto part = [&](int i) { return _mm256_and_si256(i ? _mm256_slli_epi32(dword, i) : dword, _mm256_set1_epi32(127 << 8 * i)); };
        return _mm256_or_si256(_mm256_or_si256(part(0), part(1)), _mm256_or_si256(part(2), part(3)));
    }
    // Signs: byte `byte` of every dword of `signs`, its low or high half; plus MOST: unsigned.
    static __m256i with_signs(__m256i magnitudes, __m256i signs, int byte, int high) {
        const __m256i dword = _mm256_setr_epi32(0, 0x04040404, 0x08080808, 0x0c0c0c0c, 0, 0x04040404, 0x08080808, 0x0c0c0c0c);
        const __m256i bit = _mm256_set1_epi32(high ? (int)0x80402010 : 0x08040201);
        const __m256i bits = _mm256_and_si256(_mm256_shuffle_epi8(signs, _mm256_add_epi8(dword, _mm256_set1_epi8((char)byte))), bit);
        const __m256i minus = _mm256_cmpeq_epi8(bits, bit); // -1 where negative
        return _mm256_add_epi8(_mm256_sub_epi8(_mm256_xor_si256(magnitudes, minus), minus), _mm256_set1_epi8(MOST));
    }
    // 64 bits of eight groups, as their low and high dwords.
    template <class At> static void sixty_fours(const At& at, __m256i* low, __m256i* high) {
        // a broadcast is a load alone and a blend takes any pipe; an insertion is a shuffle, for which there are two
        const auto all = [&](int i) { return _mm256_castpd_si256(_mm256_broadcast_sd((const double*)at(i))); };
        const auto four = [&](int i) {
            return _mm256_blend_epi32(_mm256_blend_epi32(all(i), all(i + 1), 0x0c), _mm256_blend_epi32(all(i + 2), all(i + 3), 0xc0), 0xf0);
        };
        const __m256i first = four(0), second = four(4);
        *low = dwords(first, second, 0), *high = dwords(first, second, 1);
    }
};

// Eight groups of 32 in 64 bits each: four codes; then four times seven signs, and four bits of scale.
template <> struct Integers<Format::IQ2_XXS> : Signed<43>, Whole<86, 43> {
    static constexpr int BYTES = 66, RAW = 9;
    static constexpr int first(int v, int lane) { return 32 * lane_group(lane) + 4 * v; }
    static void raw(const uint8_t* b, int, __m256i* t) {
        __m256i codes;
        sixty_fours([&](int g) { return b + 2 + 8 * g; }, &codes, &t[8]);
        t[8] = all_eight(four_sevens(t[8]));
        for (int i = 0; i < 4; i++) sixty_fours([&](int g) { return &IQ2_XXS_GRID.at[b[2 + 8 * g + i]]; }, &t[2 * i], &t[2 * i + 1]);
    }
    static __m256i number(const uint8_t*, const __m256i* t, int v) { return with_signs(t[v], t[8], v / 2, v % 2); }
    template <class S> static void scales(const uint8_t* b, S& s) {
        __m256i codes, signs;
        sixty_fours([&](int g) { return b + 2 + 8 * g; }, &codes, &signs);
        const __m256 number = _mm256_add_ps(_mm256_set1_ps(0.5f), _mm256_cvtepi32_ps(_mm256_srli_epi32(signs, 28)));
        s.d[0] = _mm256_mul_ps(_mm256_mul_ps(_mm256_set1_ps(half(b)), number), _mm256_set1_ps(0.25f));
    }
};

// Sixteen groups of 16: two codes of nine bits each with seven signs.
template <> struct Integers<Format::IQ2_XS> : Signed<43>, Whole<86, 43, 2> {
    static constexpr int BYTES = 74, RAW = 5;
    static constexpr int first(int v, int lane) { return 128 * (v / 4) + 16 * lane_group(lane) + 4 * (v % 4); }
    static void raw(const uint8_t* b, int part, __m256i* t) {
        const uint8_t* codes = b + 2 + 32 * part; // of a group: 32 bits
        for (int i = 0; i < 2; i++) sixty_fours([&](int g) { return &IQ2_XS_GRID.at[u16(codes + 4 * g + 2 * i) & 511]; }, &t[2 * i], &t[2 * i + 1]);
        const __m256i both = _mm256_permutevar8x32_epi32(thirty_two_bytes(codes), _mm256_setr_epi32(0, 1, 4, 5, 2, 3, 6, 7));
        t[4] = all_eight(_mm256_srli_epi16(both, 9));
    }
    static __m256i number(const uint8_t*, const __m256i* t, int v) { return with_signs(t[v], t[4], v / 2 * 2, v % 2); }
    template <class S> static void scales(const uint8_t* b, S& s) { // byte j: of groups 2j and 2j + 1
        const __m128i bytes = _mm_loadl_epi64((const __m128i*)(b + 66)), mask = _mm_set1_epi8(15);
        const __m128i numbers = _mm_unpacklo_epi8(_mm_and_si128(bytes, mask), _mm_and_si128(_mm_srli_epi16(bytes, 4), mask));
        const __m128i sorted = _mm_shuffle_epi8(numbers, _mm_set_epi8(15, 14, 11, 10, 13, 12, 9, 8, 7, 6, 3, 2, 5, 4, 1, 0));
        for (int part = 0; part < 2; part++) {
            const __m256 number = _mm256_add_ps(_mm256_set1_ps(0.5f), _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(part ? _mm_srli_si128(sorted, 8) : sorted)));
            s.d[part] = _mm256_mul_ps(_mm256_mul_ps(_mm256_set1_ps(half(b)), number), _mm256_set1_ps(0.25f));
        }
    }
};

// Eight groups of 32: eight codes of four magnitudes each; behind all of them 32 bits as IQ2_XXS has them.
template <> struct Integers<Format::IQ3_XXS> : Signed<62>, Whole<124, 62> {
    static constexpr int BYTES = 98, RAW = 9;
    static constexpr int first(int v, int lane) { return 32 * lane_group(lane) + 4 * v; }
    static __m256i words(const uint8_t* b) { return _mm256_permutevar8x32_epi32(thirty_two_bytes(b + 66), _mm256_setr_epi32(0, 1, 4, 5, 2, 3, 6, 7)); }
    static void raw(const uint8_t* b, int, __m256i* t) {
        const auto all = [&](int g, int v) { return _mm256_castps_si256(_mm256_broadcast_ss((const float*)&IQ3_XXS_GRID.at[b[2 + 8 * g + v]])); };
        for (int v = 0; v < 8; v++) { // lanes by broadcasts and blends: a gather is eight cycles
            const auto two = [&](int g, int mask) { return _mm256_blend_epi32(all(g, v), all(g + 1, v), mask); };
            const __m256i low = _mm256_blend_epi32(two(0, 0x02), two(4, 0x08), 0x0c), high = _mm256_blend_epi32(two(2, 0x20), two(6, 0x80), 0xc0);
            t[v] = _mm256_blend_epi32(low, high, 0xf0);
        }
        t[8] = all_eight(four_sevens(words(b)));
    }
    static __m256i number(const uint8_t*, const __m256i* t, int v) { return with_signs(t[v], t[8], v / 2, v % 2); }
    template <class S> static void scales(const uint8_t* b, S& s) {
        const __m256 number = _mm256_add_ps(_mm256_set1_ps(0.5f), _mm256_cvtepi32_ps(_mm256_srli_epi32(words(b), 28)));
        s.d[0] = _mm256_mul_ps(_mm256_mul_ps(_mm256_set1_ps(half(b)), number), _mm256_set1_ps(0.5f));
    }
};

} // namespace MOORAGE_ISA
