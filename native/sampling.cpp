#include "sampling.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#if defined(__x86_64__) && defined(__gnu_linux__)
#define CLONES __attribute__((target_clones("avx2", "default")))
#else
#define CLONES
#endif

namespace {

constexpr float NEVER = -std::numeric_limits<float>::infinity();
constexpr int64_t BLOCK = 64;       // values under one maximum: whole blocks are passed over
constexpr int64_t SORTED = 1024;    // candidates sorted at once; more go into buckets by their distance from the best
constexpr int64_t HEAP = 512;       // most k for which a heap beats buckets
constexpr int BUCKETS = 4096;       // of 1/64 of a temperature: e^-64 of the best's mass is behind the last border
constexpr double PER_UNIT = 64;

// The compiler's vectors: the same lane by lane on every machine.
typedef double D4 __attribute__((vector_size(32)));
typedef int64_t L4 __attribute__((vector_size(32)));
typedef float F4 __attribute__((vector_size(16)));
typedef float F8 __attribute__((vector_size(32)));
typedef int32_t I8 __attribute__((vector_size(32)));

// out = exp(x) for x <= 0 to 1 ulp; 0 below -708. Cody and Waite's reduction, then the series to the 13th power: the rest is 2^-60.
// Both hold n values and up to three more.
CLONES void exponentials(const double* x, double* out, int64_t n) {
    constexpr double LOG2E = 1.4426950408889634, HIGH = 0.6931471803691238, LOW = 1.9082149292705877e-10, MAGIC = 6755399441055744.0;
    constexpr double SERIES[] = {1. / 479001600, 1. / 39916800, 1. / 3628800, 1. / 362880, 1. / 40320, 1. / 5040, 1. / 720, 1. / 120,
                                 1. / 24,        1. / 6,        1. / 2};
    const D4 least = {-708, -708, -708, -708}, zero = {};
    for (int64_t i = 0; i < n; i += 4) {
        D4 v;
        memcpy(&v, x + i, sizeof v);
        const L4 some = v >= least;
        v = some ? v : least;
        const D4 shifted = v * LOG2E + MAGIC; // the nearest whole number is in its lowest bits
        const D4 k = shifted - MAGIC, r = (v - k * HIGH) - k * LOW;
        D4 p = zero + 1. / 6227020800;
        for (double c : SERIES) p = p * r + c;
        p = p * r * r + r;
        const D4 scale = (D4)(((L4)shifted + 1023) << 52), e = p * scale + scale;
        const D4 result = some ? e : zero;
        memcpy(out + i, &result, sizeof result);
    }
}

// out = (row - best) / temperature; out holds up to three more.
CLONES void distances(const float* row, int64_t n, float best, double temperature, double* out) {
    int64_t i = 0;
    for (; i + 4 <= n; i += 4) {
        F4 v;
        memcpy(&v, row + i, sizeof v);
        const D4 x = (__builtin_convertvector(v, D4) - (double)best) / temperature;
        memcpy(out + i, &x, sizeof x);
    }
    for (; i < n; i++) out[i] = ((double)row[i] - best) / temperature;
}

// The largest value of every block; false when a value is not a number.
CLONES bool block_tops(const float* row, int64_t n, float* tops) {
    I8 odd = {};
    int64_t b = 0;
    for (; (b + 1) * BLOCK <= n; b++) {
        F8 most[2] = {F8{} + NEVER, F8{} + NEVER};
        for (int i = 0; i < BLOCK; i += 16)
            for (int j = 0; j < 2; j++) {
                F8 v;
                memcpy(&v, row + b * BLOCK + i + 8 * j, sizeof v);
                odd |= v != v;
                most[j] = v > most[j] ? v : most[j];
            }
        most[0] = most[0] > most[1] ? most[0] : most[1];
        float top = NEVER;
        for (int j = 0; j < 8; j++) top = most[0][j] > top ? most[0][j] : top;
        tops[b] = top;
    }
    bool numbers = true;
    for (int j = 0; j < 8; j++) numbers = numbers && !odd[j];
    if (b * BLOCK < n) tops[b] = NEVER;
    for (int64_t i = b * BLOCK; i < n; i++) numbers = numbers && row[i] == row[i], tops[b] = row[i] > tops[b] ? row[i] : tops[b];
    return numbers;
}

// Leaves values whose bit is set; those behind the end of the bits are not.
CLONES void restrict_to(float* row, int64_t n, const uint8_t* mask, int64_t bytes) {
    const I8 bit = {1, 2, 4, 8, 16, 32, 64, 128};
    const F8 never = F8{} + NEVER;
    int64_t at = 0;
    for (; at / 8 < bytes && at + 8 <= n; at += 8) {
        F8 v;
        memcpy(&v, row + at, sizeof v);
        const I8 allowed = ((I8{} + mask[at / 8]) & bit) != 0;
        v = allowed ? v : never;
        memcpy(row + at, &v, sizeof v);
    }
    for (; at < n; at++)
        if (at / 8 >= bytes || !(mask[at / 8] >> at % 8 & 1)) row[at] = NEVER;
}

struct Tops {
    std::vector<float> of;
    float best = NEVER;
    bool numbers;
    Tops(const float* row, int64_t n) : of((n + BLOCK - 1) / BLOCK) {
        numbers = block_tops(row, n, of.data());
        for (float t : of) best = std::max(best, t);
    }
};

struct Better { // the higher value, of equals the lower id
    const float* row;
    bool operator()(int32_t a, int32_t b) const { return row[a] > row[b] || (row[a] == row[b] && a < b); }
};

// The k best in no order.
std::vector<int32_t> few_best(const float* row, int64_t n, int64_t k, const Tops& tops) {
    const Better better{row};
    std::vector<int32_t> heap; // the worst of them first
    for (int64_t b = 0; b * BLOCK < n; b++) {
        if ((int64_t)heap.size() == k && tops.of[b] <= row[heap[0]]) continue; // later equals lose
        for (int64_t i = b * BLOCK; i < std::min(n, (b + 1) * BLOCK); i++) {
            if ((int64_t)heap.size() < k) {
                heap.push_back((int32_t)i), std::push_heap(heap.begin(), heap.end(), better);
            } else if (row[i] > row[heap[0]]) {
                std::pop_heap(heap.begin(), heap.end(), better);
                heap.back() = (int32_t)i, std::push_heap(heap.begin(), heap.end(), better);
            }
        }
    }
    return heap;
}

// What may be drawn: ids ascending (null: all), x = log of their mass, 0 for the best, mass = exp(x) once it is asked for.
struct Candidates {
    std::vector<int32_t> ids;
    std::vector<double> x, mass;
    int64_t count = 0;
    bool all = false, weighed = false;

