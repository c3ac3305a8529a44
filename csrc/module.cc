// The Python module: arguments in, the GIL released, nothing else.
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdlib>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include "dispatch.h"
#include "engine.h"

namespace py = pybind11;

namespace pyrlstats {
namespace {

constexpr const char* kAccumulateDoc =
    R"(Add a batch of tokens to a state, in place. Pointers are trusted: pyrlstats.backends.cpp calls this.

An operand is (address, dtype code, strides or None for C order); every operand has the shape `shape`.

Args:
    state: address of the int64 buffer of a State of `slices` slices.
    slices: number of slices.
    layout: (mantissa_bits, min_exp, max_exp).
    clip: bounds on x, as layout.clip_thresholds gives them.
    shape: of every operand.
    byte_strides: strides are in bytes (NumPy), not in elements (torch).
    logp, old_logp: operands.
    masks: one operand per slice, or None.
    slice_ids, base_mask: operand or None.
    num_threads: at most so many threads.
    isa: name of an instruction set; "" for the best usable one, or PYRLSTATS_ISA's.

Raises:
    ValueError: an unknown or unusable instruction set.)";

int64_t to_int(py::handle value) {
  const long long v = PyLong_AsLongLong(value.ptr());
  if (v == -1 && PyErr_Occurred()) throw py::error_already_set();
  return v;
}

std::vector<int64_t> to_ints(py::handle sequence) {
  const auto tuple = py::reinterpret_borrow<py::tuple>(sequence);
  std::vector<int64_t> values(tuple.size());
  for (size_t i = 0; i < values.size(); ++i) values[i] = to_int(tuple[i]);
  return values;
}

// Operands of one call, and the memory of their shapes.
class Operands {
 public:
  Operands(const std::vector<int64_t>& shape, bool byte_strides, size_t capacity)
      : shape_(shape), byte_strides_(byte_strides), order_(shape.size()) {
    std::iota(order_.begin(), order_.end(), size_t{0});
    memory_.reserve(capacity * 2 * (shape.size() + 1));  // operands point into it: it never grows
  }

  // From now on dimensions are walked in the order in which these two lie in memory, outermost
  // first: a transposed batch is read line by line too. For what does not depend on the tokens'
  // order.
  void walk_as_they_lie(py::handle first, py::handle second) {
    if (strides_are_c(first) && strides_are_c(second)) return;
    const std::vector<int64_t> a = strides_of(first), b = strides_of(second);
    const auto outwards = [&](size_t d) {
      const int64_t sum = std::abs(a[d]) + std::abs(b[d]);
      return sum == 0 ? INT64_MAX : sum;  // one element for all of it: nothing to walk along
    };
    std::stable_sort(order_.begin(), order_.end(),
                     [&](size_t d, size_t e) { return outwards(d) > outwards(e); });
  }

  Operand make(py::handle value) {
    const auto tuple = py::reinterpret_borrow<py::tuple>(value);
    const auto address = (uintptr_t)PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(tuple.ptr(), 0));
    if (PyErr_Occurred()) throw py::error_already_set();
    Operand op{(const char*)address, (int)to_int(PyTuple_GET_ITEM(tuple.ptr(), 1)), 0, nullptr,
               nullptr};
    const std::vector<int64_t> strides = strides_of(value);
    // Dimensions of one element vanish, and two that can be walked as one become one.
    std::vector<int64_t> dims, steps;
    for (size_t d : order_) {
      if (shape_[d] == 1) continue;
      if (!dims.empty() && steps.back() == strides[d] * shape_[d]) {
        dims.back() *= shape_[d];
        steps.back() = strides[d];
      } else {
        dims.push_back(shape_[d]);
        steps.push_back(strides[d]);
      }
    }
    op.ndim = (int)dims.size();
    op.shape = memory_.data() + memory_.size();
    memory_.insert(memory_.end(), dims.begin(), dims.end());
    op.strides = memory_.data() + memory_.size();
    memory_.insert(memory_.end(), steps.begin(), steps.end());
    return op;
  }

 private:
  static bool strides_are_c(py::handle value) {
    return PyTuple_GET_ITEM(value.ptr(), 2) == Py_None;
  }

