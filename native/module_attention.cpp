// Python's door to attention over KV pages.
#include "tensors.h"

namespace {

void attention(Ops& ops, H out_, H q_, H k_, H v_, H kp_, H vp_, H cu_, H start_, H pages_, float scale, int window) {
    const Tensor q = tensor(q_, "q", F32, {-1, -1, -1});
    const int64_t rows = q.shape[0], dim = q.shape[2];
    const Tensor k = tensor(k_, "k", F32, {rows, -1, dim}), v = tensor(v_, "v", F32, {rows, k.shape[1], dim});
    const int64_t heads = q.shape[1], kv_heads = k.shape[1];
    if (kv_heads < 1 || heads % kv_heads) fail("q: query heads are no multiple of KV heads");
    if (dim < 1 || dim > 1024) fail("q: head size must be in 1..1024");
    if (window < 0) fail("window: must not be negative");
    const Tensor kp = tensor(kp_, "k pages", BF16, {-1, kv_heads, PAGE, dim}), vp = tensor(vp_, "v pages", BF16, {kp.shape[0], kv_heads, PAGE, dim});
    const Tensor out = tensor(out_, "out", F32, {rows, heads, dim}), cu = tensor(cu_, "cu", I32, {-1});
    check_segments(cu, rows);
    const int64_t n = cu.shape[0] - 1;
    const Tensor start = tensor(start_, "start", I32, {n}), pages = tensor(pages_, "pages", I32, {n, -1});
    check_pages(cu, start, pages, kp.shape[0], window);
    if (!out.size()) return;
    AttentionJob job{q.f(), (uint16_t*)kp.data, (uint16_t*)vp.data, out.f(), (int)heads, (int)kv_heads, (int)dim, scale, window};
    release r;
    ops.attention(job, k.f(), v.f(), Sequences{cu.i(), start.i(), pages.i(), nullptr, (int)n, (int)pages.shape[1]});
}

// The absorbed form of latent attention: one row a token is the key of all heads, its first elements their value.
void latent_attention(Ops& ops, H out_, H q_, H latent_, H held_, H cu_, H start_, H pages_, float scale) {
    const Tensor q = tensor(q_, "q", F32, {-1, -1, -1}), out = tensor(out_, "out", F32, {q.shape[0], q.shape[1], -1});
    const int64_t rows = q.shape[0], heads = q.shape[1], dim = q.shape[2], rank = out.shape[2];
    if (dim < 1 || dim > 1024) fail("q: a row must have 1..1024 elements");
    if (rank < 1 || rank > dim) fail("out: a value is part of a row of " + std::to_string(dim));
    const Tensor latent = tensor(latent_, "latent", F32, {rows, dim}), held = tensor(held_, "pages", BF16, {-1, 1, PAGE, dim});
    const Tensor cu = tensor(cu_, "cu", I32, {-1});
    check_segments(cu, rows);
    const int64_t n = cu.shape[0] - 1;
    const Tensor start = tensor(start_, "start", I32, {n}), pages = tensor(pages_, "pages", I32, {n, -1});
    check_pages(cu, start, pages, held.shape[0], 0);
    if (!out.size()) return;
    uint16_t* at = (uint16_t*)held.data;
    const AttentionJob job{q.f(), at, at, out.f(), (int)heads, 1, (int)dim, scale, 0, (int)rank};
    release r;
    ops.attention(job, latent.f(), nullptr, Sequences{cu.i(), start.i(), pages.i(), nullptr, (int)n, (int)pages.shape[1]});
}

void heads_linear(Ops& ops, H out_, H x_, H w_, const std::string& type) {
    const Tensor x = tensor(x_, "x", F32, {-1, -1, -1});
    int64_t heads;
    const Matrix w = matrix(w_, "weight", type, 3, x.shape[2], &heads);
    if (heads != x.shape[1]) fail("weight: has " + std::to_string(heads) + " heads, x has " + std::to_string(x.shape[1]));
    const Tensor out = tensor(out_, "out", F32, {x.shape[0], heads, w.rows});
    if (!out.size()) return;
    release r;
    ops.heads_linear(x.f(), x.shape[0], (int)heads, w, out.f());
}

} // namespace

void bind_attention(nb::class_<Ops>& ops) {
    ops.def("attention", &attention)
        .def("latent_attention", &latent_attention)
        .def("heads_linear", &heads_linear);
}