    int32_t id(int64_t i) const { return all ? (int32_t)i : ids[i]; }
    int bucket(int64_t i) const { return (int)std::min<double>(-x[i] * PER_UNIT, BUCKETS - 1); }

    void start(int64_t n) { count = n, weighed = false, x.resize(n + 3), mass.resize(n + 3); }
    void take_all(const float* row, int64_t n, float best, double temperature) {
        start(n), all = true;
        distances(row, n, best, temperature, x.data());
    }
    template <class Some> void take(const Some& some, const float* row, float best, double temperature) {
        ids.assign(some.begin(), some.end());
        start((int64_t)ids.size()), all = false;
        for (int64_t i = 0; i < count; i++) x[i] = ((double)row[ids[i]] - best) / temperature;
    }
    void weigh() {
        if (!weighed) exponentials(x.data(), mass.data(), count);
        weighed = true;
    }
    template <class Keep> void keep(const Keep& wanted) {
        if (all) ids.resize(count);
        int64_t to = 0;
        for (int64_t i = 0; i < count; i++)
            if (wanted(i)) {
                ids[to] = id(i), x[to] = x[i];
                if (weighed) mass[to] = mass[i];
                to++;
            }
        count = to, all = false;
    }

    // Keeps the best until what they are worth together reaches `wanted`: at least one, of equals the lower id.
    template <class Worth> void cut(double wanted, const Worth& worth) {
        int border = 0;
        double reached = 0;
        const bool small = count <= SORTED;
        if (!small) {
            std::vector<double> sums(BUCKETS);
            for (int64_t i = 0; i < count; i++) sums[bucket(i)] += worth(i);
            while (border < BUCKETS - 1 && reached + sums[border] < wanted) reached += sums[border++];
        }
        std::vector<int32_t> order; // of the candidates that the border goes through
        for (int64_t i = 0; i < count; i++)
            if (small || bucket(i) == border) order.push_back((int32_t)i);
        std::sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return x[a] > x[b] || (x[a] == x[b] && a < b); });
        size_t inside = 0;
        while (inside < order.size() && !(inside && reached >= wanted)) reached += worth(order[inside++]);
        if (inside == 0) return; // nothing lies there: all that are better stay, and that is all
        const int32_t last = order[inside - 1];
        const double edge = x[last];
        keep([&](int64_t i) { return x[i] > edge || (x[i] == edge && i <= last); });
    }
};

