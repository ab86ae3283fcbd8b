#include "ops.h"

#include <algorithm>
#include <numeric>

namespace {

enum Slot { PANEL, HIDDEN, HIDDEN_PANEL, TABLES };
constexpr int64_t BLOCK = 32;           // rows of a panel block

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
size_t aligned(size_t n) { return (n + 63) / 64 * 64; }

} // namespace

const Kernels& kernels(Isa isa) {
    const Kernels& base_kernels();
#if defined(__x86_64__)
    const Kernels &avx2_kernels(), &avx512_kernels(), &vnni_kernels(), &amx_kernels();
    if (isa == Isa::AMX) return amx_kernels();
    if (isa == Isa::VNNI) return vnni_kernels();
    if (isa == Isa::AVX512) return avx512_kernels();
    if (isa == Isa::AVX2) return avx2_kernels();
#elif defined(__aarch64__)
    const Kernels& i8mm_kernels();
    if (isa == Isa::I8MM) return i8mm_kernels();
#endif
    (void)isa;
    return base_kernels();
}

void Ops::dequantize(const Matrix& m, float* out) {
    auto held = pool_.hold();
    rows("unpack", m.rows, m.cols, [&](int64_t r) { kernels_.dequant(m.format, m.data + r * m.stride, 0, m.cols, out + r * m.cols); });
}

void Ops::embed(const Matrix& m, const int32_t* ids, int64_t n, float* out) {
    auto held = pool_.hold();
    rows("embed", n, m.cols, [&](int64_t r) { kernels_.dequant(m.format, m.data + ids[r] * m.stride, 0, m.cols, out + r * m.cols); });
}

void Ops::linear(const float* x, int64_t n, const Matrix& w, const float* bias, float* out, int64_t ld) { side_by_side(x, n, &w, &bias, 1, out, ld ? ld : w.rows); }

void Ops::side_by_side(const float* x, int64_t n, const Matrix* parts, const float* const* biases, int64_t count, float* out, int64_t ld) {
    auto held = pool_.hold();
    const int64_t cols = parts->cols, blocks = ceil_div(n, BLOCK), token_tasks = ceil_div(n, TOKENS);
    const size_t one = aligned(kernels_.panel_bytes(n, cols));
    std::vector<Format> formats; // x lies otherwise for each
    std::vector<int64_t> ends;   // the tasks of a part and of those before it
    int64_t tasks = 0, bytes = 0;
    size_t scratch = 0;
    for (int64_t i = 0; i < count; i++) {
        const Matrix& w = parts[i];
        if (std::find(formats.begin(), formats.end(), w.format) == formats.end()) formats.push_back(w.format);
        ends.push_back(tasks += token_tasks * ceil_div(w.rows, WEIGHT_ROWS));
        bytes += w.rows * w.stride;
        scratch = std::max(scratch, kernels_.linear_scratch(w.format, cols));
    }
    uint8_t* panels = (uint8_t*)pool_.shared(PANEL, formats.size() * one);
    for (int t = 0; t < pool_.threads(); t++) pool_.local(t, 0, scratch);
    pool_.run({"pack"}, (int64_t)formats.size() * blocks, [&](int64_t i, int) {
        kernels_.pack(panels + i / blocks * one, formats[i / blocks], n, cols, i % blocks, x, nullptr);
    });
    std::vector<LinearJob> jobs;
    for (int64_t i = 0, column = 0; i < count; column += parts[i++].rows) {
        const int64_t panel = std::find(formats.begin(), formats.end(), parts[i].format) - formats.begin();
        jobs.push_back({parts[i], panels + panel * one, n, biases[i], out + column, ld});
    }
    pool_.run({"product", bytes}, tasks, [&](int64_t task, int thread) {
        const int64_t i = std::upper_bound(ends.begin(), ends.end(), task) - ends.begin();
        if (i) task -= ends[i - 1];
        const Matrix& w = parts[i];
        const int64_t row_tasks = ceil_div(w.rows, WEIGHT_ROWS), r = task % row_tasks * WEIGHT_ROWS, t = task / row_tasks * TOKENS;
        const int some = (int)std::min<int64_t>(WEIGHT_ROWS, w.rows - r);
        const uint8_t* next = r + some < w.rows ? w.data + (r + some) * w.stride : i + 1 < count ? parts[i + 1].data : nullptr;
        kernels_.linear(jobs[i], t, std::min<int64_t>(TOKENS, n - t), r, some, next, pool_.local(thread, 0, scratch));
    });
}

