// What one ISA provides: a table of functions over plain pointers. `ops.cpp` cuts operations into tasks and calls these.
//
// Every function computes rows whose result depends on that row and its sequence's cache only. Shapes are row-major.
#pragma once
#include "../cpu.h"
#include "../formats.h"

constexpr int PAGE = 64;        // tokens of a KV page
constexpr int SPAN_PAGES = 8;   // pages of a span: the unit in which a long context is split over threads
constexpr int QUERIES = 64;     // query rows (tokens x heads of one KV head) of one attention task, at most
constexpr int DELTA_COLS = 64;  // columns of the recurrent state one task owns: lines of memory that follow each other
constexpr int CONV_COLS = 64;   // channels of one convolution task
constexpr int WEIGHT_ROWS = 64; // weight rows of one task of a matrix product
constexpr int MAX_GROUPS = 64;  // of experts
constexpr int TOKENS = 128;     // rows of x of one task: they stay in L2 (1 MB at 2048 columns)

struct LinearJob {
    Matrix w;
    const void* panel; // packed x
    int64_t n;         // rows of x
    const float* bias; // [rows] or null
    float* out;        // [n, ld]
    int64_t ld;
};

// Rows of x sorted by expert. Group g: panel rows offset[g]..offset[g+1].
struct MoeJob {
    Experts up, down;
    int act;
    int64_t groups;
    const int32_t* expert;  // [groups]
    const int64_t* offset;  // [groups + 1]
    const int32_t* token;   // [slots] row of x
    const float* weight;    // [slots]
    const uint8_t* panel;   // packed x; group g starts at panel_at[g]
    const int64_t* panel_at;
    float* hidden; // [slots, I]
    const uint8_t* hidden_panel; // packed hidden; group g starts at hidden_at[g]
    const int64_t* hidden_at;
    float* out; // [T, H]
};

struct AttentionJob {
    const float* q; // [T, Hq, D]
    uint16_t *k, *v; // bf16 pages [pages, Hkv, PAGE, D]; the same ones where a key's first elements are its value (latent attention)
    float* out;      // [T, Hq, values]
    int heads, kv_heads, dim;
    float scale;
    int window;    // 0 = full
    int values = 0; // elements of a value, the first of its row; 0 = dim
    // Set by Ops::attention: the query heads of one task. A KV head has `split` such groups.
    int group = 0, split = 1;
};

// Queries [t0, t0 + nt) of one sequence against spans [span0, span1) of its cache, for one group of query heads.
struct AttentionTask {
    const int32_t* pages; // the sequence's page table
    int64_t row;          // row of token t0 in q and out
    int64_t position;     // absolute position of token t0
    int nt, heads; // tokens; which group of query heads
    int span0 = 0, span1 = 0;
    float* partial = nullptr; // null: finish into out. Else [nt * G][values + 2]: max, sum, weighted values of one span
};

struct DeltaJob {
    const float *qkv, *a, *b;             // [T, C], [T, Hv], [T, Hv]
    const float *conv, *dt_bias, *a_log;  // [C, K], [Hv], [Hv]
    float *conv_state, *s;                // [slots, C, K-1], [slots, Hv, Dk, Dv]
    float *mixed, *decay, *beta;          // scratch [T, C], [T, Hv], [T, Hv]
    float* out;                           // [T, Hv, Dv]
    int key_heads, value_heads, key_dim, value_dim, taps;
    const int32_t *cu, *slot;
    int sequences;
    const int32_t* kept; // null, or of every sequence [2]: the state after so many of its rows is left in this slot too, -1: in none
};

// Who is chosen: the k best of score + bias, among the best groups of consecutive experts. Weighed by score.
struct RouteRule {
    int experts, k;
    bool sigmoid, renorm; // score: sigmoid or softmax; weights divided by their sum
    float scale;          // of the weights
    int groups, top_groups, group_best; // a group ranks by the sum of its two best, or by its best
    const float* bias; // [experts] or null
};

struct Kernels {
    void (*dequant)(Format, const uint8_t* row, int64_t first, int64_t n, float* out);
    float (*read)(const uint8_t* data, int64_t bytes); // reads every byte: the memory rate kernels are measured against

    size_t (*panel_bytes)(int64_t rows, int64_t cols);
    void (*pack)(void* panel, Format, int64_t rows, int64_t cols, int64_t block, const float* x, const int32_t* index);
    // Where packing a row costs much: rows index[i] of a panel of `total` packed rows become rows of another.
    bool (*packs_once)(Format);
    void (*gather)(void* panel, int64_t rows, int64_t cols, int64_t block, const void* packed, int64_t total, const int32_t* index);
    size_t (*linear_scratch)(Format, int64_t cols);
    // `next`: the weight rows this thread reads after these (prefetched meanwhile), or null
    void (*linear)(const LinearJob&, int64_t at, int64_t tokens, int64_t row0, int rows, const uint8_t* next, void* scratch);
    size_t (*moe_scratch)(const MoeJob&);
    void (*moe_up)(const MoeJob&, int64_t group, int64_t row0, int rows, const uint8_t* next, void* scratch);
    void (*moe_down)(const MoeJob&, int64_t row0, int rows, int64_t tokens, const uint8_t* next, void* scratch);
    // out = sum over j of weights[j] * parts[j], in the order of `ids`, ascending, as moe_down sums; parts [k, n]
    void (*moe_merge)(const float* parts, const int32_t* ids, const float* weights, int k, float* out, int64_t n);

    void (*write_kv)(const float* from, uint16_t* to, int64_t n); // float32 -> bf16, round to nearest even
    size_t (*attention_scratch)(const AttentionJob&);
    void (*attention)(const AttentionJob&, const AttentionTask&, void* scratch);
    void (*attention_merge)(const AttentionJob&, const AttentionTask&, const float* partials, int64_t stride, int spans);

    void (*delta_conv)(const DeltaJob&, int64_t channel0, int channels);
    void (*delta_gates)(const DeltaJob&, int64_t token);
    size_t (*delta_scratch)(const DeltaJob&);
    void (*delta_rule)(const DeltaJob&, int sequence, int head, int column0, int columns, void* scratch);

    void (*rms_norm)(const float* x, const float* w, float eps, bool plus_one, float* out, int64_t n);
    void (*gated_norm)(const float* x, const float* z, const float* w, float eps, float* out, int64_t n);
    void (*rope)(const float* x, const float* cos, const float* sin, bool interleaved, float* out, int heads, int dim, int rot);
    void (*gate_mul)(const float* gate, const float* up, int act, float* out, int64_t n);
    void (*route)(const float* logits, const RouteRule&, int32_t* ids, float* weights, float* scratch); // scratch [2 * experts]
};

const Kernels& kernels(Isa isa);