  // In bytes.
  std::vector<int64_t> strides_of(py::handle value) const {
    const int dtype = (int)to_int(PyTuple_GET_ITEM(value.ptr(), 1));
    if (dtype < 0 || dtype >= kDtypes) throw std::invalid_argument("unknown dtype code");
    const int64_t size = kItemSize[dtype];
    if (strides_are_c(value)) {
      std::vector<int64_t> strides(shape_.size());
      int64_t stride = size;
      for (size_t d = shape_.size(); d-- > 0; stride *= shape_[d]) strides[d] = stride;
      return strides;
    }
    std::vector<int64_t> strides = to_ints(PyTuple_GET_ITEM(value.ptr(), 2));
    if (strides.size() != shape_.size())
      throw std::invalid_argument("strides must have shape's length");
    if (!byte_strides_) {
      for (int64_t& stride : strides) stride *= size;
    }
    return strides;
  }

  const std::vector<int64_t>& shape_;
  bool byte_strides_;
  std::vector<size_t> order_;  // of the dimensions, outermost first
  std::vector<int64_t> memory_;
};

// A batch as the caller has it; the plan points into it.
class Batch {
 public:
  Batch(const py::tuple& shape, bool byte_strides, const py::tuple& logp, const py::tuple& old_logp,
        const py::object& masks, const py::object& slice_ids, const py::object& base_mask,
        int64_t slices, bool in_order = false)
      : sizes_(to_ints(shape)),
        operands_(sizes_, byte_strides, (masks.is_none() ? 0 : py::len(masks)) + 5) {
    count_ = 1;
    for (int64_t size : sizes_) count_ *= size;
    if (!in_order) operands_.walk_as_they_lie(logp, old_logp);
    plan_.logp = operands_.make(logp);
    plan_.old_logp = operands_.make(old_logp);
    if (plan_.logp.dtype > kFloat64 || plan_.old_logp.dtype > kFloat64) {
      throw std::invalid_argument("logp and old_logp must have a float dtype code");
    }
    if (!masks.is_none()) {
      const size_t n_masks = py::len(masks);
      if ((int64_t)n_masks != slices) throw std::invalid_argument("one mask per slice is needed");
      masks_.reserve(n_masks);
      for (py::handle mask : masks) masks_.push_back(operands_.make(mask));
      plan_.masks = masks_.data();
    }
    if (!slice_ids.is_none()) {
      ids_ = operands_.make(slice_ids);
      if (ids_.dtype <= kFloat64)
        throw std::invalid_argument("slice_ids must have an integer dtype code");
      plan_.ids = &ids_;
    }
    if (!base_mask.is_none()) {
      base_ = operands_.make(base_mask);
      plan_.base = &base_;
    }
    plan_.slices = slices;
    if (plan_.masks && plan_.ids)
      throw std::invalid_argument("masks and slice_ids exclude each other");
    if (!plan_.masks && !plan_.ids && slices != 1)
      throw std::invalid_argument("no masks: one slice");
  }
  Batch(const Batch&) = delete;
  Batch& operator=(const Batch&) = delete;

  Plan& plan() { return plan_; }
  Operand one_more(py::handle value) { return operands_.make(value); }
  int64_t count() const { return count_; }

 private:
  const std::vector<int64_t> sizes_;
  Operands operands_;
  std::vector<Operand> masks_;
  Operand ids_, base_;
  Plan plan_{};
  int64_t count_;
};

void accumulate_py(uintptr_t state, int64_t slices, const py::tuple& layout, const py::tuple& clip,
                   const py::tuple& shape, bool byte_strides, const py::tuple& logp,
                   const py::tuple& old_logp, const py::object& masks, const py::object& slice_ids,
                   const py::object& base_mask, int num_threads, const std::string& isa) {
  const Isa& chosen = choose_isa(isa);
  Batch batch(shape, byte_strides, logp, old_logp, masks, slice_ids, base_mask, slices);
  Plan& plan = batch.plan();
  plan.mantissa_bits = (int)to_int(layout[0]);
  plan.min_exp = (int)to_int(layout[1]);
  plan.max_exp = (int)to_int(layout[2]);
  plan.clip_low = (float)PyFloat_AsDouble(PyTuple_GET_ITEM(clip.ptr(), 0));
  plan.clip_high = (float)PyFloat_AsDouble(PyTuple_GET_ITEM(clip.ptr(), 1));
  if (PyErr_Occurred()) throw py::error_already_set();
  const py::gil_scoped_release release;
  accumulate(chosen, plan, batch.count(), num_threads < 1 ? 1 : num_threads, (int64_t*)state);
}

