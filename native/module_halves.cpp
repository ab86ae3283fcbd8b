// Python's door to half layers: their weights are checked once, when they are bound; a step brings x, its sequences and its cache.
#include "module_chain.h"

#include <memory>
#include <nanobind/stl/pair.h>

namespace {

using Typed = std::pair<nb::object, std::string>; // a weight and its block type ("": a float tensor)

// A half bound to its weights, which it keeps alive.
template <class Half> struct Bound {
    Ops& ops;
    Half half;
    std::vector<nb::object> kept;
    nb::object check{}; // of experts: makes those of a list sound, or raises

    const float* vector(nb::object h, const char* name, int64_t size) {
        if (h.is_none()) return nullptr;
        const float* data = tensor(h, name, F32, {size}).f();
        kept.push_back(std::move(h));
        return data;
    }
    const float* needed(nb::object h, const char* name, int64_t size) {
        if (h.is_none()) fail(std::string(name) + ": expected a tensor");
        return vector(std::move(h), name, size);
    }
    Matrix held(const Typed& w, const char* name, int dims, int64_t cols) {
        const Matrix m = matrix(w.first, name, w.second, dims, cols);
        kept.push_back(w.first);
        return m;
    }
    Matrix heads(const Typed& w, const char* name, int64_t heads, int64_t rows, int64_t cols) { // a matrix for each head
        int64_t found;
        const Matrix m = matrix(w.first, name, w.second, 3, cols, &found);
        if (found != heads || (rows >= 0 && m.rows != rows)) fail(std::string(name) + ": has not the shape of the heads");
        kept.push_back(w.first);
        return m;
    }
    Experts experts(const Typed& w, const char* name, int64_t cols, int64_t& count) {
        const Experts all = experts_of(w.first, name, w.second, cols, count);
        kept.push_back(w.first);
        return all;
    }
    void norm(nb::object weight, float eps) {
        const int64_t width = tensor(weight, "norm", F32, {-1}).shape[0];
        half.norm = Norm{needed(std::move(weight), "norm", width), width, eps};
    }
    void fan(const std::vector<Typed>& parts, const std::vector<nb::object>& biases, int64_t width) {
        if (!biases.empty() && biases.size() != parts.size()) fail("biases: one for each part, or none");
        for (size_t i = 0; i < parts.size(); i++) {
            half.in.parts.push_back(held(parts[i], "parts", 2, half.norm.width));
            half.in.width += half.in.parts[i].rows;
            half.in.biases.push_back(biases.empty() ? nullptr : vector(biases[i], "biases", half.in.parts[i].rows));
        }
        if (half.in.width != width) fail("parts: hold " + std::to_string(half.in.width) + " rows together, not " + std::to_string(width));
    }
    Matrix back(const Typed& w, const char* name, int64_t cols) { // a matrix whose rows are those of the residual stream
        const Matrix m = held(w, name, 2, cols);
        if (m.rows != half.norm.width) fail(std::string(name) + ": expected " + std::to_string(half.norm.width) + " rows");
        return m;
    }
    Stream stream(H x_, H added_) const {
        const Tensor x = tensor(x_, "x", F32, {-1, half.norm.width});
        const float* added = added_.is_none() ? nullptr : tensor(added_, "added", F32, {x.shape[0], half.norm.width}).f();
        return Stream{x.f(), added, x.shape[0]};
    }
};

template <class Half> Bound<Half>* start(Ops& ops, nb::object norm, float eps) {
    auto* b = new Bound<Half>{ops, {}, {nb::find(ops)}};
    try {
        b->norm(std::move(norm), eps);
    } catch (...) {
        delete b;
        throw;
    }
    return b;
}

using Attention = Bound<AttentionHalf>;
using Latent = Bound<LatentHalf>;
using Delta = Bound<DeltaHalf>;
using Mlp = Bound<MlpHalf>;
using Moe = Bound<MoeHalf>;
template <class B> using Owned = std::unique_ptr<B>;

Attention* attention_half(Ops& ops, nb::object norm, float eps, const std::vector<Typed>& parts, const std::vector<nb::object>& biases,
                          nb::object q_norm, nb::object k_norm, const Typed& out, nb::object out_bias, int heads, int kv_heads, int dim,
                          float scale, int window, bool gate, bool interleaved) {
    Owned<Attention> b(start<AttentionHalf>(ops, std::move(norm), eps));
    if (kv_heads < 1 || heads < 1 || heads % kv_heads) fail("heads: no multiple of kv_heads");
    if (dim < 1 || dim > 1024) fail("dim: must be in 1..1024");
    if (window < 0) fail("window: must not be negative");
    if (q_norm.is_none() != k_norm.is_none()) fail("k_norm: q and k have norms, or neither has");
    b->fan(parts, biases, (int64_t)dim * (heads * (gate ? 2 : 1) + 2 * kv_heads));
    AttentionHalf& a = b->half;
    a.q_norm = b->vector(std::move(q_norm), "q_norm", dim), a.k_norm = b->vector(std::move(k_norm), "k_norm", dim);
    a.out = b->back(out, "out", (int64_t)heads * dim), a.out_bias = b->vector(std::move(out_bias), "out_bias", a.norm.width);
    a.heads = heads, a.kv_heads = kv_heads, a.dim = dim, a.scale = scale, a.window = window, a.gate = gate, a.interleaved = interleaved;
    return b.release();
}

void run_attention(const Attention& b, H x_, H added_, H cos_, H sin_, H kp_, H vp_, H cu_, H start_, H pages_) {
    const AttentionHalf& a = b.half;
    const Stream s = b.stream(x_, added_);
    if (cos_.is_none() != sin_.is_none()) fail("sin: goes with cos");
    Rotation rope{};
    if (!cos_.is_none()) {
        const Tensor cos = tensor(cos_, "cos", F32, {s.n, -1});
        rope = Rotation{cos.f(), tensor(sin_, "sin", F32, {s.n, cos.shape[1]}).f(), 2 * (int)cos.shape[1]};
        if (rope.rot > a.dim) fail("cos: rotates more than the head holds");
    }
    const Tensor kp = tensor(kp_, "k pages", BF16, {-1, a.kv_heads, PAGE, a.dim});
    const Tensor vp = tensor(vp_, "v pages", BF16, {kp.shape[0], a.kv_heads, PAGE, a.dim});
    const Tensor cu = tensor(cu_, "cu", I32, {-1});
    check_segments(cu, s.n);
    const int64_t n = cu.shape[0] - 1;
    const Tensor start = tensor(start_, "start", I32, {n}), pages = tensor(pages_, "pages", I32, {n, -1});
    check_pages(cu, start, pages, kp.shape[0], a.window);
    if (!s.n) return;
    release r;
    b.ops.attention_half(a, s, rope, (uint16_t*)kp.data, (uint16_t*)vp.data,
                         Sequences{cu.i(), start.i(), pages.i(), nullptr, (int)n, (int)pages.shape[1]});
}

Latent* latent_half(Ops& ops, nb::object norm, float eps, const std::vector<Typed>& parts, nb::object q_norm, const Typed& q, nb::object kv_norm,
                    float own_eps, const Typed& keys, const Typed& values, const Typed& out, int heads, int rank, int plain, int turned,
                    float scale, bool interleaved) {
    Owned<Latent> b(start<LatentHalf>(ops, std::move(norm), eps));
    if (heads < 1 || rank < 1 || plain < 1 || turned < 0) fail("heads: sizes must be positive");
    if (rank + turned > 1024) fail("rank: a row must have 1..1024 elements");
    const int64_t wide = (int64_t)heads * (plain + turned), row = rank + turned;
    const int64_t first = q_norm.is_none() ? wide : tensor(q_norm, "q_norm", F32, {-1}).shape[0];
    b->fan(parts, {}, first + row);
    LatentHalf& a = b->half;
    a.q_norm = b->vector(std::move(q_norm), "q_norm", first);
    if (a.q_norm) a.q = b->held(q, "q", 2, first);
    if (a.q_norm && a.q.rows != wide) fail("q: expected " + std::to_string(wide) + " rows");
    a.kv_norm = b->needed(std::move(kv_norm), "kv_norm", rank), a.eps = own_eps;
    a.keys = b->heads(keys, "keys", heads, rank, plain), a.values = b->heads(values, "values", heads, -1, rank);
    a.out = b->back(out, "out", heads * a.values.rows);
    a.heads = heads, a.rank = rank, a.plain = plain, a.turned = turned, a.scale = scale, a.interleaved = interleaved;
    return b.release();
}

void run_latent(const Latent& b, H x_, H added_, H cos_, H sin_, H held_, H cu_, H start_, H pages_) {
    const LatentHalf& a = b.half;
    const Stream s = b.stream(x_, added_);
    const Tensor cos = tensor(cos_, "cos", F32, {s.n, -1}), sin = tensor(sin_, "sin", F32, {s.n, cos.shape[1]});
    if (2 * cos.shape[1] > a.turned) fail("cos: rotates more than the head holds");
    const Tensor held = tensor(held_, "held", BF16, {-1, 1, PAGE, a.rank + a.turned});
    const Tensor cu = tensor(cu_, "cu", I32, {-1});
    check_segments(cu, s.n);
    const int64_t n = cu.shape[0] - 1;
    const Tensor start = tensor(start_, "start", I32, {n}), pages = tensor(pages_, "pages", I32, {n, -1});
    check_pages(cu, start, pages, held.shape[0], 0);
    if (!s.n) return;
    release r;
    b.ops.latent_half(a, s, Rotation{cos.f(), sin.f(), 2 * (int)cos.shape[1]}, (uint16_t*)held.data,
                      Sequences{cu.i(), start.i(), pages.i(), nullptr, (int)n, (int)pages.shape[1]});
}

Delta* delta_half(Ops& ops, nb::object norm, float eps, const std::vector<Typed>& parts, nb::object conv, nb::object dt_bias, nb::object a_log,
                  nb::object out_norm, const Typed& out, int key_heads, int value_heads, int key_dim, int value_dim, bool tiled) {
    Owned<Delta> b(start<DeltaHalf>(ops, std::move(norm), eps));
    if (key_heads < 1 || value_heads < 1 || value_heads % key_heads || key_dim < 1 || value_dim < 1) fail("value_heads: no multiple of key_heads");
    const int64_t values = (int64_t)value_heads * value_dim, mixed = 2 * (int64_t)key_heads * key_dim + values;
    b->fan(parts, {}, mixed + values + 2 * value_heads);
    DeltaHalf& d = b->half;
    const Tensor taps = tensor(conv, "conv", F32, {mixed, -1});
    if (taps.shape[1] < 1 || taps.shape[1] > 8) fail("conv: kernel size must be in 1..8");
    d.conv = taps.f(), b->kept.push_back(conv);
    d.dt_bias = b->needed(std::move(dt_bias), "dt_bias", value_heads), d.a_log = b->needed(std::move(a_log), "a_log", value_heads);
    d.out_norm = b->needed(std::move(out_norm), "out_norm", value_dim), d.out = b->back(out, "out", values);
    d.key_heads = key_heads, d.value_heads = value_heads, d.key_dim = key_dim, d.value_dim = value_dim, d.taps = (int)taps.shape[1], d.tiled = tiled;
    return b.release();
}

void run_delta(const Delta& b, H x_, H added_, H conv_, H state_, H cu_, H slot_, H kept_) {
    const DeltaHalf& d = b.half;
    const Stream s = b.stream(x_, added_);
    const Tensor state = tensor(state_, "s", F32, {-1, d.value_heads, d.key_dim, d.value_dim});
    const int64_t slots = state.shape[0], mixed = 2 * (int64_t)d.key_heads * d.key_dim + (int64_t)d.value_heads * d.value_dim;
    const Tensor conv = tensor(conv_, "conv state", F32, {slots, mixed, d.taps - 1}), cu = tensor(cu_, "cu", I32, {-1});
    check_segments(cu, s.n);
    const Tensor slot = tensor(slot_, "slot", I32, {cu.shape[0] - 1});
    in_range(slot, slots);
    const int32_t* kept = kept_slots(kept_, cu, slots);
    if (!s.n) return;
    release r;
    b.ops.delta_half(d, s, conv.f(), state.f(), cu.i(), slot.i(), (int)slot.shape[0], kept);
}

Mlp* mlp_half(Ops& ops, nb::object norm, float eps, const std::vector<Typed>& parts, const Typed& down, int64_t inter, const std::string& act) {
    Owned<Mlp> b(start<MlpHalf>(ops, std::move(norm), eps));
    b->fan(parts, {}, 2 * inter);
    b->half.down = b->back(down, "down", inter), b->half.act = act_of(act);
    return b.release();
}

void run_mlp(const Mlp& b, H x_, H added_) {
    const Stream s = b.stream(x_, added_);
    if (!s.n) return;
    release r;
    b.ops.mlp_half(b.half, s);
}

Moe* moe_half(Ops& ops, nb::object norm, float eps, const std::vector<Typed>& parts, int experts, int k, bool sigmoid, bool renorm, float scale,
              int groups, int top_groups, int group_best, nb::object bias, int64_t shared, bool shared_switch, const Typed& shared_down, const std::string& act) {
    Owned<Moe> b(start<MoeHalf>(ops, std::move(norm), eps));
    check_route(experts, k, groups, top_groups, group_best);
    if (shared < 0 || (shared_switch && !shared)) fail("shared: a switch needs a shared expert");
    b->fan(parts, {}, experts + shared_switch + 2 * shared);
    MoeHalf& m = b->half;
    m.experts = experts, m.k = k, m.sigmoid = sigmoid, m.renorm = renorm, m.scale = scale, m.groups = groups, m.top_groups = top_groups, m.group_best = group_best;
    m.bias = b->vector(std::move(bias), "bias", experts), m.shared = shared, m.shared_switch = shared_switch, m.act = act_of(act);
    if (shared) m.shared_down = b->back(shared_down, "shared_down", shared);
    return b.release();
}

void moe_bank(Moe& b, const Typed& up, const Typed& down, nb::object sound, nb::object check) {
    int64_t experts, same;
    const Experts u = b.experts(up, "gate_up", b.half.norm.width, experts), d = b.experts(down, "down", u.one.rows / 2, same);
    if (u.one.rows % 2 || d.one.rows != b.half.norm.width || same != experts || experts != b.half.experts) fail("gate_up and down do not belong together");
    if (sound.is_none() != check.is_none()) fail("check: goes with sound");
    if (!sound.is_none()) b.half.sound = tensor(sound, "sound", U8, {experts}).data, b.kept.push_back(sound), b.check = check;
    b.half.up = u, b.half.down = d;
}

// Nothing is computed with an expert that is not sound: it is checked, and the half begins anew with the sum already taken.
void run_sound(const Moe& b, Stream s) {
    for (std::vector<int32_t> barred; !(barred = b.ops.moe_half(b.half, s)).empty(); s.added = nullptr) {
        nb::gil_scoped_acquire python;
        b.check(barred);
    }
}

void run_moe(const Moe& b, H x_, H added_) {
    if (!b.half.up.one.data) fail("no bank: where the experts lie is not known");
    const Stream s = b.stream(x_, added_);
    if (!s.n) return;
    release r;
    run_sound(b, s);
}

void choose(const Moe& b, H x_, H added_, H out_, H ids_, H weights_, H always_) {
    const MoeHalf& m = b.half;
    const Stream s = b.stream(x_, added_);
    float* out = tensor(out_, "out", F32, {s.n, m.norm.width}).f();
    int32_t* ids = tensor(ids_, "ids", I32, {s.n, m.k}).i();
    float* weights = tensor(weights_, "weights", F32, {s.n, m.k}).f();
    float* always = m.shared ? tensor(always_, "always", F32, {s.n, m.norm.width}).f() : nullptr;
    if (!s.n) return;
    release r;
    b.ops.choose_half(m, s, out, ids, weights, always);
}

template <class B> const B* as(H half) { return nb::isinstance<B>(half) ? nb::cast<const B*>(half) : nullptr; }

} // namespace

