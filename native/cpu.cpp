#include "cpu.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

// Linux: a process asks for the 8 KB tile state once; every thread has it from then on (arch/x86/kernel/fpu/xstate.c).
static bool grant_tiles() {
    constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}

Isa best_isa() {
    static const Isa best = [] {
        __builtin_cpu_init();
        if (!(__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))) return Isa::BASE;
        unsigned a, b, c, d;
        __cpuid_count(1, 0, a, b, c, d);
        if (!(c & bit_F16C)) return Isa::BASE;
        const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                            __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
        if (!avx512) return Isa::AVX2;
        if (!__builtin_cpu_supports("avx512vnni")) return Isa::AVX512;
        __cpuid_count(7, 0, a, b, c, d);
        const bool tiles = d >> 22 & 1 && d >> 24 & 1; // AMX-BF16, AMX-TILE
        const bool vbmi = __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vbmi2") && __builtin_cpu_supports("bmi2");
        unsigned a1 = 0;
        __cpuid_count(7, 1, a1, b, c, d);
        const bool bf16 = a1 >> 5 & 1;
        return tiles && vbmi && bf16 && grant_tiles() ? Isa::AMX : Isa::VNNI;
    }();
    return best;
}
#elif defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>

Isa best_isa() {
    constexpr unsigned long WANTED = HWCAP2_I8MM | HWCAP2_BF16;
    static const Isa best = (getauxval(AT_HWCAP2) & WANTED) == WANTED ? Isa::I8MM : Isa::BASE;
    return best;
}
#else
Isa best_isa() { return Isa::BASE; }
#endif
