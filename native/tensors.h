// Reading tensors that Python hands in, of torch or of engine.tensors, and every check of them: a bad argument is a ValueError here.
//
// Tensors are read through four attributes (dtype, shape, is_contiguous, data_ptr): no torch headers, and a tenth of the cost
// of a DLPack round trip, which matters at a hundred calls a token.
#pragma once
#include "ops.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <string>

namespace nb = nanobind;

[[noreturn]] inline void fail(const std::string& text) { throw nb::value_error(text.c_str()); }

struct DType {
    const char* name; // torch's
    int size;
};
constexpr DType DTYPES[] = {{"float32", 4}, {"float16", 2}, {"bfloat16", 2}, {"uint8", 1}, {"int32", 4}};
enum { F32, F16, BF16, U8, I32, DTYPE_COUNT };
// The dtypes of a library that tensors come from: its singletons, held for the life of the process once it is imported.
struct Library {
    const char* module;
    PyObject* dtypes[DTYPE_COUNT];

    int find(PyObject* dtype) {
        if (!dtypes[0]) {
            PyObject* found = PyDict_GetItemString(PyImport_GetModuleDict(), module);
            if (!found) return DTYPE_COUNT;
            for (int i = 0; i < DTYPE_COUNT; i++) dtypes[i] = nb::object(nb::handle(found).attr(DTYPES[i].name)).release().ptr();
        }
        int i = 0;
        while (i < DTYPE_COUNT && dtypes[i] != dtype) i++;
        return i;
    }
};
inline Library libraries[] = {{"engine.tensors", {}}, {"torch", {}}};

// DTYPE_COUNT for one that no kernel knows.
inline int dtype_of(PyObject* dtype) {
    const int own = libraries[0].find(dtype);
    return own < DTYPE_COUNT ? own : libraries[1].find(dtype);
}

struct Tensor {
    uint8_t* data;
    int dtype, dims;
    int64_t shape[5];
    const char* name;

    int64_t size() const {
        int64_t n = 1;
        for (int i = 0; i < dims; i++) n *= shape[i];
        return n;
    }
    float* f() const { return (float*)data; }
    int32_t* i() const { return (int32_t*)data; }
};

inline std::string shape_text(const Tensor& t) {
    std::string s = "[";
    for (int i = 0; i < t.dims; i++) s += (i ? ", " : "") + std::to_string(t.shape[i]);
    return s + "]";
}

// `apart`: null, or where its strides go if it may be a part of something larger.
inline Tensor any_tensor(nb::handle h, const char* name, int64_t* apart = nullptr) {
    static PyObject *const n_dtype = PyUnicode_InternFromString("dtype"), *const n_shape = PyUnicode_InternFromString("shape"),
                     *const n_cpu = PyUnicode_InternFromString("is_cpu"), *const n_ptr = PyUnicode_InternFromString("data_ptr"),
                     *const n_cont = PyUnicode_InternFromString("is_contiguous"), *const n_stride = PyUnicode_InternFromString("stride");
    auto get = [&](PyObject* attr) {
        nb::object o = nb::steal(PyObject_GetAttr(h.ptr(), attr));
        if (!o.is_valid()) {
            PyErr_Clear();
            fail(std::string(name) + ": expected a tensor");
        }
        return o;
    };
    auto call = [&](PyObject* attr) {
        nb::object o = nb::steal(PyObject_CallMethodNoArgs(h.ptr(), attr));
        if (!o.is_valid()) throw nb::python_error();
        return o;
    };
    Tensor t{};
    t.name = name;
    nb::object dtype = get(n_dtype), shape = get(n_shape);
    if ((t.dtype = dtype_of(dtype.ptr())) == DTYPE_COUNT) fail(std::string(name) + ": dtype " + nb::str(dtype).c_str() + " has no kernel");
    if (get(n_cpu).ptr() != Py_True) fail(std::string(name) + ": tensor is not in CPU memory");
    if (!PyTuple_Check(shape.ptr()) || PyTuple_GET_SIZE(shape.ptr()) > 5) fail(std::string(name) + ": more than 5 dimensions");
    t.dims = (int)PyTuple_GET_SIZE(shape.ptr());
    for (int i = 0; i < t.dims; i++) t.shape[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(shape.ptr(), i));
    if (apart) {
        const nb::object strides = call(n_stride);
        for (int i = 0; i < t.dims; i++) apart[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(strides.ptr(), i));
    } else if (call(n_cont).ptr() != Py_True)
        fail(std::string(name) + ": tensor is not contiguous");
    t.data = (uint8_t*)PyLong_AsVoidPtr(call(n_ptr).ptr());
    if (!t.data && t.size()) fail(std::string(name) + ": tensor has no memory");
    return t;
}

