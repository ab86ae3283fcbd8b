// How near to memory and to arithmetic a product with one row of x is: both cores read memory, multiply what they read from it, and multiply
// what lies in their L2, in turns of a few milliseconds, so that all three meet the same neighbours on a shared machine.
//
//     g++ -std=c++20 -O3 -ffp-contract=off -mavx2 -mfma -mf16c -Wno-psabi -DMOORAGE_ISA=avx2 -I. ops/bench/wall.cpp -o wall -pthread
//     ./wall 60 BF16,Q8_0,Q4_0 > docs/results/NAME.json      rounds, formats
//
// GB/s of stored weights of 2,048 columns: the median and the best tenth of the rounds, the ratios are medians of a round's.
#include "native/kernels/gemm.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string>
#include <sys/mman.h>
#include <thread>
#include <vector>

using namespace MOORAGE_ISA;

constexpr int64_t COLS = 2048, AREAS = 6, BYTES = 192 << 20; // more than the caches hold; a turn is one area
enum Turn { READ, MEMORY, CACHE, KINDS };

static double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }
static double at(std::vector<double> v, double q) {
    std::sort(v.begin(), v.end());
    return v[(size_t)(q * (double)(v.size() - 1))];
}
static void bind(int core) {
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(core, &one);
    sched_setaffinity(0, sizeof one, &one);
}
static float read(const uint8_t* p, int64_t bytes) {
    F acc[4] = {zero(), zero(), zero(), zero()};
    for (int64_t i = 0; i + 256 <= bytes; i += 256)
        for (int a = 0; a < 4; a++) acc[a] = max(acc[a], load((const float*)(p + i + 64 * a)));
    return top(max(max(acc[0], acc[1]), max(acc[2], acc[3])));
}

struct Bench {
    Format format;
    const uint8_t* data;
    void *panel, *scratch[2];
    float out[2][BLOCK];

    int64_t block() const { return BLOCK * row_bytes(format, COLS); }
    int64_t bytes() const { return BYTES / AREAS / 2 / block() * block(); } // of one core in a turn
    void turn(int core, Turn what, int round) {
        const uint8_t* p = data + round % AREAS * (BYTES / AREAS) + core * bytes();
        for (int64_t i = 0; i < bytes(); i += block()) {
            if (what == READ) {
                out[core][0] += read(p + i, block());
                continue;
            }
            const uint8_t* from = what == MEMORY ? p + i : p;
            const Matrix m{format, from, BLOCK, COLS, row_bytes(format, COLS)};
            gemm(m, 0, BLOCK, panel, 1, 0, 1, scratch[core], what == MEMORY ? from + block() : from, [&](int64_t, int, const float* c) { memcpy(out[core], c, sizeof out[core]); });
        }
    }
    void run(int rounds, std::vector<double>* rate) {
        std::atomic<int> begun{0}, ended{0};
        double end = 0;
        std::thread other([&] {
            bind(1);
            for (int i = 0; i < KINDS * rounds; i++) {
                while (begun.load() <= i) {}
                turn(1, (Turn)(i % KINDS), i / KINDS);
                end = now();
                ended.store(i + 1);
            }
        });
        bind(0);
        for (int i = 0; i < KINDS * rounds; i++) {
            const double start = now();
            begun.store(i + 1);
            turn(0, (Turn)(i % KINDS), i / KINDS);
            const double mine = now();
            while (ended.load() <= i) {}
            rate[i % KINDS].push_back(2e-9 * (double)bytes() / (std::max(mine, end) - start));
        }
        other.join();
    }
};

int main(int argc, char** argv) {
    const int rounds = argc > 1 ? atoi(argv[1]) : 60;
    const std::string wanted = std::string(",") + (argc > 2 ? argv[2] : "BF16,Q8_0,Q4_0") + ",";
    uint8_t* data = (uint8_t*)mmap(nullptr, BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    madvise(data, BYTES, MADV_HUGEPAGE);
    float x[COLS];
    for (int i = 0; i < COLS; i++) x[i] = (float)(i % 37) - 18;
    printf("{\"columns\": %d, \"rounds\": %d, \"formats\": {", (int)COLS, rounds);
    for (int f = 0, n = 0; f < (int)Format::COUNT; f++) {
        if (wanted.find(std::string(",") + FORMATS[f].name + ",") == std::string::npos) continue;
        Bench b{(Format)f, data, aligned_alloc(64, 1 << 20), {aligned_alloc(64, 4 << 20), aligned_alloc(64, 4 << 20)}, {}};
        const bool high = b.format == Format::NVFP4_SCALED || b.format == Format::F8_E4M3; // scales of usual size: subnormal products are slow
        memset(data, high ? 0x3c : b.format == Format::MXFP4 ? 0x77 : 0x11, BYTES);
        pack(b.panel, b.format, 1, COLS, 0, x, nullptr);
        std::vector<double> rate[KINDS];
        b.run(rounds, rate);
        printf("%s\n \"%s\": {", n++ ? "," : "", FORMATS[f].name);
        const char* names[] = {"read", "memory", "cache"};
        for (int t = 0; t < KINDS; t++) printf("\"%s_gb_s\": %.2f, \"%s_best_gb_s\": %.2f, ", names[t], at(rate[t], 0.5), names[t], at(rate[t], 0.9));
        const auto ratio = [&](int a, int b) {
            std::vector<double> v;
            for (int r = 0; r < rounds; r++) v.push_back(rate[a][r] / rate[b][r]);
            return at(v, 0.5);
        };
        printf("\"memory_of_read\": %.3f, \"cache_of_read\": %.3f, \"memory_of_cache\": %.3f}", ratio(MEMORY, READ), ratio(CACHE, READ), ratio(MEMORY, CACHE));
        fflush(stdout);
    }
    printf("\n}}\n");
}
