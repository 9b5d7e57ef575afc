#include "ops/constraints.h"

#include <algorithm>
#include <limits>
#include <memory>
#include <sstream>

#include "device/failure.h"
#include "ops/parameters.h"
#include "ops/passed_calls.h"
#include "ops/refusal_log.h"

namespace vnpu::ops {
namespace {

constexpr int64_t kNoMost = std::numeric_limits<int64_t>::max();

struct Entry {
  std::string name;  // with "aclnn"
  Workspace workspace;
  std::shared_ptr<const std::vector<Row>> rows;
  unsigned chips;
};

std::vector<Entry>& entries() {
  static auto* const all = new std::vector<Entry>();
  return *all;
}

unsigned chip_of(const std::string& soc) {
  if (soc.rfind("Ascend910_93", 0) == 0) return kA3;
  if (soc.rfind("Ascend910B", 0) == 0) return kA2;
  if (soc.rfind("Ascend310P", 0) == 0) return k310P;
  return 0;
}

const char* text_of(CannRelease release) {
  switch (release) {
    case CannRelease::k8_3: return "8.3";
    case CannRelease::k8_5: return "8.5";
    case CannRelease::k9_0: return "9.0";
  }
  return "";
}

std::string chips_text(unsigned chips) {
  std::string text;
  for (const auto& [chip, name] :
       {std::pair{kA2, "A2"}, std::pair{kA3, "A3"}, std::pair{k310P, "310P"}}) {
    if ((chips & chip) != 0) text += (text.empty() ? "" : ", ") + std::string(name);
  }
  return text;
}

template <class List, class Text>
std::string listed(const List& list, Text text, const char* last = " or ") {
  std::string result;
  for (size_t i = 0; i < list.size(); ++i) {
    if (i > 0) result += i + 1 == list.size() ? last : ", ";
    result += text(list[i]);
  }
  return result;
}

std::string digits(int64_t value) { return std::to_string(value); }

// What rules see of a call: what PassedCalls compares, and not where tensors lie.
class SeenArguments {
 public:
  SeenArguments(const ArgumentValue* arguments, size_t count)
      : values_(arguments, arguments + count) {
    size_t num_views = 0;
    for (const ArgumentValue& value : values_) {
      if (value.kind == ArgumentValue::Kind::kTensor) ++num_views;
      if (value.kind == ArgumentValue::Kind::kTensors) num_views += value.tensors.count;
    }
    views_.reserve(num_views);  // values point into it
    for (ArgumentValue& value : values_) {
      if (value.kind == ArgumentValue::Kind::kTensor) {
        value.tensor = &add(*value.tensor);
      } else if (value.kind == ArgumentValue::Kind::kTensors) {
        const TensorView* const first = views_.data() + views_.size();
        for (size_t i = 0; i < value.tensors.count; ++i) add(value.tensors[i]);
        value.tensors.first = reinterpret_cast<const char*>(first);
        value.tensors.distance = sizeof(TensorView);
      }
    }
  }
  const ArgumentValue* values() const { return values_.data(); }

 private:
  const TensorView& add(const TensorView& view) {
    TensorView seen;
    seen.dims = view.dims;
    seen.dtype = view.dtype;
    seen.format = view.format;
    std::copy_n(view.sizes, view.dims, seen.sizes);
    std::copy_n(view.strides, view.dims, seen.strides);
    return views_.emplace_back(seen);
  }

  std::vector<ArgumentValue> values_;
  std::vector<TensorView> views_;
};

}  // namespace

// --- one operator's rows, ready to be checked
// -----------------------------------------------------

class Constraints {
 public:
  struct Bound {
    const Row* row;
    std::vector<int> positions;  // of the argument and the names
  };