constexpr const char* kCountDigitsDoc =
    R"(Count tokens by a digit of their key inside intervals, for exact quantiles. Operands as for `accumulate`.

The key of x orders as x: its bits as an integer, negated for x < 0, 0 for a zero of either sign; with `absolute`, that
of abs(x).

Args:
    counts: address of int64 [len(intervals), DIGITS], added to.
    intervals: (slice, low, width, shift) each: tokens of the slice with key in [low, low + width), counted at
        (key - low) >> shift, which must be below DIGITS. Width 0 is skipped.
    absolute: keys of abs(x).)";

void count_digits_py(uintptr_t counts, const py::list& intervals, bool absolute, int64_t slices,
                     const py::tuple& shape, bool byte_strides, const py::tuple& logp,
                     const py::tuple& old_logp, const py::object& masks,
                     const py::object& slice_ids, const py::object& base_mask, int num_threads,
                     const std::string& isa) {
  const Isa& chosen = choose_isa(isa);
  Batch batch(shape, byte_strides, logp, old_logp, masks, slice_ids, base_mask, slices);
  std::vector<Interval> wanted;
  for (py::handle one : intervals) {
    const std::vector<int64_t> v = to_ints(one);
    if (v.size() != 4 || v[0] < 0 || v[0] >= slices || v[2] < 0 || v[2] > INT32_MAX || v[3] < 0 ||
        v[3] > 31 || (v[2] > 0 && (v[2] - 1) >> v[3] >= kDigits) || v[1] < -(int64_t)INT32_MAX ||
        v[1] + v[2] > (int64_t)INT32_MAX + 1) {
      throw std::invalid_argument("an interval must be (slice, low, width, shift) within bounds");
    }
    wanted.push_back({v[0], (int32_t)v[1], (int32_t)v[2], (int)v[3]});
  }
  const Digits digits{wanted.data(), (int64_t)wanted.size(), absolute};
  const py::gil_scoped_release release;
  count_digits(chosen, batch.plan(), digits, batch.count(), num_threads < 1 ? 1 : num_threads,
               (int64_t*)counts);
}

constexpr const char* kAccumulateGroupsDoc =
    R"(Fill the empty sections of the groups beside the core from a batch. Operands as for `accumulate`.

Args:
    sections: addresses of the sections entropy, probabilities, truncation and policy_clip; 0 for those not asked for.
    truncate: bounds on x.
    clip: bounds on x: low, high, dual.
    advantages: operand or None.
    updates: address of float32 [tokens] for exp(x) A, or 0.
    boundaries: address of int64 [sequences + 1], ascending from 0 to the number of tokens, or 0.
    sequences: their number.
    sums: address of float64 [4, slices, sequences], zeros: tokens, x, logp, old_logp.)";