namespace {

// Rows of x grouped by expert, ascending; within an expert in row order.
struct Groups {
    std::vector<int32_t> expert, token;
    std::vector<int64_t> offset;
    std::vector<float> weight;

    Groups(const int32_t* ids, const float* weights, int64_t n, int k, int64_t experts) : token(n * k), weight(n * k) {
        std::vector<int64_t> start(experts + 1, 0);
        for (int64_t i = 0; i < n * k; i++) start[ids[i] + 1]++;
        for (int64_t e = 0; e < experts; e++) {
            if (start[e + 1]) expert.push_back((int32_t)e), offset.push_back(start[e]);
            start[e + 1] += start[e];
        }
        offset.push_back(n * k);
        for (int64_t i = 0; i < n * k; i++) {
            const int64_t at = start[ids[i]]++;
            token[at] = (int32_t)(i / k), weight[at] = weights[i];
        }
    }
    int64_t count() const { return (int64_t)expert.size(); }
    int64_t size(int64_t g) const { return offset[g + 1] - offset[g]; }
};

} // namespace

void Ops::moe(const float* x, int64_t n, const int32_t* ids, const float* weights, int k, int64_t experts, const int32_t* place,
              const Experts& ups, const Experts& downs, int act, float* out) {
    moe_as_far(x, n, ids, weights, k, experts, place, ups, downs, act, nullptr, out);
}

