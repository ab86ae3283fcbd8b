// A whole step in one call: token ids to logits, half layer after half layer, so that no thread waits for Python in between.
#pragma once
#include "ops.h"

#include <functional>

// One step's rows as the halves get them; `seq` and `kept` are those of `Segments` in `engine/kernels/ops.py`.
struct Pass {
    Stream s;
    Rotation rope;
    Sequences seq;
    const int32_t* kept;
};
using Link = std::function<void(const Pass&)>;

// cos and sin of every position so far, [rows, half]; a half without rotation has none.
struct RopeTable {
    const float *cos = nullptr, *sin = nullptr;
    int64_t rows = 0, half = 0;
};

// The flattened rows of a step; `wanted` names those whose logits are asked for, ascending.
struct Rows {
    std::vector<int32_t> tokens, positions, cu{0}, start, pages, slot, kept, wanted;
    int64_t width = 0; // of the page table
};

class Chain {
public:
    Chain(Ops& ops, const Matrix& table, float scale, const Norm& last, const Matrix& head)
        : ops_(ops), table_(table), scale_(scale), last_(last), head_(head) {}

    void add(Link link, int rope) { links_.push_back({std::move(link), rope}); }
    std::vector<RopeTable>& ropes() { return ropes_; }
    int64_t vocab() const { return head_.rows; }
    int64_t tokens() const { return table_.rows; }
    // of each half of the last step, and last of all norm and head, in microseconds
    const std::vector<float>& times() const { return times_; }
    // out [wanted, vocab]. The halves' results are added to x as ever: bit for bit the calls one by one.
    void run(const Rows& rows, float* out);

private:
    struct Held {
        Link link;
        int rope;
    };
    float* room(int slot, int64_t count) { return (float*)scratch_[slot].need(count * sizeof(float)); }
    void turn(const Rows& rows, std::vector<Rotation>& out);

    Ops& ops_;
    const Matrix table_;
    const float scale_;
    const Norm last_;
    const Matrix head_;
    std::vector<Held> links_;
    std::vector<RopeTable> ropes_;
    std::vector<float> times_;
    std::vector<Pool::Buffer> angles_; // of each table, the rows of a step
    std::mutex mutex_;
    enum { X, PICKED, NORMED, SCRATCH };
    Pool::Buffer scratch_[SCRATCH];
};