// A tensor of one dtype and shape; -1 in `shape` is any size.
inline Tensor tensor(nb::handle h, const char* name, int dtype, std::initializer_list<int64_t> shape) {
    Tensor t = any_tensor(h, name);
    bool same = t.dims == (int)shape.size();
    int i = 0;
    for (int64_t n : shape) same = same && (n < 0 || n == t.shape[i]), i++;
    if (t.dtype != dtype || !same) {
        Tensor want{};
        want.dims = 0;
        for (int64_t n : shape) want.shape[want.dims++] = n;
        fail(std::string(name) + ": expected " + DTYPES[dtype].name + " " + shape_text(want) + ", got " + DTYPES[t.dtype].name + " " +
             shape_text(t));
    }
    return t;
}

inline Format format_of(const std::string& name) {
    for (int i = 0; i < (int)Format::COUNT; i++)
        if (name == FORMATS[i].name) return (Format)i;
    fail("weight type " + name + " has no kernel");
}

inline Matrix matrix_of(const Tensor& t, const char* name, const std::string& type, int64_t cols) {
    Matrix m{};
    if (type.empty()) {
        if (t.dtype > BF16) fail(std::string(name) + ": " + DTYPES[t.dtype].name + " weights need a block type");
        m.format = t.dtype == F32 ? Format::F32 : t.dtype == F16 ? Format::F16 : Format::BF16;
    } else {
        m.format = format_of(type);
        if (t.dtype != U8) fail(std::string(name) + ": blocks of " + type + " must be uint8");
    }
    m.data = t.data, m.rows = t.shape[t.dims - 2], m.cols = cols;
    if (cols <= 0 || cols % info(m.format).elements)
        fail(std::string(name) + ": " + std::to_string(cols) + " columns are no multiple of a " + info(m.format).name + " block");
    m.stride = row_bytes(m.format, cols);
    if (t.shape[t.dims - 1] * DTYPES[t.dtype].size != m.stride)
        fail(std::string(name) + ": rows of " + shape_text(t) + " do not hold " + std::to_string(cols) + " columns");
    return m;
}

// A weight [..., rows, cols]: a float tensor when `type` is empty, else uint8 blocks [..., rows, row_bytes] of a ggml type.
inline Matrix matrix(nb::handle h, const char* name, const std::string& type, int dims, int64_t cols, int64_t* lead = nullptr) {
    const Tensor t = any_tensor(h, name);
    if (t.dims != dims) fail(std::string(name) + ": expected " + std::to_string(dims) + " dimensions, got " + shape_text(t));
    if (lead) *lead = t.shape[0];
    return matrix_of(t, name, type, cols);
}

// Weights [experts, rows, cols], or gate_up as [experts, 2, rows / 2, cols]. Experts and halves may lie apart, as in a mapped file.
inline Experts experts_of(nb::handle h, const char* name, const std::string& type, int64_t cols, int64_t& count) {
    int64_t strides[5];
    const Tensor t = any_tensor(h, name, strides);
    const bool halves = t.dims == 4 && t.shape[1] == 2;
    if (t.dims != 3 && !halves) fail(std::string(name) + ": expected 3 dimensions, got " + shape_text(t));
    Experts all{};
    all.one = matrix_of(t, name, type, cols);
    const int64_t size = DTYPES[t.dtype].size, half = halves ? all.one.rows * all.one.stride : all.one.rows / 2 * all.one.stride;
    count = t.shape[0], all.stride = strides[0] * size, all.half = halves ? strides[1] * size : half;
    if (halves) all.one.rows *= 2;
    const bool rows = strides[t.dims - 1] == 1 && (t.shape[t.dims - 2] < 2 || strides[t.dims - 2] == t.shape[t.dims - 1]);
    const bool whole = count < 2 || all.stride >= (halves ? half : all.one.rows * all.one.stride);
    if (t.size() && (!rows || !whole || all.half < half)) fail(std::string(name) + ": the rows of an expert are not contiguous");
    return all;
}