  Constraints(const Entry& entry, const char* parameters) : entry_(entry) {
    const Configuration& configuration = Configuration::instance();
    const unsigned chip = chip_of(configuration.soc_name);
    if (!configuration.is_reference && chip != 0 && (entry.chips & chip) == 0) {
      missing_on_ = configuration.soc_name;
    }
    const std::vector<std::string> names = parameter_names(parameters);
    for (const Row& row : *entry.rows) {
      const bool applies = (row.scope.chips == 0 || (row.scope.chips & chip) != 0) &&
                           configuration.cann >= row.scope.since &&
                           configuration.cann <= row.scope.until &&
                           !(row.check.is_limit && configuration.is_reference);
      if (!applies) continue;
      Bound bound{&row, {}};
      bound.positions.push_back(position_of(names, row.argument));
      for (const char* const name : row.check.names) {
        bound.positions.push_back(position_of(names, name));
      }
      bound_.push_back(std::move(bound));
    }
    count_ = names.size();
    passed_.emplace(counting_positions());
  }

  uint64_t check(const ArgumentValue* arguments) const {
    if (const auto bytes = passed_->find(arguments)) return *bytes;
    const SeenArguments seen(arguments, count_);
    hold(seen.values());
    const uint64_t bytes = workspace_bytes(seen.values());
    passed_->remember(arguments, bytes);
    return bytes;
  }

 private:
  // Of the arguments that rules, or the size of the workspace, depend on.
  std::vector<int> counting_positions() const {
    std::vector<bool> counts(count_, entry_.workspace.copies);
    for (const Bound& bound : bound_) {
      for (const int position : bound.positions) counts[static_cast<size_t>(position)] = true;
    }
    std::vector<int> positions;
    for (size_t i = 0; i < count_; ++i) {
      if (counts[i]) positions.push_back(static_cast<int>(i));
    }
    return positions;
  }

  void hold(const ArgumentValue* arguments) const {
    if (!missing_on_.empty()) {
      throw Failure(FailureKind::kTilingRefused, entry_.name + ": " + missing_on_ +
                                                     " has no such operator; " +
                                                     chips_text(entry_.chips) + " have it.");
    }
    for (const Bound& bound : bound_) {
      const RuleArguments own(arguments, bound.positions.data());
      if (!bound.row->check.sees_absence) {
        bool complete = true;
        for (size_t i = 0; complete && i < bound.positions.size(); ++i) complete = own.has(i);
        if (!complete) continue;
      }
      if (const Found found = bound.row->check.find(own)) refuse(bound, *found);
    }
  }

  uint64_t workspace_bytes(const ArgumentValue* arguments) const {
    uint64_t bytes = entry_.workspace.bytes;
    if (entry_.workspace.copies) {
      for (size_t i = 0; i < count_; ++i) {
        if (arguments[i].kind != ArgumentValue::Kind::kTensor) continue;
        const TensorView& view = *arguments[i].tensor;
        if (!is_contiguous(view)) {
          bytes += static_cast<uint64_t>(view.numel()) * at::elementSize(view.dtype);
        }
      }
    }
    return bytes;
  }

  int position_of(const std::vector<std::string>& names, const char* name) const {
    const auto found = std::find(names.begin(), names.end(), plain_name(name));
    if (found == names.end()) {
      throw Failure(FailureKind::kInternal, "vnpu: a constraint of " + entry_.name +
                                                " names an argument '" + name +
                                                "' that its row in ops/ does not have.");
    }
    return static_cast<int>(found - names.begin());
  }

  [[noreturn]] void refuse(const Bound& bound, const std::string& found) const {
    const Configuration& configuration = Configuration::instance();
    const Row& row = *bound.row;
    throw Failure(row.scope.tiling ? FailureKind::kTilingRefused : FailureKind::kOperatorInvalid,
                  entry_.name + ": " + row.argument + " (argument " +
                      std::to_string(bound.positions[0] + 1) + ") has " + found + ", but must " +
                      row.check.text + " on " + (configuration.is_reference ? "reference:" : "") +
                      configuration.soc_name + " with CANN " + text_of(configuration.cann) +
                      ". Source: " + row.source + ".");
  }

