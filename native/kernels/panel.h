// What every way to multiply without tiles shares: the size of a block of rows, how the next rows of weights come nearer, what stays in memory.
#pragma once
#include <stdint.h>

namespace MOORAGE_ISA {

constexpr int BLOCK = 32; // rows of a panel block, and weight rows of one gemm call

// Brings the rows that come next nearer, evenly and in address order: the hardware's streams cannot follow several rows inside one
// page, and a burst would hold all fill buffers of L1 for a memory latency. Every line once: one asked for again holds a buffer too.
inline void prefetch(const uint8_t*& line, const uint8_t* to) {
    for (; line < to; line += 64) __builtin_prefetch(line, 0, 2);
}

// What is in memory stays there and comes back as operands where it is needed: scales kept in registers would need a shuffle each, and what
// is read early is spilled.
inline void in_order() { __asm__ volatile("" ::: "memory"); }

} // namespace MOORAGE_ISA