inline int act_of(const std::string& act) {
    if (act == "silu") return 0;
    if (act == "gelu_tanh") return 1;
    if (act == "sigmoid") return 2;
    fail("activation " + act + " has no kernel");
}

inline void in_range(const Tensor& t, int64_t limit) {
    for (int64_t i = 0; i < t.size(); i++)
        if (t.i()[i] < 0 || t.i()[i] >= limit)
            fail(std::string(t.name) + ": " + std::to_string(t.i()[i]) + " is not in 0.." + std::to_string(limit - 1));
}

// Rows of sequence s are cu[s]..cu[s+1]; they must tile [0, rows).
inline void check_segments(const Tensor& cu, int64_t rows) {
    const int64_t n = cu.shape[0] - 1;
    if (n < 0 || cu.i()[0] != 0 || cu.i()[n] != rows) fail("cu: must run from 0 to the number of rows, " + std::to_string(rows));
    for (int64_t s = 0; s < n; s++)
        if (cu.i()[s] > cu.i()[s + 1]) fail("cu: must not fall");
}

// Of every sequence: how many of its rows, and the slot that gets the state after them (-1: none). Null where nothing is kept.
inline const int32_t* kept_slots(nb::handle kept_, const Tensor& cu, int64_t slots) {
    if (kept_.is_none()) return nullptr;
    const Tensor kept = tensor(kept_, "kept", I32, {cu.shape[0] - 1, 2});
    for (int64_t i = 0; i < kept.shape[0]; i++) {
        const int32_t rows = kept.i()[2 * i], slot = kept.i()[2 * i + 1];
        if (slot < -1 || slot >= slots) fail("kept: no such slot");
        if (slot >= 0 && (rows < 0 || rows >= cu.i()[i + 1] - cu.i()[i])) fail("kept: the sequence has no rows behind its kept state");
    }
    return kept.i();
}

inline void check_pages(const Tensor& cu, const Tensor& start, const Tensor& pages, int64_t held, int window) {
    for (int64_t s = 0; s < start.shape[0]; s++) {
        const int64_t from = start.i()[s], len = cu.i()[s + 1] - cu.i()[s], width = pages.shape[1];
        if (!len) continue;
        if (from < 0 || (from + len + PAGE - 1) / PAGE > width) fail("pages: the table of sequence " + std::to_string(s) + " is too short");
        const int64_t oldest = window && from + 1 > window ? from + 1 - window : 0;
        for (int64_t p = oldest / PAGE; p * PAGE < from + len; p++) {
            const int32_t page = pages.i()[s * width + p];
            if (page < 0 || page >= held)
                fail("pages: sequence " + std::to_string(s) + " names page " + std::to_string(page) + " of " + std::to_string(held));
        }
    }
}

inline void check_route(int64_t experts, int64_t k, int groups, int top_groups, int group_best) {
    if (groups < 1 || groups > MAX_GROUPS || experts % groups || (groups > 1 && experts < 2 * groups))
        fail("groups: must divide the experts into groups of two or more, at most " + std::to_string(MAX_GROUPS));
    if (top_groups < 1 || top_groups > groups) fail("top_groups: must be in 1.." + std::to_string(groups));
    if (group_best < 1 || group_best > 2) fail("group_best: must be 1 or 2");
    if (k > experts / groups * top_groups) fail("ids: more experts wanted than there are");
}

using release = nb::gil_scoped_release;
using H = nb::handle;

// the other parts of the door, each in module_NAME.cpp
void bind_attention(nb::class_<Ops>& ops);
void bind_chain(nb::module_& m, nb::class_<Ops>& ops);
void bind_halves(nb::module_& m, nb::class_<Ops>& ops);
void bind_sampling(nb::module_& m);
void bind_reader(nb::module_& m, nb::class_<Ops>& ops);