int64_t drawn(const Candidates& c, double u) {
    std::vector<double> reached; // at the end of every block
    reached.reserve(c.count / BLOCK);
    double sum = 0;
    for (int64_t i = 0; i < c.count; i++) {
        sum += c.mass[i];
        if (i % BLOCK == BLOCK - 1) reached.push_back(sum);
    }
    const double wanted = u * sum;
    // never past what has mass: rounding may carry u to the very end
    auto there = [&](double mass) { return mass > wanted || mass >= sum; };
    const int64_t block = std::find_if(reached.begin(), reached.end(), there) - reached.begin();
    double mass = block ? reached[block - 1] : 0;
    for (int64_t i = block * BLOCK; i < c.count; i++)
        if (there(mass += c.mass[i])) return c.id(i);
    return c.id(c.count - 1);
}

} // namespace

void edit(float* row, int64_t n, const Edits& e) {
    if (e.repetition != 1) {
        auto repeat = [&](int64_t id) { row[id] = row[id] > 0 ? row[id] / e.repetition : row[id] * e.repetition; };
        for (int64_t i = 0; i < e.prompts; i++) repeat(e.prompt[i]);
        for (auto [id, times] : e.counts)
            if (!std::binary_search(e.prompt, e.prompt + e.prompts, id)) repeat(id);
    }
    if (e.presence || e.frequency)
        for (auto [id, times] : e.counts) row[id] -= e.presence + e.frequency * (float)times;
    for (auto [id, value] : e.bias) row[id] += value;
    for (int64_t id : e.banned) row[id] = NEVER;
    if (!e.mask) return;
    std::vector<float> stops;
    for (int64_t id : e.stops) stops.push_back(row[id]);
    restrict_to(row, n, e.mask, e.mask_bytes);
    for (size_t i = 0; i < stops.size(); i++) row[e.stops[i]] = e.may_stop ? stops[i] : NEVER;
}

int64_t choose(const float* row, int64_t n, const Choice& c) {
    const Tops tops(row, n);
    if (!tops.numbers) return NO_NUMBERS;
    if (tops.best == NEVER) return ALL_BANNED;
    if (!std::isfinite(tops.best)) return NO_NUMBERS;
    if (c.temperature <= 0) {
        const int64_t block = std::find(tops.of.begin(), tops.of.end(), tops.best) - tops.of.begin();
        return std::find(row + block * BLOCK, row + n, tops.best) - row;
    }
    thread_local Candidates found; // megabytes that the next row needs again
    const bool some = 0 < c.top_k && c.top_k < n;
    const double least = c.min_p > 0 ? std::log(c.min_p) : 0;
    if (some && c.top_k <= HEAP) {
        std::vector<int32_t> ids = few_best(row, n, c.top_k, tops);
        std::sort(ids.begin(), ids.end());
        found.take(ids, row, tops.best, c.temperature);
    } else if (!some && c.top_p >= 1 && c.min_p > 0) { // blocks whose best is too far away are passed over
        std::vector<int32_t> ids;
        for (int64_t b = 0; b * BLOCK < n; b++)
            for (int64_t i = b * BLOCK; ((double)tops.of[b] - tops.best) / c.temperature >= least && i < std::min(n, (b + 1) * BLOCK); i++)
                if (((double)row[i] - tops.best) / c.temperature >= least) ids.push_back((int32_t)i);
        found.take(ids, row, tops.best, c.temperature);
    } else {
        found.take_all(row, n, tops.best, c.temperature);
        if (some) found.cut((double)c.top_k, [](int64_t) { return 1.0; });
    }
    if (c.top_p < 1) {
        found.weigh();
        double total = 0;
        for (int64_t i = 0; i < found.count; i++) total += found.mass[i];
        found.cut(total * c.top_p, [&](int64_t i) { return found.mass[i]; });
    }
    if (c.min_p > 0) found.keep([&](int64_t i) { return found.x[i] >= least; });
    found.weigh();
    return drawn(found, c.u);
}

double log_sum(const float* row, int64_t n) {
    float best = NEVER;
    for (int64_t i = 0; i < n; i++) best = row[i] > best ? row[i] : best;
    double sum = 0, x[BLOCK] = {}, e[BLOCK];
    for (int64_t at = 0; at < n; at += BLOCK) {
        const int64_t size = std::min(BLOCK, n - at);
        for (int64_t i = 0; i < size; i++) x[i] = (double)row[at + i] - best;
        exponentials(x, e, size);
        for (int64_t i = 0; i < size; i++) sum += e[i];
    }
    return best + std::log(sum);
}

std::vector<int32_t> best(const float* row, int64_t n, int64_t k) {
    k = std::min(k, n);
    if (k <= 0) return {};
    std::vector<int32_t> ids = few_best(row, n, k, Tops(row, n));
    std::sort(ids.begin(), ids.end(), Better{row});
    return ids;
}