bool Ops::moe_as_far(const float* x, int64_t n, const int32_t* ids, const float* weights, int k, int64_t experts, const int32_t* place,
                     const Experts& ups, const Experts& downs, int act, const Beyond* beyond, float* out) {
    auto held = pool_.hold();
    const Matrix &up = ups.one, &down = downs.one;
    Groups groups(ids, weights, n, k, experts);
    for (auto& e : groups.expert) e = place ? place[e] : e; // the order of the sums is settled: from here only where they lie counts
    const int64_t count = groups.count(), inter = down.cols;
    std::vector<int64_t> up_at(count), down_at(count), block_group, block_number;
    const bool alone = n == 1 && count == k; // one row: its panel serves every expert
    size_t up_bytes = 0, down_bytes = 0;
    for (int64_t g = 0; g < count; g++) {
        up_at[g] = (int64_t)up_bytes, down_at[g] = (int64_t)down_bytes;
        if (!alone || g + 1 == count) up_bytes += aligned(kernels_.panel_bytes(groups.size(g), up.cols));
        down_bytes += aligned(kernels_.panel_bytes(groups.size(g), inter));
        for (int64_t b = 0; b * BLOCK < groups.size(g); b++) block_group.push_back(g), block_number.push_back(b);
    }
    uint8_t* panel = (uint8_t*)pool_.shared(PANEL, up_bytes);
    float* hidden = (float*)pool_.shared(HIDDEN, (groups.token.size() * inter + 16) * sizeof(float));
    uint8_t* hidden_panel = (uint8_t*)pool_.shared(HIDDEN_PANEL, down_bytes);
    const MoeJob job{ups,  downs, act,          count,  groups.expert.data(), groups.offset.data(), groups.token.data(), groups.weight.data(),
                     panel, up_at.data(), hidden, hidden_panel,         down_at.data(),       out};
    const size_t scratch = kernels_.moe_scratch(job);
    for (int t = 0; t < pool_.threads(); t++) pool_.local(t, 0, scratch);

    const int64_t blocks = (int64_t)block_group.size();
    uint8_t* packed = nullptr; // all rows, where packing them for every expert anew would cost more than copying
    if (!alone && k > 1 && kernels_.packs_once(up.format)) {
        packed = (uint8_t*)pool_.shared(TABLES, kernels_.panel_bytes(n, up.cols));
        pool_.run({"pack"}, ceil_div(n, BLOCK), [&](int64_t b, int) { kernels_.pack(packed, up.format, n, up.cols, b, x, nullptr); });
    }
    pool_.run({"pack"}, alone ? 1 : blocks, [&](int64_t i, int) {
        const int64_t g = block_group[i];
        const int32_t* rows = groups.token.data() + groups.offset[g];
        if (packed)
            kernels_.gather(panel + up_at[g], groups.size(g), up.cols, block_number[i], packed, n, rows);
        else
            kernels_.pack(panel + up_at[g], up.format, groups.size(g), up.cols, block_number[i], x, rows);
    });
    const int64_t up_tasks = ceil_div(inter, WEIGHT_ROWS), down_tasks = ceil_div(down.rows, WEIGHT_ROWS);
    // Of an expert that is still read: each time the tasks whose rows are there. gate, up and down lie one behind the other.
    const auto as_far = [&](Pool::Part part, int64_t tasks, int64_t rows, int64_t before, int64_t stride, const auto& compute) {
        for (int64_t done = 0, ready = tasks; done < tasks; done = ready) {
            if (beyond) {
                const int64_t here = (*beyond)(before + std::min(rows, (done + 1) * WEIGHT_ROWS) * stride - 1);
                if (here < 0) return false;
                const int64_t whole = (here - before) / stride;
                ready = whole >= rows ? tasks : whole / WEIGHT_ROWS;
            }
            pool_.run(part, ready - done, [&](int64_t task, int thread) { compute(done + task, pool_.local(thread, 0, scratch)); });
        }
        return true;
    };
    const bool up_came = as_far({"gate and up", count * up.rows * up.stride}, beyond ? up_tasks : count * up_tasks, inter, inter * up.stride, up.stride, [&](int64_t task, void* own) {
        const int64_t r = task % up_tasks * WEIGHT_ROWS;
        const int64_t g = task / up_tasks, count = std::min<int64_t>(WEIGHT_ROWS, inter - r);
        const uint8_t* next = nullptr;
        if (r + count < inter || g + 1 < groups.count())
            next = up.data + (r + count < inter ? groups.expert[g] * ups.stride + (r + count) * up.stride : groups.expert[g + 1] * ups.stride);
        kernels_.moe_up(job, g, r, (int)count, next, own);
    });
    if (!up_came) return false;
    pool_.run({"pack hidden"}, blocks, [&](int64_t i, int) {
        const int64_t g = block_group[i];
        kernels_.pack(hidden_panel + down_at[g], down.format, groups.size(g), inter, block_number[i], hidden + groups.offset[g] * inter, nullptr);
    });
    return as_far({"down", count * down.rows * down.stride}, down_tasks, down.rows, 2 * inter * up.stride, down.stride, [&](int64_t task, void* own) {
        const int64_t r = task * WEIGHT_ROWS;
        const int64_t count = std::min<int64_t>(WEIGHT_ROWS, down.rows - r);
        const uint8_t* next = r + count < down.rows ? down.data + groups.expert[0] * downs.stride + (r + count) * down.stride : nullptr;
        kernels_.moe_down(job, r, (int)count, n, next, own);
    });
}

void Ops::moe_merge(const float* parts, const int32_t* ids, const float* weights, int64_t n, int k, int64_t width, float* out) {
    auto held = pool_.hold();
    rows("merge", n, k * width, [&](int64_t r) {
        kernels_.moe_merge(parts + r * k * width, ids + r * k, weights + r * k, k, out + r * width, width);
    });
}

