// Python's door to the reader of packed experts, and to kernels that compute on what it brings.
#include "tensors.h"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>

namespace {

using Keys = std::vector<int64_t>;

// Bytes of one slot of a bank's matrix [slots, ...].
int64_t slot_bytes(const Tensor& t) { return t.dims && t.shape[0] ? t.size() / t.shape[0] * DTYPES[t.dtype].size : 0; }

Reader* make_reader(int file, int64_t record, int64_t piece, int ahead, int threads, H gate_up, H down) {
    const Tensor up = any_tensor(gate_up, "gate_up"), low = any_tensor(down, "down");
    if (threads < 0 || threads > 1024) fail("threads: must be in 0..1024");
    if (piece < 1 || ahead < 1) fail("piece, ahead: must be positive");
    if (!up.dims || !low.dims || up.shape[0] != low.shape[0]) fail("gate_up and down do not belong together");
    const Shelf shelf{file, record, {slot_bytes(up), slot_bytes(low)}, {up.data, low.data}, up.shape[0], piece, ahead};
    if (record < 1 || record < shelf.bytes[0] + shelf.bytes[1]) fail("record: is smaller than an expert");
    return new Reader(shelf, threads);
}

// wants: key, offset in the file, slot, whether it is to be checked
void submit(Reader& reader, const std::vector<std::tuple<int64_t, int64_t, int64_t, bool>>& wants, bool behind) {
    std::vector<Reader::Want> all;
    for (const auto& [key, offset, slot, check] : wants) {
        if (slot < 0 || slot >= reader.shelf().slots) fail("slot: there is no " + std::to_string(slot));
        if (offset < 0) fail("offset: must not be negative");
        all.push_back({key, offset, slot, check});
    }
    reader.submit(all, behind);
}

// when, whether it is there (0), was taken back (1) or failed (2), and why
std::tuple<double, int, std::string> wait(Reader& reader, int64_t key) {
    Reader::Ended ended;
    if (reader.arrived(key)) {
        ended = reader.wait(key); // at once
    } else {
        release r;
        ended = reader.wait(key);
    }
    return {ended.when, (int)ended.end, ended.why};
}

Keys first(Reader& reader, const Keys& keys) {
    if (keys.empty()) fail("keys: one at least");
    release r;
    return reader.first(keys);
}

nb::object unchecked(Reader& reader) {
    std::optional<Reader::Want> want;
    {
        release r;
        want = reader.unchecked();
    }
    return want ? nb::cast(std::pair(want->key, want->slot)) : nb::none();
}

nb::list reads(Reader& reader) {
    nb::list all;
    for (const Reader::Read& read : reader.reads()) all.append(nb::make_tuple(read.began, read.ended, read.key));
    return all;
}

std::pair<Keys, double> moe_arriving(Ops& ops, H out_, H x_, H ids_, H weights_, H up_, const std::string& up_type, H down_,
                                     const std::string& down_type, const std::string& act, H place_,
                                     const std::vector<std::pair<int32_t, int64_t>>& coming_, Reader& reader) {
    const Tensor x = tensor(x_, "x", F32, {-1, -1}), ids = tensor(ids_, "ids", I32, {x.shape[0], -1});
    const Tensor weights = tensor(weights_, "weights", F32, {x.shape[0], ids.shape[1]});
    const Tensor out = tensor(out_, "out", F32, {x.shape[0], x.shape[1]}), place = tensor(place_, "place", I32, {-1});
    int64_t slots, same;
    const Experts up = experts_of(up_, "gate_up", up_type, x.shape[1], slots);
    const Experts down = experts_of(down_, "down", down_type, up.one.rows / 2, same);
    if (up.one.rows % 2 || down.one.rows != x.shape[1] || same != slots) fail("gate_up and down do not belong together");
    const Shelf& shelf = reader.shelf();
    const bool here = up.one.data == shelf.base[0] && down.one.data == shelf.base[1] && slots == shelf.slots;
    const bool whole = up.stride == shelf.bytes[0] && down.stride == shelf.bytes[1] && 2 * up.half == up.stride;
    if (!here || !whole) fail("gate_up and down: are not those that the reader reads into");
    const int64_t experts = place.shape[0];
    in_range(ids, experts);
    for (int64_t i = 0; i < ids.size(); i++)
        if (const int32_t at = place.i()[ids.i()[i]]; at < 0 || at >= slots)
            fail("place: expert " + std::to_string(ids.i()[i]) + " lies at " + std::to_string(at) + " of " + std::to_string(slots));
    std::vector<Ops::Coming> coming;
    for (const auto& [expert, key] : coming_) {
        if (expert < 0 || expert >= experts) fail("coming: there is no expert " + std::to_string(expert));
        coming.push_back({expert, key});
    }
    const int a = act_of(act);
    Ops::Came came;
    if (out.size() && ids.size()) {
        release r;
        came = ops.moe_arriving(x.f(), x.shape[0], ids.i(), weights.f(), (int)ids.shape[1], experts, place.i(), up, down, a, coming, reader,
                                out.f());
    }
    return {came.lost, came.waited};
}

} // namespace

void bind_reader(nb::module_& m, nb::class_<Ops>& ops) {
    nb::class_<Reader>(m, "Reader", "Reads experts of a packed file into slots, piece by piece, on threads of its own.")
        .def(nb::new_(&make_reader), nb::arg("file"), nb::arg("record"), nb::arg("piece"), nb::arg("ahead"), nb::arg("threads"), nb::arg("gate_up"),
             nb::arg("down"))
        .def("submit", &submit, nb::arg("wants"), nb::arg("behind") = false)
        .def("hurry", &Reader::hurry)
        .def("cancel", &Reader::cancel)
        .def("wait", &wait)
        .def("first", &first)
        .def("arrived", &Reader::arrived)
        .def("step", &Reader::step, nb::call_guard<release>())
        .def("unchecked", &unchecked)
        .def("checked", &Reader::checked)
        .def("close", &Reader::close, nb::call_guard<release>())
        .def("reads", &reads)
        .def_prop_ro("bytes", &Reader::bytes)
        .def_prop_ro("busy_s", &Reader::busy_s);
    ops.def("moe_arriving", &moe_arriving);
}