  const Entry& entry_;
  std::vector<Bound> bound_;
  std::string missing_on_;
  size_t count_ = 0;
  mutable std::optional<PassedCalls> passed_;
};

const Constraints* constraints_of(const char* name, const char* parameters) {
  if (!Configuration::instance().strict) return nullptr;
  for (const Entry& entry : entries()) {
    if (entry.name == name) return new Constraints(entry, parameters);  // as long as the process
  }
  return nullptr;
}

uint64_t check(const Constraints& constraints, const ArgumentValue* arguments) {
  if (RefusalLog* const log = RefusalLog::instance()) log->add_call();
  return constraints.check(arguments);
}

bool constrain(std::initializer_list<const char*> names, Workspace workspace, std::vector<Row> rows,
               unsigned chips) {
  const auto shared = std::make_shared<const std::vector<Row>>(std::move(rows));
  for (const char* const name : names) {
    entries().push_back({std::string("aclnn") + name, workspace, shared, chips});
  }
  return true;
}

std::string listed_constraints() {
  std::ostringstream out;
  const auto quoted = [](const std::string& text) {
    std::string result = "\"";
    for (const char c : text) {
      if (c == '"' || c == '\\') result += '\\';
      result += c;
    }
    return result + "\"";
  };
  for (const Entry& entry : entries()) {
    for (const Row& row : *entry.rows) {
      out << "{\"operator\": " << quoted(entry.name) << ", \"argument\": " << quoted(row.argument)
          << ", \"rule\": " << quoted(row.check.text) << ", \"source\": " << quoted(row.source)
          << ", \"chips\": "
          << quoted(chips_text(row.scope.chips == 0 ? entry.chips : row.scope.chips))
          << ", \"since\": " << quoted(text_of(row.scope.since))
          << ", \"until\": " << quoted(text_of(row.scope.until))
          << ", \"status\": " << (row.scope.tiling ? 561002 : 161002)
          << ", \"limit\": " << (row.check.is_limit ? "true" : "false") << "}\n";
    }
  }
  return out.str();
}

// --- values --------------------------------------------------------------------------------------

const TensorView& RuleArguments::tensor(size_t index) const {
  const ArgumentValue& value = (*this)[index];
  // The rules of a list hold for each of its tensors; those that compare look at the first.
  return value.kind == ArgumentValue::Kind::kTensors ? value.tensors[0] : *value.tensor;
}

int64_t RuleArguments::count(size_t index) const {
  const ArgumentValue& value = (*this)[index];
  return value.kind == ArgumentValue::Kind::kScalars ? static_cast<int64_t>(value.scalars->size())
                                                     : value.tensors.count;
}

bool RuleArguments::has(size_t index) const {
  const ArgumentValue& value = (*this)[index];
  switch (value.kind) {
    case ArgumentValue::Kind::kAbsent: return false;
    case ArgumentValue::Kind::kTensors: return value.tensors.count > 0;
    default: return true;
  }
}

std::string name_of(ScalarType type) {
  switch (type) {
    case at::kFloat: return "float32";
    case at::kHalf: return "float16";
    case at::kBFloat16: return "bfloat16";
    case at::kDouble: return "float64";
    case at::kChar: return "int8";
    case at::kByte: return "uint8";
    case at::kShort: return "int16";
    case at::kInt: return "int32";
    case at::kLong: return "int64";
    case at::kUInt16: return "uint16";
    case at::kUInt32: return "uint32";
    case at::kUInt64: return "uint64";
    case at::kComplexFloat: return "complex64";
    case at::kComplexDouble: return "complex128";
    case at::kBool: return "bool";
    case at::ScalarType::QUInt4x2: return "int4";
    default: return c10::toString(type);
  }
}

std::string sizes_of(const TensorView& view) {
  std::vector<int64_t> sizes(view.sizes, view.sizes + view.dims);
  return "[" + listed(sizes, digits, ", ") + "]";
}

int64_t size_of(const TensorView& view, int dimension) {
  const int index = dimension < 0 ? view.dims + dimension : dimension;
  return index >= 0 && index < view.dims ? view.sizes[index] : 1;
}

namespace {

bool dense_from(const TensorView& view, int first) {
  int64_t step = 1;
  for (int i = view.dims - 1; i >= first; --i) {
    if (view.sizes[i] != 1 && view.strides[i] != step) return false;
    step *= view.sizes[i];
  }
  return true;
}

std::string strides_of(const TensorView& view) {
  std::vector<int64_t> strides(view.strides, view.strides + view.dims);
  return "strides [" + listed(strides, digits, ", ") + "] for sizes " + sizes_of(view);
}

bool given(const RuleArguments& own, size_t index) {
  if (!own.has(index)) return false;
  const ArgumentValue& value = own[index];
  if (value.kind == ArgumentValue::Kind::kTensor) return value.tensor->numel() > 0;
  if (value.kind != ArgumentValue::Kind::kTensors) return true;
  for (size_t i = 0; i < value.tensors.count; ++i) {
    if (value.tensors[i].numel() > 0) return true;
  }
  return false;
}

// Of each tensor of the argument.
template <class Find>
Found in_each(const RuleArguments& arguments, Find find) {
  const ArgumentValue& value = arguments[0];
  if (value.kind == ArgumentValue::Kind::kTensor) return find(*value.tensor);
  for (size_t i = 0; i < value.tensors.count; ++i) {
    if (Found found = find(value.tensors[i])) return found;
  }
  return std::nullopt;
}

std::string dimension_text(int dimension) {
  return dimension == -1 ? "last dimension"
         : dimension < 0 ? "dimension " + std::to_string(dimension)
                         : "dimension " + std::to_string(dimension);
}

std::string multiple_text(int64_t multiple) {
  return multiple == 1 ? "" : " and a multiple of " + std::to_string(multiple);
}

}  // namespace

bool is_contiguous(const TensorView& view) { return view.numel() == 0 || dense_from(view, 0); }

// --- rules ---------------------------------------------------------------------------------------

Check Check::when(Condition condition) && {
  const size_t own = names.size() + 1;
  const size_t condition_names = condition.names.size();
  names.insert(names.end(), condition.names.begin(), condition.names.end());
  text += " when " + condition.text;
  // The condition's arguments may be null, which it then says itself; the rule's own may not.
  const bool sees = sees_absence;
  sees_absence = true;
  find = [own, condition_names, sees, holds = std::move(condition.holds),
          find = std::move(find)](const RuleArguments& arguments) -> Found {
    if (!sees) {
      for (size_t i = 0; i < own; ++i) {
        if (!arguments.has(i)) return std::nullopt;
      }
    }
    (void)condition_names;
    return holds(arguments.after(own)) ? find(arguments) : std::nullopt;
  };
  return std::move(*this);
}

Check dtype(std::vector<ScalarType> allowed) {
  std::string text = "be " + listed(allowed, name_of);
  return {.text = std::move(text),
          .find = [allowed = std::move(allowed)](const RuleArguments& own) -> Found {
            const auto find = [&](ScalarType seen) -> Found {
              for (const ScalarType type : allowed) {
                if (seen == type) return std::nullopt;
              }
              return "dtype " + name_of(seen);
            };
            if (own[0].kind == ArgumentValue::Kind::kScalar) return find(own.scalar().dtype);
            return in_each(own, [&](const TensorView& view) { return find(view.dtype); });
          }};
}

Check same_dtype(const char* other) {
  return fits(std::string("have the dtype of ") + other, {other}, [](const RuleArguments& own) {
    return in_each(own, [&](const TensorView& view) -> Found {
      if (view.dtype == own.tensor(1).dtype) return std::nullopt;
      return "dtype " + name_of(view.dtype) + " beside " + name_of(own.tensor(1).dtype);
    });
  });
}

Check dims(int64_t least, int64_t most) {
  std::string text = "have " + std::to_string(least) +
                     (least == most ? "" : " to " + std::to_string(most)) + " dimensions";
  return fits(std::move(text), {}, [least, most](const RuleArguments& own) {
    return in_each(own, [&](const TensorView& view) -> Found {
      if (view.dims >= least && view.dims <= most) return std::nullopt;
      return "sizes " + sizes_of(view);
    });
  });
}

Check contiguous() {
  return fits("be contiguous", {}, [](const RuleArguments& own) {
    return in_each(own, [](const TensorView& view) -> Found {
      if (is_contiguous(view)) return std::nullopt;
      return strides_of(view);
    });
  });
}

Check contiguous_rows() {
  return fits("be contiguous but for its rows", {}, [](const RuleArguments& own) {
    return in_each(own, [](const TensorView& view) -> Found {
      if (view.numel() == 0 || dense_from(view, 1)) return std::nullopt;
      return strides_of(view);
    });
  });
}

Check contiguous_or_transposed() {
  return fits("be contiguous, or the transpose of the last two dimensions of what is", {},
              [](const RuleArguments& own) {
                return in_each(own, [](const TensorView& view) -> Found {
                  if (is_contiguous(view)) return std::nullopt;
                  TensorView other = view;
                  if (other.dims >= 2) {
                    std::swap(other.sizes[other.dims - 1], other.sizes[other.dims - 2]);
                    std::swap(other.strides[other.dims - 1], other.strides[other.dims - 2]);
                    if (is_contiguous(other)) return std::nullopt;
                  }
                  return strides_of(view);
                });
              });
}

Check not_empty() {
  return that("not be empty", {}, [](const RuleArguments& own) {
    return in_each(own, [](const TensorView& view) -> Found {
      if (view.numel() > 0) return std::nullopt;
      return "sizes " + sizes_of(view);
    });
  });
}

Check absent() {
  Check check = that("be null", {}, [](const RuleArguments& own) -> Found {
    if (!given(own, 0)) return std::nullopt;
    return name_of(own.tensor().dtype) + " of sizes " + sizes_of(own.tensor());
  });
  return check;
}

Check present() {
  Check check = fits("be given", {}, [](const RuleArguments& own) -> Found {
    return given(own, 0) ? Found() : "no value";
  });
  check.sees_absence = true;
  return check;
}

Check size_in(int dimension, std::vector<int64_t> allowed) {
  std::string text =
      "have size " + listed(allowed, digits) + " in its " + dimension_text(dimension);
  return that(std::move(text), {},
              [dimension, allowed = std::move(allowed)](const RuleArguments& own) {
                return in_each(own, [&](const TensorView& view) -> Found {
                  const int64_t size = size_of(view, dimension);
                  if (std::find(allowed.begin(), allowed.end(), size) != allowed.end()) {
                    return std::nullopt;
                  }
                  return "sizes " + sizes_of(view);
                });
              });
}

Check size_between(int dimension, int64_t least, int64_t most, int64_t multiple) {
  std::string text = "have a size of " + std::to_string(least) +
                     (most == kNoMost ? " or more" : " to " + std::to_string(most)) +
                     multiple_text(multiple) + " in its " + dimension_text(dimension);
  return that(std::move(text), {}, [=](const RuleArguments& own) {
    return in_each(own, [&](const TensorView& view) -> Found {
      const int64_t size = size_of(view, dimension);
      if (size >= least && size <= most && size % multiple == 0) return std::nullopt;
      return "sizes " + sizes_of(view);
    });
  });
}

Check same_size(int dimension, const char* other, int other_dimension) {
  return fits("have the size of " + std::string(other) + "'s " + dimension_text(other_dimension) +
                  " in its " + dimension_text(dimension),
              {other}, [=](const RuleArguments& own) {
                const int64_t wanted = size_of(own.tensor(1), other_dimension);
                return in_each(own, [&](const TensorView& view) -> Found {
                  if (size_of(view, dimension) == wanted) return std::nullopt;
                  return "sizes " + sizes_of(view) + " beside " + sizes_of(own.tensor(1));
                });
              });
}

Check same_sizes(const char* other) {
  return fits(std::string("have the sizes of ") + other, {other}, [](const RuleArguments& own) {
    const TensorView& wanted = own.tensor(1);
    return in_each(own, [&](const TensorView& view) -> Found {
      if (view.dims == wanted.dims &&
          std::equal(view.sizes, view.sizes + view.dims, wanted.sizes)) {
        return std::nullopt;
      }
      return "sizes " + sizes_of(view) + " beside " + sizes_of(wanted);
    });
  });
}

Check same_count(const char* other) {
  return fits(std::string("have as many entries as ") + other, {other},
              [](const RuleArguments& own) -> Found {
                if (own.count() == own.count(1)) return std::nullopt;
                return digits(own.count()) + " beside " + digits(own.count(1));
              });
}

Check same_sizes_each(const char* other) {
  return fits(
      std::string("have the sizes of ") + other + ", each", {other},
      [](const RuleArguments& own) -> Found {
        const ViewSpan& seen = own[0].tensors;
        const ViewSpan& wanted = own[1].tensors;
        for (size_t i = 0; i < std::min(seen.count, wanted.count); ++i) {
          const TensorView& one = seen[i];
          const TensorView& two = wanted[i];
          if (one.dims != two.dims || !std::equal(one.sizes, one.sizes + one.dims, two.sizes)) {
            return "sizes " + sizes_of(one) + " beside " + sizes_of(two) + " as number " +
                   digits(static_cast<int64_t>(i));
          }
        }
        return std::nullopt;
      });
}

Check between(int64_t least, int64_t most) {
  return that("be " + std::to_string(least) +
                  (most == kNoMost ? " or more" : " to " + std::to_string(most)),
              {}, [=](const RuleArguments& own) -> Found {
                if (own.integer() >= least && own.integer() <= most) return std::nullopt;
                return "value " + std::to_string(own.integer());
              });
}

Check one_of(std::vector<int64_t> allowed) {
  std::string text = "be " + listed(allowed, digits);
  return that(std::move(text), {},
              [allowed = std::move(allowed)](const RuleArguments& own) -> Found {
                if (std::find(allowed.begin(), allowed.end(), own.integer()) != allowed.end()) {
                  return std::nullopt;
                }
                return "value " + std::to_string(own.integer());
              });
}

Check one_of(std::vector<std::string> allowed) {
  std::string text =
      "be " + listed(allowed, [](const std::string& each) { return "'" + each + "'"; });
  return fits(std::move(text), {},
              [allowed = std::move(allowed)](const RuleArguments& own) -> Found {
                if (std::find(allowed.begin(), allowed.end(), own.text()) != allowed.end()) {
                  return std::nullopt;
                }
                return "value '" + own.text() + "'";
              });
}

Check that(std::string text, std::vector<const char*> names,
           std::function<Found(const RuleArguments&)> find) {
  return {.text = std::move(text), .names = std::move(names), .find = std::move(find)};
}

Check fits(std::string text, std::vector<const char*> names,
           std::function<Found(const RuleArguments&)> find) {
  Check check = that(std::move(text), std::move(names), std::move(find));
  check.is_limit = false;
  return check;
}

// --- conditions
// ------------------------------------------------------------------------------------

Condition is_given(const char* argument) {
  return {std::string(argument) + " is given", {argument}, [](const RuleArguments& own) {
            return given(own, 0);
          }};
}

Condition is_missing(const char* argument) {
  return {std::string(argument) + " is null", {argument}, [](const RuleArguments& own) {
            return !given(own, 0);
          }};
}

Condition equals(const char* argument, std::vector<std::string> texts) {
  return {std::string(argument) + " is " + listed(texts, [](const std::string& t) { return t; }),
          {argument},
          [texts](const RuleArguments& own) {
            return own.has() && std::find(texts.begin(), texts.end(), own.text()) != texts.end();
          }};
}

Condition equals(const char* argument, std::vector<int64_t> numbers) {
  return {std::string(argument) + " is " + listed(numbers, digits),
          {argument},
          [numbers](const RuleArguments& own) {
            return std::find(numbers.begin(), numbers.end(), own.integer()) != numbers.end();
          }};
}

Condition has_dtype(const char* argument, std::vector<ScalarType> dtypes) {
  return {std::string(argument) + " is " + listed(dtypes, name_of),
          {argument},
          [dtypes](const RuleArguments& own) {
            return own.has() &&
                   std::find(dtypes.begin(), dtypes.end(), own.tensor().dtype) != dtypes.end();
          }};
}

Condition both(Condition first, Condition second) {
  const size_t count = first.names.size();
  std::vector<const char*> names = first.names;
  names.insert(names.end(), second.names.begin(), second.names.end());
  return {first.text + " and " + second.text, std::move(names),
          [count, one = std::move(first.holds), two = std::move(second.holds)](
              const RuleArguments& own) { return one(own) && two(own.after(count)); }};
}

}  // namespace vnpu::ops