void Ops::attention(AttentionJob job, const float* k, const float* v, const Sequences& s) {
    auto held = pool_.hold();
    const int dim = job.dim;
    job.values = job.values ? job.values : dim;
    job.split = 1;
    while (job.heads % (job.kv_heads * job.split) || job.heads / job.kv_heads / job.split > QUERIES) job.split++;
    job.group = job.heads / job.kv_heads / job.split;
    const int group = job.group, groups = job.kv_heads * job.split, tile = std::max(1, QUERIES / group);
    std::vector<AttentionTask> tiles;
    std::vector<int> sequence; // of every row
    for (int i = 0; i < s.n; i++) {
        const int64_t len = s.cu[i + 1] - s.cu[i];
        for (int64_t t = 0; t < len; t++) sequence.push_back(i);
        for (int64_t t = 0; t < len; t += tile)
            for (int h = 0; h < groups; h++) {
                AttentionTask a{s.pages + (int64_t)i * s.width, s.cu[i] + t, s.start[i] + t, (int)std::min<int64_t>(tile, len - t), h};
                constexpr int64_t SPAN = PAGE * SPAN_PAGES;
                a.span0 = job.window ? (int)(std::max<int64_t>(0, a.position + 1 - job.window) / SPAN) : 0;
                a.span1 = (int)((a.position + a.nt - 1) / SPAN) + 1;
                tiles.push_back(a);
            }
    }
    rows("keep", (int64_t)sequence.size(), 2 * (int64_t)job.kv_heads * dim, [&](int64_t r) {
        const int i = sequence[r];
        const int64_t position = s.start[i] + r - s.cu[i], page = s.pages[(int64_t)i * s.width + position / PAGE];
        for (int h = 0; h < job.kv_heads; h++) {
            const int64_t to = ((page * job.kv_heads + h) * PAGE + position % PAGE) * dim, from = (r * job.kv_heads + h) * dim;
            kernels_.write_kv(k + from, job.k + to, dim);
            if (v) kernels_.write_kv(v + from, job.v + to, dim);
        }
    });

    const size_t scratch = kernels_.attention_scratch(job);
    for (int t = 0; t < pool_.threads(); t++) pool_.local(t, 0, scratch);
    // Few tiles over a long context (decode): one task a span. Many tiles: one task a tile, longest first.
    std::vector<AttentionTask> tasks;
    const int64_t stride = (int64_t)tile * group * (job.values + 2);
    std::vector<int64_t> first;
    int64_t spans = 0;
    for (auto& t : tiles) first.push_back(spans), spans += t.span1 - t.span0;
    const bool split = (int64_t)tiles.size() < 4 * pool_.threads() && spans > (int64_t)tiles.size() && pool_.threads() > 1;
    if (!split) {
        tasks = tiles;
        std::stable_sort(tasks.begin(), tasks.end(), [](auto& a, auto& b) { return a.span1 - a.span0 > b.span1 - b.span0; });
    } else {
        float* partials = (float*)pool_.shared(PANEL, spans * stride * sizeof(float));
        for (auto& t : tiles)
            for (int p = t.span0; p < t.span1; p++) {
                AttentionTask one = t;
                one.span0 = p, one.span1 = p + 1, one.partial = partials + (int64_t)tasks.size() * stride;
                tasks.push_back(one);
            }
    }
    int64_t seen = 0; // tokens that tasks read, each for its KV head
    for (const AttentionTask& t : tasks)
        seen += std::min<int64_t>(t.position + t.nt, (int64_t)t.span1 * PAGE * SPAN_PAGES) - (int64_t)t.span0 * PAGE * SPAN_PAGES;
    const int64_t page_bytes = seen * dim * (v ? 2 : 1) * (int64_t)sizeof(uint16_t);
    pool_.run({"attention", page_bytes}, (int64_t)tasks.size(), [&](int64_t i, int thread) { kernels_.attention(job, tasks[i], pool_.local(thread, 0, scratch)); });
    if (split)
        pool_.run({"fold"}, (int64_t)tiles.size(), [&](int64_t i, int) {
            const AttentionTask& t = tiles[i];
            kernels_.attention_merge(job, t, tasks[first[i]].partial, stride, t.span1 - t.span0);
        });
}

