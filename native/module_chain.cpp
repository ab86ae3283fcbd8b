// Python's door to whole steps: what the scheduler knows of a step becomes its rows here, checked once for all halves.
#include "module_chain.h"

#include <memory>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>

namespace {

using Typed = std::pair<nb::object, std::string>; // a weight and its block type ("": a float tensor)
using Held = std::tuple<nb::object, nb::object, nb::object, int>; // a half, its cache (two tensors, or None), its table of angles or -1
using Angles = std::pair<nb::object, nb::object>;                 // cos and sin [rows, half]
using Logits = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

struct BoundChain {
    Chain chain;
    Needs needs;
    std::vector<nb::object> kept; // whatever the pointers point into
    std::vector<Angles> angles;
};

RopeTable table_of(const Angles& a) {
    const Tensor cos = tensor(a.first, "cos", F32, {-1, -1}), sin = tensor(a.second, "sin", F32, {cos.shape[0], cos.shape[1]});
    return RopeTable{cos.f(), sin.f(), cos.shape[0], cos.shape[1]};
}

BoundChain* make(Ops& ops, const Typed& table, float scale, const std::vector<Held>& halves, const std::vector<Angles>& angles,
                 nb::object norm, float eps, const Typed& head) {
    if (halves.empty()) fail("halves: there are none");
    const int64_t width = width_of(std::get<0>(halves[0]));
    const Norm last{tensor(norm, "norm", F32, {width}).f(), width, eps};
    std::unique_ptr<BoundChain> b(new BoundChain{
        Chain(ops, matrix(table.first, "table", table.second, 2, width), scale, last, matrix(head.first, "head", head.second, 2, width)),
        {}, {nb::find(ops), table.first, norm, head.first}, angles});
    for (const Angles& a : angles) b->chain.ropes().push_back(table_of(a));
    for (const auto& [half, first, second, rope] : halves) {
        if (rope < -1 || rope >= (int)angles.size()) fail("halves: there is no such table of angles");
        if (width_of(half) != width) fail("halves: have other rows of x");
        b->chain.add(link_of(half, first, second, rope < 0 ? 0 : b->chain.ropes()[rope].half, b->needs), rope);
        for (const nb::object& o : {half, first, second}) b->kept.push_back(o);
    }
    return b.release();
}

void set_angles(BoundChain& b, int64_t i, nb::object cos, nb::object sin) {
    if (i < 0 || i >= (int64_t)b.angles.size()) fail("angles: there is no such table");
    const RopeTable t = table_of({cos, sin});
    if (t.half != b.chain.ropes()[i].half) fail("cos: rotates another part of the head");
    b.chain.ropes()[i] = t, b.angles[i] = {cos, sin};
}

int64_t number(H h, const char* name, int64_t low, int64_t high) {
    const int64_t value = PyLong_AsLongLong(h.ptr());
    if (value == -1 && PyErr_Occurred()) throw nb::python_error();
    if (value < low || value >= high) fail(std::string(name) + ": " + std::to_string(value) + " is not in " + std::to_string(low) + ".." + std::to_string(high - 1));
    return value;
}

// tokens[start:end] of an array of int32.
void add_tokens(H tokens, int64_t start, int64_t end, int64_t vocab, std::vector<int32_t>& out) {
    Py_buffer view;
    if (PyObject_GetBuffer(tokens.ptr(), &view, PyBUF_FORMAT | PyBUF_C_CONTIGUOUS)) throw nb::python_error();
    const bool ints = view.itemsize == 4 && view.ndim == 1 && view.format && !strcmp(view.format, "i") && end <= view.shape[0];
    const size_t before = out.size();
    if (ints) out.insert(out.end(), (const int32_t*)view.buf + start, (const int32_t*)view.buf + end);
    PyBuffer_Release(&view);
    if (!ints) fail("tokens: expected int32, as many as the piece ends at");
    for (size_t i = before; i < out.size(); i++)
        if (out[i] < 0 || out[i] >= vocab) fail("tokens: " + std::to_string(out[i]) + " is not in 0.." + std::to_string(vocab - 1));
}

// (tokens, start, end, slot, pages, wanted positions, (kept position, slot) or None)
void add_piece(const BoundChain& b, H piece, int64_t longest, Rows& rows, std::vector<nb::object>& tables) {
    if (!PyTuple_Check(piece.ptr()) || PyTuple_GET_SIZE(piece.ptr()) != 7) fail("piece: seven parts");
    auto part = [&](int i) { return H(PyTuple_GET_ITEM(piece.ptr(), i)); };
    const int64_t start = number(part(1), "start", 0, longest), end = number(part(2), "end", start + 1, longest + 1);
    const int64_t base = (int64_t)rows.tokens.size() - start;
    add_tokens(part(0), start, end, b.chain.tokens(), rows.tokens);
    for (int64_t p = start; p < end; p++) rows.positions.push_back((int32_t)p);
    rows.cu.push_back((int32_t)rows.tokens.size()), rows.start.push_back((int32_t)start);
    rows.slot.push_back((int32_t)number(part(3), "slot", 0, std::min<int64_t>(b.needs.slots, INT32_MAX)));
    tables.push_back(nb::steal(PySequence_Fast(part(4).ptr(), "pages: expected a sequence")));
    if (!tables.back().is_valid()) throw nb::python_error();
    rows.width = std::max(rows.width, (end + PAGE - 1) / PAGE);
    for (H position : nb::borrow(part(5))) {
        const int64_t row = base + number(position, "wanted", start, end);
        if (!rows.wanted.empty() && row <= rows.wanted.back()) fail("wanted: must rise");
        rows.wanted.push_back((int32_t)row);
    }
    int32_t kept[2] = {0, -1};
    if (!part(6).is_none()) {
        const nb::tuple k = nb::cast<nb::tuple>(part(6));
        kept[0] = (int32_t)(number(k[0], "kept", start, end) - start);
        kept[1] = (int32_t)number(k[1], "kept", 0, std::min<int64_t>(b.needs.slots, INT32_MAX));
    }
    rows.kept.insert(rows.kept.end(), kept, kept + 2);
}

void add_pages(const Needs& needs, const std::vector<nb::object>& tables, Rows& rows) {
    rows.pages.assign(tables.size() * rows.width, -1);
    for (size_t s = 0; s < tables.size() && needs.window >= 0; s++) {
        const int64_t from = rows.start[s], end = from + rows.cu[s + 1] - rows.cu[s], used = (end + PAGE - 1) / PAGE;
        if (PySequence_Fast_GET_SIZE(tables[s].ptr()) < used) fail("pages: sequence " + std::to_string(s) + " has too few");
        const int64_t oldest = needs.window && from + 1 > needs.window ? from + 1 - needs.window : 0;
        for (int64_t p = 0; p < used; p++)
            rows.pages[s * rows.width + p] = (int32_t)number(PySequence_Fast_GET_ITEM(tables[s].ptr(), p), "pages", p < oldest / PAGE ? -1 : 0, needs.pages);
    }
}

void run(BoundChain& b, const nb::list& pieces, Logits out) {
    int64_t longest = INT32_MAX;
    for (const RopeTable& t : b.chain.ropes()) longest = std::min(longest, t.rows);
    Rows rows;
    std::vector<nb::object> tables;
    for (H piece : pieces) add_piece(b, piece, longest, rows, tables);
    if (rows.tokens.empty()) fail("pieces: there are none");
    add_pages(b.needs, tables, rows);
    bool keeps = false;
    for (size_t i = 1; i < rows.kept.size(); i += 2) keeps = keeps || rows.kept[i] >= 0;
    if (!keeps) rows.kept.clear();
    if (out.shape(0) != rows.wanted.size() || (int64_t)out.shape(1) != b.chain.vocab()) fail("out: expected a row for each wanted position");
    release r;
    b.chain.run(rows, out.data());
}

} // namespace

void bind_chain(nb::module_& m, nb::class_<Ops>& ops) {
    nb::class_<BoundChain>(m, "Chain")
        .def("__call__", &run, nb::arg("pieces"), nb::arg("out"))
        .def("angles", &set_angles)
        .def_prop_ro("times", [](const BoundChain& b) { return b.chain.times(); });
    ops.def("chain", &make, nb::arg("table"), nb::arg("scale"), nb::arg("halves"), nb::arg("angles"), nb::arg("norm"), nb::arg("eps"), nb::arg("head"));
}