void accumulate_groups_py(const py::tuple& sections, const py::tuple& truncate,
                          const py::tuple& clip, const py::object& advantages, uintptr_t updates,
                          uintptr_t boundaries, int64_t sequences, uintptr_t sums, int64_t slices,
                          const py::tuple& shape, bool byte_strides, const py::tuple& logp,
                          const py::tuple& old_logp, const py::object& masks,
                          const py::object& slice_ids, const py::object& base_mask, int num_threads,
                          const std::string& isa) {
  const Isa& chosen = choose_isa(isa);
  Batch batch(shape, byte_strides, logp, old_logp, masks, slice_ids, base_mask, slices, true);
  const std::vector<int64_t> addresses = to_ints(sections);
  if (addresses.size() != 4) throw std::invalid_argument("sections must be four addresses");
  const GroupSections where{(int64_t*)addresses[0], (int64_t*)addresses[1], (int64_t*)addresses[2],
                            (int64_t*)addresses[3]};
  GroupPlan groups{};
  groups.entropy = where.entropy;
  groups.probabilities = where.probabilities;
  groups.truncation = where.truncation;
  groups.policy_clip = where.policy_clip;
  groups.truncate_low = truncate[0].cast<double>();
  groups.truncate_high = truncate[1].cast<double>();
  groups.clip_low = clip[0].cast<double>();
  groups.clip_high = clip[1].cast<double>();
  groups.clip_dual = clip[2].cast<double>();
  Operand weights;
  if (!advantages.is_none()) {
    weights = batch.one_more(advantages);
    if (weights.dtype > kFloat64) throw std::invalid_argument("advantages must have a float dtype");
    groups.advantages = &weights;
  }
  if (!groups.advantages && (updates || groups.policy_clip)) {
    throw std::invalid_argument("updates and policy_clip need advantages");
  }
  groups.updates = (float*)updates;
  groups.boundaries = (const int64_t*)boundaries;
  groups.sequences = sequences;
  groups.sums = (double*)sums;
  for (int64_t i = 0; i < sequences; ++i) {
    if (groups.boundaries[i] < 0 || groups.boundaries[i] > groups.boundaries[i + 1] ||
        groups.boundaries[i + 1] > batch.count()) {
      throw std::invalid_argument("boundaries must ascend from 0 to the number of tokens");
    }
  }
  const py::gil_scoped_release release;
  accumulate_groups(chosen, batch.plan(), groups, where, batch.count(),
                    num_threads < 1 ? 1 : num_threads);
}

py::dict build_config() {
  py::dict built;
  py::list usable;
  for (const Isa& isa : instruction_sets()) {
    built[isa.name] = isa.flags;
    if (isa.usable()) usable.append(isa.name);
  }
  py::dict config;
  config["version"] = PYRLSTATS_VERSION;
  config["compiler"] = PYRLSTATS_COMPILER;
  config["flags"] = PYRLSTATS_FLAGS;
  config["instruction_sets"] = built;
  config["usable"] = usable;
  return config;
}

}  // namespace

PYBIND11_MODULE(_core, m, py::mod_gil_not_used()) {
  m.doc() = "The compiled CPU engine of pyrlstats.";
  m.def("accumulate", &accumulate_py, kAccumulateDoc, py::arg("state"), py::arg("slices"),
        py::arg("layout"), py::arg("clip"), py::arg("shape"), py::arg("byte_strides"),
        py::arg("logp"), py::arg("old_logp"), py::arg("masks"), py::arg("slice_ids"),
        py::arg("base_mask"), py::arg("num_threads"), py::arg("isa") = "");
  m.def("count_digits", &count_digits_py, kCountDigitsDoc, py::arg("counts"), py::arg("intervals"),
        py::arg("absolute"), py::arg("slices"), py::arg("shape"), py::arg("byte_strides"),
        py::arg("logp"), py::arg("old_logp"), py::arg("masks"), py::arg("slice_ids"),
        py::arg("base_mask"), py::arg("num_threads"), py::arg("isa") = "");
  m.attr("DIGITS") = kDigits;
  m.def("accumulate_groups", &accumulate_groups_py, kAccumulateGroupsDoc, py::arg("sections"),
        py::arg("truncate"), py::arg("clip"), py::arg("advantages"), py::arg("updates"),
        py::arg("boundaries"), py::arg("sequences"), py::arg("sums"), py::arg("slices"),
        py::arg("shape"), py::arg("byte_strides"), py::arg("logp"), py::arg("old_logp"),
        py::arg("masks"), py::arg("slice_ids"), py::arg("base_mask"), py::arg("num_threads"),
        py::arg("isa") = "");
  m.def("build_config", &build_config,
        "Version, compiler, flags, instruction sets built (name -> flags) and usable here, best "
        "first.");
  m.attr("STATE_VERSION") = layout::kStateVersion;
  py::dict codes;
  const char* names[kDtypes] = {"float32", "bfloat16", "float16", "float64", "bool",
                                "int8",    "uint8",    "int16",   "uint16",  "int32",
                                "uint32",  "int64",    "uint64"};
  for (int i = 0; i < kDtypes; ++i) codes[names[i]] = i;
  m.attr("DTYPES") = codes;
}

}  // namespace pyrlstats