void Ops::heads_linear(const float* x, int64_t n, int heads, const Matrix& w, float* out, int64_t apart) {
    auto held = pool_.hold();
    apart = apart ? apart : w.rows;
    const size_t panel = aligned(kernels_.panel_bytes(n, w.cols)), scratch = kernels_.linear_scratch(w.format, w.cols);
    uint8_t* panels = (uint8_t*)pool_.shared(PANEL, heads * panel);
    for (int t = 0; t < pool_.threads(); t++) pool_.local(t, 0, scratch);
    std::vector<int32_t> row(n * heads); // of head h: its row of every token
    for (int64_t i = 0; i < n * heads; i++) row[i] = (int32_t)(i % n * heads + i / n);
    const int64_t blocks = ceil_div(n, BLOCK), row_tasks = ceil_div(w.rows, WEIGHT_ROWS), each = ceil_div(n, TOKENS) * row_tasks;
    pool_.run({"pack"}, heads * blocks, [&](int64_t i, int) {
        kernels_.pack(panels + i / blocks * panel, w.format, n, w.cols, i % blocks, x, row.data() + i / blocks * n);
    });
    pool_.run({"product", heads * w.rows * w.stride}, heads * each, [&](int64_t task, int thread) {
        const int64_t h = task / each, r = task % row_tasks * WEIGHT_ROWS, t = task % each / row_tasks * TOKENS;
        const int count = (int)std::min<int64_t>(WEIGHT_ROWS, w.rows - r);
        const Matrix m{w.format, w.data + h * w.rows * w.stride, w.rows, w.cols, w.stride};
        const LinearJob job{m, panels + h * panel, n, nullptr, out + h * apart, heads * apart};
        const uint8_t* next = r + count < w.rows || h + 1 < heads ? m.data + (r + count) * w.stride : nullptr;
        kernels_.linear(job, t, std::min<int64_t>(TOKENS, n - t), r, count, next, pool_.local(thread, 0, scratch));
    });
}

void Ops::delta_net(DeltaJob job, int64_t tokens) {
    auto held = pool_.hold();
    const int64_t width = 2 * (int64_t)job.key_heads * job.key_dim + (int64_t)job.value_heads * job.value_dim;
    job.mixed = (float*)pool_.shared(PANEL, (tokens * width + 16) * sizeof(float));
    job.decay = (float*)pool_.shared(HIDDEN, 2 * tokens * job.value_heads * sizeof(float));
    job.beta = job.decay + tokens * job.value_heads;
    const size_t scratch = kernels_.delta_scratch(job);
    for (int t = 0; t < pool_.threads(); t++) pool_.local(t, 0, scratch);
    // few tokens: several channel blocks a task
    const int64_t blocks = ceil_div(width, CONV_COLS), step = std::max<int64_t>(1, TASK_ELEMENTS / 4 / (tokens * CONV_COLS));
    pool_.run({"convolution"}, ceil_div(blocks, step), [&](int64_t task, int) {
        for (int64_t b = task * step; b < std::min(blocks, (task + 1) * step); b++)
            kernels_.delta_conv(job, b * CONV_COLS, (int)std::min<int64_t>(CONV_COLS, width - b * CONV_COLS));
    });
    rows("gates", tokens, width, [&](int64_t t) { kernels_.delta_gates(job, t); });
    const int64_t pieces = ceil_div(job.value_dim, DELTA_COLS), heads = job.value_heads;
    pool_.run({"states", 2 * job.sequences * heads * job.key_dim * job.value_dim * (int64_t)sizeof(float)}, job.sequences * heads * pieces, [&](int64_t i, int thread) {
        const int c0 = (int)(i % pieces) * DELTA_COLS;
        kernels_.delta_rule(job, (int)(i / pieces / heads), (int)(i / pieces % heads), c0, std::min(DELTA_COLS, job.value_dim - c0),
                            pool_.local(thread, 0, scratch));
    });
}

