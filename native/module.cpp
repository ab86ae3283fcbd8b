// Python's door to the kernels: `engine._native`. Owns every check of what comes in (tensors.h).
#include "tensors.h"

#include <sched.h>

namespace {

void linear(Ops& ops, H out_, H x_, H w_, const std::string& type, H bias_) {
    const Tensor x = tensor(x_, "x", F32, {-1, -1});
    const Matrix w = matrix(w_, "weight", type, 2, x.shape[1]);
    const Tensor out = tensor(out_, "out", F32, {x.shape[0], w.rows});
    const float* bias = bias_.is_none() ? nullptr : tensor(bias_, "bias", F32, {w.rows}).f();
    if (!out.size()) return;
    release r;
    ops.linear(x.f(), x.shape[0], w, bias, out.f());
}

void embed(Ops& ops, H out_, H table, const std::string& type, H ids_) {
    const Tensor ids = tensor(ids_, "ids", I32, {-1}), out = tensor(out_, "out", F32, {ids.shape[0], -1});
    const Matrix m = matrix(table, "table", type, 2, out.shape[1]);
    in_range(ids, m.rows);
    release r;
    ops.embed(m, ids.i(), ids.shape[0], out.f());
}

void dequantize(Ops& ops, H out_, H data, const std::string& type) {
    const Tensor out = tensor(out_, "out", F32, {-1, -1});
    const Matrix m = matrix(data, "data", type, 2, out.shape[1]);
    if (m.rows != out.shape[0]) fail("out: expected " + std::to_string(m.rows) + " rows");
    release r;
    ops.dequantize(m, out.f());
}

void moe(Ops& ops, H out_, H x_, H ids_, H weights_, H up_, const std::string& up_type, H down_, const std::string& down_type,
         const std::string& act, H place_) {
    const Tensor x = tensor(x_, "x", F32, {-1, -1}), ids = tensor(ids_, "ids", I32, {x.shape[0], -1});
    const Tensor weights = tensor(weights_, "weights", F32, {x.shape[0], ids.shape[1]});
    const Tensor out = tensor(out_, "out", F32, {x.shape[0], x.shape[1]});
    int64_t experts, same;
    const Experts up = experts_of(up_, "gate_up", up_type, x.shape[1], experts);
    const Experts down = experts_of(down_, "down", down_type, up.one.rows / 2, same);
    if (up.one.rows % 2 || down.one.rows != x.shape[1] || same != experts) fail("gate_up and down do not belong together");
    const int32_t* place = nullptr;
    if (!place_.is_none()) {
        const Tensor t = tensor(place_, "place", I32, {-1});
        in_range(ids, t.shape[0]);
        for (int64_t i = 0; i < ids.size(); i++)
            if (const int32_t at = t.i()[ids.i()[i]]; at < 0 || at >= experts)
                fail("place: expert " + std::to_string(ids.i()[i]) + " lies at " + std::to_string(at) + " of " + std::to_string(experts));
        place = t.i(), experts = t.shape[0];
    }
    in_range(ids, experts);
    const int a = act_of(act);
    if (!out.size() || !ids.size()) return;
    release r;
    ops.moe(x.f(), x.shape[0], ids.i(), weights.f(), (int)ids.shape[1], experts, place, up, down, a, out.f());
}

void moe_merge(Ops& ops, H out_, H parts_, H ids_, H weights_) {
    const Tensor parts = tensor(parts_, "parts", F32, {-1, -1, -1}), ids = tensor(ids_, "ids", I32, {parts.shape[0], parts.shape[1]});
    const Tensor weights = tensor(weights_, "weights", F32, {ids.shape[0], ids.shape[1]});
    const Tensor out = tensor(out_, "out", F32, {parts.shape[0], parts.shape[2]});
    in_range(ids, INT32_MAX);
    if (!out.size()) return;
    release r;
    ops.moe_merge(parts.f(), ids.i(), weights.f(), parts.shape[0], (int)parts.shape[1], parts.shape[2], out.f());
}

void delta_net(Ops& ops, H out_, H qkv_, H a_, H b_, H conv_, H bias_, H log_, H conv_state_, H s_, H cu_, H slot_, H kept_) {
    const Tensor s = tensor(s_, "s", F32, {-1, -1, -1, -1}), qkv = tensor(qkv_, "qkv", F32, {-1, -1});
    const int64_t rows = qkv.shape[0], width = qkv.shape[1], slots = s.shape[0], hv = s.shape[1], dk = s.shape[2], dv = s.shape[3];
    const int64_t keys = width - hv * dv;
    if (dk < 1 || hv < 1 || keys <= 0 || keys % (2 * dk) || hv % (keys / 2 / dk)) fail("qkv: width does not fit the state's heads");
    const Tensor a = tensor(a_, "a", F32, {rows, hv}), b = tensor(b_, "b", F32, {rows, hv}), conv = tensor(conv_, "conv", F32, {width, -1});
    const int64_t taps = conv.shape[1];
    if (taps < 1 || taps > 8) fail("conv: kernel size must be in 1..8");
    const Tensor bias = tensor(bias_, "dt_bias", F32, {hv}), log = tensor(log_, "a_log", F32, {hv});
    const Tensor past = tensor(conv_state_, "conv state", F32, {slots, width, taps - 1}), out = tensor(out_, "out", F32, {rows, hv, dv});
    const Tensor cu = tensor(cu_, "cu", I32, {-1});
    check_segments(cu, rows);
    const Tensor slot = tensor(slot_, "slot", I32, {cu.shape[0] - 1});
    in_range(slot, slots);
    const int32_t* kept = kept_slots(kept_, cu, slots);
    if (!out.size()) return;
    DeltaJob job{qkv.f(), a.f(), b.f(), conv.f(), bias.f(), log.f(), past.f(), s.f(), nullptr, nullptr, nullptr, out.f(),
                 (int)(keys / 2 / dk), (int)hv, (int)dk, (int)dv, (int)taps, cu.i(), slot.i(), (int)slot.shape[0], kept};
    release r;
    ops.delta_net(job, rows);
}

void rms_norm(Ops& ops, H out_, H x_, H w_, float eps, bool plus_one) {
    const Tensor x = any_tensor(x_, "x"), out = any_tensor(out_, "out");
    const int64_t n = x.dims ? x.shape[x.dims - 1] : 0;
    const Tensor w = tensor(w_, "weight", F32, {n});
    if (x.dtype != F32 || out.dtype != F32 || out.size() != x.size()) fail("x and out must be float32 of one size");
    if (!x.size()) return;
    release r;
    ops.rms_norm(x.f(), w.f(), eps, plus_one, out.f(), x.size() / n, n);
}

void gated_norm(Ops& ops, H out_, H x_, H z_, H w_, float eps) {
    const Tensor x = any_tensor(x_, "x"), z = any_tensor(z_, "z"), out = any_tensor(out_, "out");
    const int64_t n = x.dims ? x.shape[x.dims - 1] : 0;
    const Tensor w = tensor(w_, "weight", F32, {n});
    if (x.dtype != F32 || z.dtype != F32 || out.dtype != F32 || out.size() != x.size() || z.size() != x.size())
        fail("x, z and out must be float32 of one size");
    if (!x.size()) return;
    release r;
    ops.gated_norm(x.f(), z.f(), w.f(), eps, out.f(), x.size() / n, n);
}

void rope(Ops& ops, H out_, H x_, H cos_, H sin_, bool interleaved) {
    const Tensor x = tensor(x_, "x", F32, {-1, -1, -1}), cos = tensor(cos_, "cos", F32, {x.shape[0], -1});
    const Tensor sin = tensor(sin_, "sin", F32, {x.shape[0], cos.shape[1]}), out = tensor(out_, "out", F32, {x.shape[0], x.shape[1], x.shape[2]});
    if (2 * cos.shape[1] > x.shape[2]) fail("cos: rotates more than the head holds");
    if (!x.size()) return;
    release r;
    ops.rope(x.f(), cos.f(), sin.f(), interleaved, out.f(), x.shape[0], (int)x.shape[1], (int)x.shape[2], 2 * (int)cos.shape[1]);
}

void add_norm(Ops& ops, H out_, H x_, H added_, H w_, float eps) {
    const Tensor x = tensor(x_, "x", F32, {-1, -1}), added = tensor(added_, "added", F32, {x.shape[0], x.shape[1]});
    const Tensor w = tensor(w_, "weight", F32, {x.shape[1]}), out = tensor(out_, "out", F32, {x.shape[0], x.shape[1]});
    if (!x.size()) return;
    release r;
    ops.add_norm(x.f(), added.f(), w.f(), eps, out.f(), x.shape[0], x.shape[1]);
}

void turn_heads(Ops& ops, H x_, int q_heads, int k_heads, H q_w_, H k_w_, float eps, H cos_, H sin_, bool interleaved) {
    const Tensor x = tensor(x_, "x", F32, {-1, -1, -1});
    const int64_t dim = x.shape[2];
    if (q_heads < 0 || k_heads < 0 || (int64_t)q_heads + k_heads > x.shape[1]) fail("x: holds fewer heads than q and k have");
    if (q_w_.is_none() != k_w_.is_none()) fail("k weight: q and k have norms, or neither has");
    if (cos_.is_none() != sin_.is_none()) fail("sin: goes with cos");
    const float* q_w = q_w_.is_none() ? nullptr : tensor(q_w_, "q weight", F32, {dim}).f();
    const float* k_w = k_w_.is_none() ? nullptr : tensor(k_w_, "k weight", F32, {dim}).f();
    const float *cos = nullptr, *sin = nullptr;
    int64_t half = 0;
    if (!cos_.is_none()) {
        const Tensor c = tensor(cos_, "cos", F32, {x.shape[0], -1});
        half = c.shape[1], cos = c.f(), sin = tensor(sin_, "sin", F32, {x.shape[0], half}).f();
        if (2 * half > dim) fail("cos: rotates more than the head holds");
    }
    if (!x.size()) return;
    release r;
    ops.turn_heads(x.f(), x.shape[0], x.shape[1] * dim, q_heads, k_heads, (int)dim, q_w, k_w, eps, cos, sin, interleaved, 2 * (int)half);
}

void gate_mul(Ops& ops, H out_, H gate_, H up_, const std::string& act) {
    const Tensor gate = any_tensor(gate_, "gate"), up = any_tensor(up_, "up"), out = any_tensor(out_, "out");
    if (gate.dtype != F32 || up.dtype != F32 || out.dtype != F32 || gate.size() != up.size() || gate.size() != out.size())
        fail("gate, up and out must be float32 of one size");
    const int a = act_of(act);
    release r;
    ops.gate_mul(gate.f(), up.f(), a, out.f(), gate.size());
}

void route(Ops& ops, H ids_, H weights_, H logits_, H bias_, bool sigmoid, bool renorm, float scale, int groups, int top_groups,
           int group_best) {
    const Tensor logits = tensor(logits_, "logits", F32, {-1, -1}), ids = tensor(ids_, "ids", I32, {logits.shape[0], -1});
    const Tensor weights = tensor(weights_, "weights", F32, {logits.shape[0], ids.shape[1]});
    const int64_t experts = logits.shape[1];
    check_route(experts, ids.shape[1], groups, top_groups, group_best);
    const float* bias = bias_.is_none() ? nullptr : tensor(bias_, "bias", F32, {experts}).f();
    if (!ids.size()) return;
    const RouteRule rule{(int)experts, (int)ids.shape[1], sigmoid, renorm, scale, groups, top_groups, group_best, bias};
    release r;
    ops.route(logits.f(), logits.shape[0], rule, ids.i(), weights.f());
}

float stream_read(Ops& ops, H data_) {
    const Tensor t = any_tensor(data_, "data");
    release r;
    return ops.read(t.data, t.size() * DTYPES[t.dtype].size);
}

// [(what, bytes, tasks, asked, done, [(from, to) of each thread])], in nanoseconds; turns tracing on or off
nb::list trace(Ops& ops, bool on) {
    nb::list out;
    for (const Pool::Traced& t : ops.trace(on)) {
        nb::list threads;
        for (const auto& [from, to] : t.threads) threads.append(nb::make_tuple(from, to));
        out.append(nb::make_tuple(t.part.name, t.part.bytes, t.tasks, t.asked, t.done, threads));
    }
    return out;
}

Ops* make(int threads, const std::string& isa, const std::vector<int>& cpus) {
    if (threads < 1 || threads > 1024) fail("threads: must be in 1..1024");
    if (!cpus.empty() && cpus.size() != (size_t)threads) fail("cpus: must name one for each thread, or none");
    for (int cpu : cpus)
        if (cpu < 0 || cpu >= CPU_SETSIZE) fail("cpus: must be in 0.." + std::to_string(CPU_SETSIZE - 1));
    if (isa.empty()) return new Ops(threads, best_isa(), cpus);
    for (const IsaInfo& i : ISAS)
        if (isa == i.name) {
            if (i.isa > best_isa()) fail("isa: this machine does not run " + isa);
            return new Ops(threads, i.isa, cpus);
        }
    fail("isa: no such instruction set: " + isa);
}

} // namespace

