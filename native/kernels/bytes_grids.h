// Formats whose magnitudes stand in code books (kernels/grids.h), for kernels/gemm_bytes.h: eight (four) magnitudes a code, a bit of sign each.
//
// Two vectors are looked up at a time (`looked`: magnitudes plus OFFSET) and get their signs (SIGNS registers of a part) when those have come (`number`).
// Lanes: groups 0 1 4 5 2 3 6 7 of eight.
#pragma once
#include "bytes.h"

namespace MOORAGE_ISA {

inline constexpr Grid<256, 2> IQ2_XXS_43(IQ2_XXS_CODES, IQ2_LEVELS, 43);
inline constexpr Grid<512, 2> IQ2_XS_43(IQ2_XS_CODES, IQ2_LEVELS, 43);
inline constexpr Grid<256, 4> IQ3_XXS_62(IQ3_XXS_CODES, IQ3_LEVELS, 62);

// Vectors 2i and 2i + 1: the halves of a code's eight weights, four bits of sign each.
template <int MOST> struct Signed {
    static constexpr int lane_group(int lane) { return lane % 2 + lane % 4 / 2 * 4 + lane / 4 * 2; }
    // The eighth sign of every seven makes their number even: what to look up four bits in, each of which is two of the seven.
    static __m256i with_eighth(__m256i seven) {
        const __m128i odd = _mm_set_epi8(0, (char)128, (char)128, 0, (char)128, 0, 0, (char)128, (char)128, 0, 0, (char)128, 0, (char)128, (char)128, 0);
        return _mm256_or_si256(seven, looked_up(odd, low_nibbles(_mm256_xor_si256(seven, _mm256_srli_epi16(seven, 4)))));
    }
    // Signs are words: the low byte those of a code, the high one the same moved down by one. A lane has those of two codes.
    static void four_sevens(__m256i dword, __m256i* signs) { // 28 bits
        const __m256i fourteens = _mm256_blend_epi16(dword, _mm256_slli_epi32(dword, 2), 0xaa);
        const __m256i bytes = _mm256_blendv_epi8(fourteens, _mm256_slli_epi16(fourteens, 1), _mm256_set1_epi16((short)0xff00));
        const __m256i eight = with_eighth(_mm256_and_si256(bytes, _mm256_set1_epi8(127))), moved = _mm256_srli_epi16(eight, 1);
        const __m256i first = _mm256_unpacklo_epi8(eight, moved), second = _mm256_unpackhi_epi8(eight, moved);
        signs[0] = dwords(first, second, 0), signs[1] = dwords(first, second, 1);
    }
    // Word `word` of every lane of `signs`, its low or high half: a product brings bit j of a half to the top of byte j.
    static __m256i with_signs(__m256i plus, __m256i signs, int word, int high) {
        const __m256i where = _mm256_setr_epi32(0x01000100, 0x05040504, 0x09080908, 0x0d0c0d0c, 0x01000100, 0x05040504, 0x09080908, 0x0d0c0d0c);
        const __m256i both = _mm256_shuffle_epi8(signs, word ? _mm256_add_epi8(where, _mm256_set1_epi8(2)) : where);
        const __m256i product = _mm256_mullo_epi16(both, _mm256_set1_epi32(0x0002'0008)), minus = high ? product : _mm256_slli_epi16(product, 4);
        return _mm256_blendv_epi8(plus, _mm256_sub_epi8(_mm256_set1_epi8(2 * MOST), plus), minus);
    }
    // 64 bits of eight groups, as their low and high dwords.
    template <class At> static void sixty_fours(const At& at, __m256i* to) {
        const auto two = [&](int i) {
            return _mm_castps_si128(_mm_loadh_pi(_mm_castsi128_ps(_mm_loadl_epi64((const __m128i*)at(i))), (const __m64*)at(i + 1)));
        };
        const __m256i first = _mm256_set_m128i(two(2), two(0)), second = _mm256_set_m128i(two(6), two(4));
        to[0] = dwords(first, second, 0), to[1] = dwords(first, second, 1);
    }
};

// Eight groups of 32 in 64 bits each: four codes; then four times seven signs, and four bits of scale.
template <> struct Integers<Format::IQ2_XXS> : Signed<43>, Whole<86, 43> {
    static constexpr int BYTES = 66, SIGNS = 2;
    static constexpr int first(int v, int lane) { return 32 * lane_group(lane) + 4 * v; }
    static __m256i words(const uint8_t* b) { return dwords(thirty_two_bytes(b + 2), thirty_two_bytes(b + 34), 1); }
    static void signs(const uint8_t* b, int, __m256i* s) { four_sevens(words(b), s); }
    static void looked(const uint8_t* b, int, int pair, __m256i* to) {
        sixty_fours([&](int g) { return &IQ2_XXS_43.at[b[2 + 8 * g + pair]]; }, to);
    }
    static __m256i number(__m256i plus, const __m256i* s, int v) { return with_signs(plus, s[v / 4], v / 2 % 2, v % 2); }
    template <class S> static void scales(const uint8_t* b, S& s) {
        const __m256 number = _mm256_fmadd_ps(_mm256_cvtepi32_ps(_mm256_srli_epi32(words(b), 28)), _mm256_set1_ps(0.25f), _mm256_set1_ps(0.125f));
        s.d[0] = _mm256_mul_ps(half_everywhere(b), number);
    }
};

// Sixteen groups of 16: two codes of nine bits each with seven signs.
template <> struct Integers<Format::IQ2_XS> : Signed<43>, Whole<86, 43, 2> {
    static constexpr int BYTES = 74, SIGNS = 1;
    static constexpr int first(int v, int lane) { return 128 * (v / 4) + 16 * lane_group(lane) + 4 * (v % 4); }
    static void signs(const uint8_t* b, int part, __m256i* s) {
        const __m256i eight = with_eighth(_mm256_srli_epi16(_mm256_permute4x64_epi64(thirty_two_bytes(b + 2 + 32 * part), 0xd8), 9));
        s[0] = _mm256_or_si256(eight, _mm256_slli_epi16(eight, 7));
    }
    static void looked(const uint8_t* b, int part, int pair, __m256i* to) {
        sixty_fours([&](int g) { return &IQ2_XS_43.at[u16(b + 2 + 32 * part + 4 * g + 2 * pair) & 511]; }, to);
    }
    static __m256i number(__m256i plus, const __m256i* s, int v) { return with_signs(plus, s[0], v / 2, v % 2); }
    template <class S> static void scales(const uint8_t* b, S& s) { // byte j: of groups 2j and 2j + 1
        const __m128i bytes = _mm_loadl_epi64((const __m128i*)(b + 66)), mask = _mm_set1_epi8(15);
        const __m128i numbers = _mm_unpacklo_epi8(_mm_and_si128(bytes, mask), _mm_and_si128(_mm_srli_epi16(bytes, 4), mask));
        const __m128i sorted = _mm_shuffle_epi8(numbers, _mm_set_epi8(15, 14, 11, 10, 13, 12, 9, 8, 7, 6, 3, 2, 5, 4, 1, 0));
        for (int part = 0; part < 2; part++) {
            const __m256 number = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(part ? _mm_srli_si128(sorted, 8) : sorted));
            s.d[part] = _mm256_mul_ps(half_everywhere(b), _mm256_fmadd_ps(number, _mm256_set1_ps(0.25f), _mm256_set1_ps(0.125f)));
        }
    }
};

// Eight groups of 32: eight codes of four magnitudes each; behind all of them 32 bits as IQ2_XXS has them.
template <> struct Integers<Format::IQ3_XXS> : Signed<62>, Whole<124, 62> {
    static constexpr int BYTES = 98, SIGNS = 2;
    static constexpr int first(int v, int lane) { return 32 * lane_group(lane) + 4 * v; }
    static __m256i words(const uint8_t* b) { return _mm256_permute4x64_epi64(thirty_two_bytes(b + 66), 0xd8); }
    static void signs(const uint8_t* b, int, __m256i* s) { four_sevens(words(b), s); }
    static void looked(const uint8_t* b, int, int pair, __m256i* to) {
        for (int i = 0; i < 2; i++) {
            const auto at = [&](int g) { return (int)IQ3_XXS_62.at[b[2 + 8 * g + 2 * pair + i]]; };
            const auto four = [&](int g) {
                return _mm_insert_epi32(_mm_insert_epi32(_mm_insert_epi32(_mm_cvtsi32_si128(at(g)), at(g + 1), 1), at(g + 4), 2), at(g + 5), 3);
            };
            to[i] = _mm256_set_m128i(four(2), four(0));
        }
    }
    static __m256i number(__m256i plus, const __m256i* s, int v) { return with_signs(plus, s[v / 4], v / 2 % 2, v % 2); }
    template <class S> static void scales(const uint8_t* b, S& s) {
        const __m256 number = _mm256_fmadd_ps(_mm256_cvtepi32_ps(_mm256_srli_epi32(words(b), 28)), _mm256_set1_ps(0.5f), _mm256_set1_ps(0.25f));
        s.d[0] = _mm256_mul_ps(half_everywhere(b), number);
    }
};

} // namespace MOORAGE_ISA