Link link_of(H half, H first, H second, int64_t rope, Needs& needs) {
    if (const auto* b = as<Attention>(half)) {
        const AttentionHalf& a = b->half;
        if (2 * rope > a.dim) fail("cos: rotates more than the head holds");
        const Tensor kp = tensor(first, "k pages", BF16, {-1, a.kv_heads, PAGE, a.dim}), vp = tensor(second, "v pages", BF16, {kp.shape[0], a.kv_heads, PAGE, a.dim});
        needs.attention(kp.shape[0], a.window);
        return [b, kp, vp](const Pass& p) { b->ops.attention_half(b->half, p.s, p.rope, (uint16_t*)kp.data, (uint16_t*)vp.data, p.seq); };
    }
    if (const auto* b = as<Latent>(half)) {
        const LatentHalf& a = b->half;
        if (!rope || 2 * rope > a.turned) fail("cos: rotates more than the head holds");
        const Tensor held = tensor(first, "held", BF16, {-1, 1, PAGE, a.rank + a.turned});
        needs.attention(held.shape[0], 0);
        return [b, held](const Pass& p) { b->ops.latent_half(b->half, p.s, p.rope, (uint16_t*)held.data, p.seq); };
    }
    if (const auto* b = as<Delta>(half)) {
        const DeltaHalf& d = b->half;
        const Tensor state = tensor(second, "s", F32, {-1, d.value_heads, d.key_dim, d.value_dim});
        const int64_t mixed = 2 * (int64_t)d.key_heads * d.key_dim + (int64_t)d.value_heads * d.value_dim;
        const Tensor conv = tensor(first, "conv state", F32, {state.shape[0], mixed, d.taps - 1});
        needs.slots = std::min(needs.slots, state.shape[0]);
        return [b, conv, state](const Pass& p) { b->ops.delta_half(b->half, p.s, conv.f(), state.f(), p.seq.cu, p.seq.slot, p.seq.n, p.kept); };
    }
    if (const auto* b = as<Mlp>(half)) return [b](const Pass& p) { b->ops.mlp_half(b->half, p.s); };
    if (const auto* b = as<Moe>(half)) {
        if (!b->half.up.one.data) fail("no bank: where the experts lie is not known");
        return [b](const Pass& p) { run_sound(*b, p.s); };
    }
    fail("half: is none of this module's");
}