NB_MODULE(_native, m) {
    nb::list types;
    for (const FormatInfo& f : FORMATS) types.append(f.name);
    m.attr("TYPES") = nb::tuple(types);
    m.attr("NUMERICS") = NUMERICS;
    m.attr("ABI") = ABI;
    m.attr("MAPS") = true; // experts and halves of them may lie apart
    m.attr("GUARDS") = true; // experts in place may have to be checked first
    m.def("isas", [] {
        nb::list names;
        for (const IsaInfo& i : ISAS)
            if (i.isa <= best_isa()) names.append(i.name);
        return names;
    });
    nb::class_<Ops> ops(m, "Ops", "Kernels of one ISA and the worker pool they run on. Outputs are written into given tensors.");
    ops.def(nb::new_(&make), nb::arg("threads"), nb::arg("isa") = "", nb::arg("cpus") = std::vector<int>{})
        .def_prop_ro("isa", [](const Ops& o) { return ISAS[(int)o.isa()].name; })
        .def_prop_ro("threads", &Ops::threads)
        .def("linear", &linear, nb::arg("out"), nb::arg("x"), nb::arg("weight"), nb::arg("type"), nb::arg("bias").none())
        .def("embed", &embed)
        .def("dequantize", &dequantize)
        .def("moe", &moe, nb::arg("out"), nb::arg("x"), nb::arg("ids"), nb::arg("weights"), nb::arg("gate_up"), nb::arg("up_type"),
             nb::arg("down"), nb::arg("down_type"), nb::arg("act"), nb::arg("place").none() = nb::none())
        .def("moe_merge", &moe_merge)
        .def("delta_net", &delta_net, nb::arg("out"), nb::arg("qkv"), nb::arg("a"), nb::arg("b"), nb::arg("conv"), nb::arg("dt_bias"),
             nb::arg("a_log"), nb::arg("conv_state"), nb::arg("s"), nb::arg("cu"), nb::arg("slot"), nb::arg("kept").none() = nb::none())
        .def("rms_norm", &rms_norm)
        .def("gated_norm", &gated_norm)
        .def("rope", &rope)
        .def("add_norm", &add_norm)
        .def("turn_heads", &turn_heads, nb::arg("x"), nb::arg("q_heads"), nb::arg("k_heads"), nb::arg("q_weight").none(),
             nb::arg("k_weight").none(), nb::arg("eps"), nb::arg("cos").none(), nb::arg("sin").none(), nb::arg("interleaved"))
        .def("gate_mul", &gate_mul)
        .def("route", &route, nb::arg("ids"), nb::arg("weights"), nb::arg("logits"), nb::arg("bias").none(), nb::arg("sigmoid"),
             nb::arg("renorm"), nb::arg("scale"), nb::arg("groups"), nb::arg("top_groups"), nb::arg("group_best"))
        .def("stream_read", &stream_read)
        .def("trace", &trace);
    bind_attention(ops);
    bind_halves(m, ops);
    bind_chain(m, ops);
    bind_sampling(m);
    bind_reader(m, ops);
}
