// What this processor can run, asked once.
#pragma once

#if defined(__aarch64__)
enum class Isa : int { BASE, I8MM };
#else
enum class Isa : int { BASE, AVX2, AVX512, VNNI, AMX };
#endif

struct IsaInfo {
    Isa isa;
    const char* name;
};
#if defined(__aarch64__)
constexpr IsaInfo ISAS[] = {{Isa::BASE, "base"}, {Isa::I8MM, "i8mm"}};
#else
constexpr IsaInfo ISAS[] = {{Isa::BASE, "base"}, {Isa::AVX2, "avx2"}, {Isa::AVX512, "avx512"}, {Isa::VNNI, "avx512vnni"}, {Isa::AMX, "amx"}};
#endif

// Raised whenever the bits of a result change: tokens computed under another number are not ours to continue.
constexpr int NUMERICS = 8;

// Raised whenever a function of the module takes or returns something else: `engine/kernels/cpu.py` names the number it calls.
constexpr int ABI = 8;

// The best set this build and this machine have in common. AMX counts only if the kernel grants the tile state.
Isa best_isa();