int64_t width_of(H half) {
    if (const auto* b = as<Attention>(half)) return b->half.norm.width;
    if (const auto* b = as<Latent>(half)) return b->half.norm.width;
    if (const auto* b = as<Delta>(half)) return b->half.norm.width;
    if (const auto* b = as<Mlp>(half)) return b->half.norm.width;
    if (const auto* b = as<Moe>(half)) return b->half.norm.width;
    fail("half: is none of this module's");
}

void bind_halves(nb::module_& m, nb::class_<Ops>& ops) {
    nb::class_<Attention>(m, "AttentionHalf")
        .def("__call__", &run_attention, nb::arg("x"), nb::arg("added").none(), nb::arg("cos").none(), nb::arg("sin").none(), nb::arg("k"),
             nb::arg("v"), nb::arg("cu"), nb::arg("start"), nb::arg("pages"));
    nb::class_<Latent>(m, "LatentHalf")
        .def("__call__", &run_latent, nb::arg("x"), nb::arg("added").none(), nb::arg("cos"), nb::arg("sin"), nb::arg("held"), nb::arg("cu"),
             nb::arg("start"), nb::arg("pages"));
    nb::class_<Delta>(m, "DeltaHalf")
        .def("__call__", &run_delta, nb::arg("x"), nb::arg("added").none(), nb::arg("conv"), nb::arg("s"), nb::arg("cu"), nb::arg("slot"),
             nb::arg("kept").none() = nb::none());
    nb::class_<Mlp>(m, "MlpHalf").def("__call__", &run_mlp, nb::arg("x"), nb::arg("added").none());
    nb::class_<Moe>(m, "MoeHalf")
        .def("bank", &moe_bank, nb::arg("gate_up"), nb::arg("down"), nb::arg("sound").none() = nb::none(), nb::arg("check").none() = nb::none())
        .def("choose", &choose, nb::arg("x"), nb::arg("added").none(), nb::arg("out"), nb::arg("ids"), nb::arg("weights"), nb::arg("always").none())
        .def("__call__", &run_moe, nb::arg("x"), nb::arg("added").none());
    ops.def("attention_half", &attention_half, nb::arg("norm"), nb::arg("eps"), nb::arg("parts"), nb::arg("biases"), nb::arg("q_norm").none(),
            nb::arg("k_norm").none(), nb::arg("out"), nb::arg("out_bias").none(), nb::arg("heads"), nb::arg("kv_heads"), nb::arg("dim"),
            nb::arg("scale"), nb::arg("window"), nb::arg("gate"), nb::arg("interleaved"))
        .def("latent_half", &latent_half, nb::arg("norm"), nb::arg("eps"), nb::arg("parts"), nb::arg("q_norm").none(), nb::arg("q"), nb::arg("kv_norm"),
             nb::arg("own_eps"), nb::arg("keys"), nb::arg("values"), nb::arg("out"), nb::arg("heads"), nb::arg("rank"), nb::arg("plain"),
             nb::arg("turned"), nb::arg("scale"), nb::arg("interleaved"))
        .def("delta_half", &delta_half)
        .def("mlp_half", &mlp_half)
        .def("moe_half", &moe_half, nb::arg("norm"), nb::arg("eps"), nb::arg("parts"), nb::arg("experts"), nb::arg("k"), nb::arg("sigmoid"),
             nb::arg("renorm"), nb::arg("scale"), nb::arg("groups"), nb::arg("top_groups"), nb::arg("group_best"), nb::arg("bias").none(), nb::arg("shared"),
             nb::arg("shared_switch"), nb::arg("shared_down"), nb::arg("act"));
}
