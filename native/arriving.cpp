// Experts computed while they are read: those that are there first, each of the others as far as it has come, then the merge.
#include "ops.h"

#include <algorithm>
#include <chrono>
#include <cstring>

namespace {

// Positions in ids [n, k] where one of the experts is wanted.
std::vector<int64_t> wanted(const int32_t* ids, int64_t count, const std::vector<uint8_t>& which) {
    std::vector<int64_t> at;
    for (int64_t i = 0; i < count; i++)
        if (which[ids[i]]) at.push_back(i);
    return at;
}

} // namespace

Ops::Came Ops::moe_arriving(const float* x, int64_t n, const int32_t* ids, const float* weights, int k, int64_t experts,
                            const int32_t* place, const Experts& up, const Experts& down, int act, std::vector<Coming> coming,
                            Reader& reader, float* out) {
    std::lock_guard mine(arriving_);
    const int64_t width = up.one.cols;
    float* parts = (float*)parts_.need((size_t)(n * k * width) * sizeof(float)); // [n, k, width]
    std::vector<uint8_t> which(experts, 1);
    for (const Coming& each : coming) which[each.expert] = 0;
    Came came;

    const auto compute = [&](const Beyond* beyond) {
        const std::vector<int64_t> at = wanted(ids, n * k, which);
        if (at.empty()) return true;
        const int64_t count = (int64_t)at.size();
        float* rows = (float*)rows_.need((size_t)(count * width) * sizeof(float));
        float* results = (float*)results_.need((size_t)(count * width) * sizeof(float));
        std::vector<int32_t> own(count);
        for (int64_t i = 0; i < count; i++) {
            own[i] = ids[at[i]];
            std::memcpy(rows + i * width, x + at[i] / k * width, (size_t)width * sizeof(float));
        }
        const std::vector<float> ones(count, 1.0f);
        if (!moe_as_far(rows, count, own.data(), ones.data(), 1, experts, place, up, down, act, beyond, results)) return false;
        for (int64_t i = 0; i < count; i++) std::memcpy(parts + at[i] * width, results + i * width, (size_t)width * sizeof(float));
        return true;
    };

    compute(nullptr);
    while (!coming.empty()) {
        std::vector<int64_t> keys;
        for (const Coming& each : coming) keys.push_back(each.key);
        const std::vector<int64_t> there = reader.reach(keys);
        const int64_t record = reader.shelf().record, most = *std::max_element(there.begin(), there.end());
        // All that are whole at once: one alone has too few rows for many threads. Else the one of which most is there.
        std::vector<Coming> now, later;
        for (size_t i = 0; i < coming.size(); i++)
            (there[i] == most && (most == record || now.empty()) ? now : later).push_back(coming[i]);
        coming = std::move(later);
        which.assign(experts, 0);
        for (const Coming& each : now) which[each.expert] = 1;
        const Beyond beyond = [&](int64_t bytes) {
            const auto began = std::chrono::steady_clock::now();
            const int64_t here = reader.beyond(now[0].key, bytes);
            came.waited += std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
            return here;
        };
        if (!compute(most == record ? nullptr : &beyond)) came.lost.push_back(now[0].key);
    }
    if (came.lost.empty()) moe_merge(parts, ids, weights, n, k, width, out);
    return came;
}
