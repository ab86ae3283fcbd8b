#include "chain.h"

#include <chrono>
#include <cstring>

using Clock = std::chrono::steady_clock;

void Chain::turn(const Rows& rows, std::vector<Rotation>& out) {
    const int64_t n = (int64_t)rows.positions.size();
    if (angles_.size() < ropes_.size()) angles_ = std::vector<Pool::Buffer>(ropes_.size());
    for (size_t i = 0; i < ropes_.size(); i++) {
        const RopeTable& t = ropes_[i];
        float* cos = (float*)angles_[i].need(2 * n * t.half * sizeof(float));
        float* sin = cos + n * t.half;
        for (int64_t r = 0; r < n; r++) {
            memcpy(cos + r * t.half, t.cos + rows.positions[r] * t.half, t.half * sizeof(float));
            memcpy(sin + r * t.half, t.sin + rows.positions[r] * t.half, t.half * sizeof(float));
        }
        out.push_back(Rotation{cos, sin, 2 * (int)t.half});
    }
}

void Chain::run(const Rows& rows, float* out) {
    std::lock_guard held(mutex_);
    int64_t n = (int64_t)rows.tokens.size();
    const int64_t width = last_.width, wanted = (int64_t)rows.wanted.size();
    float* x = room(X, n * width);
    ops_.embed(table_, rows.tokens.data(), n, x);
    if (scale_ != 1.0f)
        for (int64_t i = 0; i < n * width; i++) x[i] *= scale_;
    std::vector<Rotation> ropes;
    turn(rows, ropes);
    const Sequences seq{rows.cu.data(), rows.start.data(), rows.pages.data(), rows.slot.data(), (int)rows.start.size(), (int)rows.width};
    times_.assign(links_.size() + 1, 0);
    auto before = Clock::now();
    auto clock = [&](size_t i) {
        const auto now = Clock::now();
        times_[i] = std::chrono::duration<float, std::micro>(now - before).count();
        before = now;
    };
    for (size_t i = 0; i < links_.size(); i++) {
        if (i + 1 == links_.size()) { // no later token reads what follows: only the rows whose logits are wanted go on
            if (!wanted) return;
            if (wanted < n) {
                float* picked = room(PICKED, wanted * width);
                for (int64_t r = 0; r < wanted; r++) memcpy(picked + r * width, x + rows.wanted[r] * width, width * sizeof(float));
                x = picked, n = wanted;
            }
        }
        const Rotation none{};
        links_[i].link(Pass{Stream{x, nullptr, n}, links_[i].rope < 0 ? none : ropes[links_[i].rope], seq,
                            rows.kept.empty() ? nullptr : rows.kept.data()});
        clock(i);
    }
    float* normed = room(NORMED, n * width);
    ops_.rms_norm(x, last_.weight, last_.eps, false, normed, n, width);
    ops_.linear(normed, n, head_, nullptr, out);
    clock(links_.size());
}