void Ops::rms_norm(const float* x, const float* w, float eps, bool plus_one, float* out, int64_t n, int64_t dim) {
    auto held = pool_.hold();
    rows("norm", n, dim, [&](int64_t r) { kernels_.rms_norm(x + r * dim, w, eps, plus_one, out + r * dim, dim); });
}

void Ops::gated_norm(const float* x, const float* z, const float* w, float eps, float* out, int64_t n, int64_t dim) {
    auto held = pool_.hold();
    rows("norm", n, dim, [&](int64_t r) { kernels_.gated_norm(x + r * dim, z + r * dim, w, eps, out + r * dim, dim); });
}

void Ops::rope(const float* x, const float* cos, const float* sin, bool interleaved, float* out, int64_t n, int heads, int dim, int rot) {
    auto held = pool_.hold();
    const int64_t width = (int64_t)heads * dim, half = rot / 2;
    rows("turn", n, width, [&](int64_t r) {
        kernels_.rope(x + r * width, cos + r * half, sin + r * half, interleaved, out + r * width, heads, dim, rot);
    });
}

void Ops::add_norm(float* x, const float* added, const float* w, float eps, float* out, int64_t n, int64_t dim) {
    auto held = pool_.hold();
    rows("norm", n, dim, [&](int64_t r) {
        for (int64_t i = r * dim; i < (r + 1) * dim; i++) x[i] += added[i];
        kernels_.rms_norm(x + r * dim, w, eps, false, out + r * dim, dim);
    });
}

void Ops::turn_heads(float* x, int64_t n, int64_t width, int q_heads, int k_heads, int dim, const float* q_w, const float* k_w, float eps,
                     const float* cos, const float* sin, bool interleaved, int rot) {
    auto held = pool_.hold();
    const int heads = q_heads + k_heads, half = rot / 2;
    rows("turn", n, width, [&](int64_t r) {
        float* row = x + r * width;
        for (int h = 0; q_w && h < heads; h++) kernels_.rms_norm(row + h * dim, h < q_heads ? q_w : k_w, eps, false, row + h * dim, dim);
        if (cos) kernels_.rope(row, cos + r * half, sin + r * half, interleaved, row, heads, dim, rot);
    });
}

void Ops::gate_mul(const float* gate, const float* up, int act, float* out, int64_t n) {
    auto held = pool_.hold();
    rows("gate", ceil_div(n, 1024), 1024, [&](int64_t r) {
        kernels_.gate_mul(gate + r * 1024, up + r * 1024, act, out + r * 1024, std::min<int64_t>(1024, n - r * 1024));
    });
}

void Ops::route(const float* logits, int64_t n, const RouteRule& rule, int32_t* ids, float* weights) {
    auto held = pool_.hold();
    const int64_t experts = rule.experts, k = rule.k;
    float* scratch = (float*)pool_.shared(TABLES, (2 * n * experts + 16) * sizeof(float));
    rows("route", n, experts * k, [&](int64_t r) { kernels_.route(logits + r * experts, rule, ids + r * k, weights + r * k, scratch + 2 * r * experts); });
}

float Ops::read(const uint8_t* data, int64_t bytes) {
    auto held = pool_.hold();
    constexpr int64_t STEP = 1 << 18;
    std::vector<float> parts(ceil_div(bytes, STEP));
    pool_.run({"read", bytes}, (int64_t)parts.size(), [&](int64_t i, int) { parts[i] = kernels_.read(data + i * STEP, std::min(STEP, bytes - i * STEP)); });
    return std::accumulate(parts.begin(), parts.end(), 0.0f);
}
