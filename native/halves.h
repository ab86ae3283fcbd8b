// Half layers: the operations between two sums of the residual stream, bound to their weights once.
//
// A half adds `added` (what the half before it left, or null) to x, norms it, computes, and adds its result to x, so that nothing
// but x crosses Python's door. Bit for bit the operations of ops.h one after the other, in the order of `engine/nn/decoder.py`.
#pragma once
#include "formats.h"

#include <vector>

struct Norm {
    const float* weight; // [width]
    int64_t width;
    float eps;
};

// Matrices over the same rows: their products lie side by side in rows of `width`.
struct Fan {
    std::vector<Matrix> parts;
    std::vector<const float*> biases; // one a part, or null
    int64_t width = 0;
};

struct Stream {
    float* x; // [n, hidden]
    const float* added;
    int64_t n;
};

struct AttentionHalf {
    Norm norm;
    Fan in; // q (with `gate` each head is followed by one of the gate), k, v
    const float *q_norm, *k_norm; // [dim] or null
    Matrix out;
    const float* out_bias;
    int heads, kv_heads, dim;
    float scale;
    int window; // 0 = full
    bool gate, interleaved;
};

struct Rotation {
    const float *cos, *sin; // [n, rot / 2] or null
    int rot;
};

struct LatentHalf {
    Norm norm;
    Fan in; // q or the latent that queries come from; the latent of keys and values, and behind it the key all heads share
    const float* q_norm; // [q.cols] or null: q comes out of `in`
    Matrix q;            // [heads * (plain + turned), q.cols]
    const float* kv_norm; // [rank]
    float eps;            // of the latents' norms
    Matrix keys, values;  // of head 0, the others follow: [rank, plain], [value, rank]
    Matrix out;
    int heads, rank, plain, turned; // of a head of q: elements that are not rotated, elements that are
    float scale;
    bool interleaved;
};

struct DeltaHalf {
    Norm norm;
    Fan in; // qkv, z, b, a
    const float *conv, *dt_bias, *a_log, *out_norm;
    Matrix out;
    int key_heads, value_heads, key_dim, value_dim, taps;
    bool tiled; // the columns of `out` expect value heads ordered (repeat, key head)
};

struct MlpHalf {
    Norm norm;
    Fan in; // gate, up
    Matrix down;
    int act;
};

struct MoeHalf {
    Norm norm;
    Fan in; // router, switch, gate and up of the shared expert
    int experts, k;
    bool sigmoid, renorm;
    float scale;
    int groups, top_groups, group_best;
    const float* bias; // [experts] or null
    int64_t shared;    // width of the shared expert, 0 = none
    bool shared_switch;
    Matrix shared_down;
    Experts up, down; // where they lie; unused when they are computed elsewhere
    const uint8_t* sound; // [experts]: 0 for one that nothing may be computed with yet; null: all may
    int act;
};
