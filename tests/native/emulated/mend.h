// Two instructions that Bochs 3.0 (and 3.1) computes wrongly. ../emulator.py sets the upper bit of their opcodes in the program, which makes
// them undefined; the fault for that ends here, and this does what the manual says.
//   vpinsrb with EVEX prefix and a short displacement: Bochs multiplies it by 2, it counts bytes.
//   vcvtne2ps2bf16: Bochs's upper half is not that of the first source.
#pragma once
#include <stdint.h>

enum { MENDED = 0x80, VPINSRB = 0x20, VCVTNE2PS2BF16 = 0x72 };

static uint32_t vectors[32][16] __attribute__((aligned(64)));
extern void save_vectors(void*), load_vectors(const void*);

static uint16_t bf16_of(uint32_t x) { // to nearest even; subnormal numbers are zero
    if ((x & 0x7f800000) == 0) return x >> 16 & 0x8000;
    if ((x & 0x7fffffff) > 0x7f800000) return (uint16_t)(x >> 16 | 0x40);
    return (uint16_t)((x + 0x7fff + (x >> 16 & 1)) >> 16);
}

// Where a memory operand lies: modrm, sib and displacement at `p`, which moves behind them. A short displacement counts `scale` bytes.
static uint8_t* operand(const uint8_t** p, int x, int b, const uint64_t* regs, int64_t scale) {
    const uint8_t* q = *p;
    const int mod = *q >> 6, rm = *q++ & 7;
    uint64_t at = regs[rm + b];
    if (rm == 4) {
        const int index = (*q >> 3 & 7) + x, base = *q & 7;
        at = (mod == 0 && base == 5 ? 0 : regs[base + b]) + (index == 4 ? 0 : regs[index] << (*q >> 6));
        q++;
        if (mod == 0 && base == 5) at += (uint64_t)(int64_t)*(const int32_t*)q, q += 4;
    }
    if (mod == 1) at += (uint64_t)(scale * *(const int8_t*)q), q += 1;
    if (mod == 2) at += (uint64_t)(int64_t)*(const int32_t*)q, q += 4;
    *p = q;
    return (uint8_t*)at;
}

// Nonzero: the instruction at *rip was one of these and has been done. Without masks; not relative to rip.
static int mend(const uint64_t* regs, uint64_t* rip) {
    const uint8_t* p = (const uint8_t*)*rip;
    if (p[0] != 0x62 || !(p[4] & MENDED) || p[3] & 0x97 || (p[5] & 0xc7) == 5) return 0;
    const int opcode = p[4] & ~MENDED, to = (p[5] >> 3 & 7) + (p[1] & 0x80 ? 0 : 8) + (p[1] & 0x10 ? 0 : 16); // the prefix has its bits inverted
    const int x = p[1] & 0x40 ? 0 : 8, b = p[1] & 0x20 ? 0 : 8, first = (~p[2] >> 3 & 15) + (p[3] & 0x08 ? 0 : 16);
    const int in_register = p[5] >> 6 == 3, second = (p[5] & 7) + b + 2 * x;
    if (opcode == VPINSRB ? in_register : opcode != VCVTNE2PS2BF16 || (p[3] & 0x60) != 0x40) return 0;
    p += 5;
    save_vectors(vectors);
    uint32_t out[16] = {0};
    if (opcode == VPINSRB) {
        const uint8_t byte = *operand(&p, x, b, regs, 1);
        for (int i = 0; i < 4; i++) out[i] = vectors[first][i];
        ((uint8_t*)out)[*p++ & 15] = byte;
    } else {
        const uint32_t* low = in_register ? vectors[second] : (const uint32_t*)operand(&p, x, b, regs, 64);
        for (int i = 0; i < 16; i++) ((uint16_t*)out)[i] = bf16_of(low[i]), ((uint16_t*)out)[16 + i] = bf16_of(vectors[first][i]);
        p += in_register;
    }
    for (int i = 0; i < 16; i++) vectors[to][i] = out[i];
    load_vectors(vectors);
    *rip = (uint64_t)p;
    return 1;
}
