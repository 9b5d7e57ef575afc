#include "ops/rules.h"

#include <algorithm>
#include <limits>
#include <utility>

namespace vnpu::ops {
namespace {

constexpr int64_t kNoMost = std::numeric_limits<int64_t>::max();

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

std::string in_quotes(const std::string& text) { return '"' + text + '"'; }
std::string quoted_dtype(ScalarType type) { return in_quotes(name_of(type)); }

std::string form_of(const std::string& kind, const std::string& values = "") {
  return "[" + in_quotes(kind) + (values.empty() ? "" : ", ") + values + "]";
}

Check formed(Check check, std::string form) {
  check.form = std::move(form);
  return check;
}

}  // namespace

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
  names.insert(names.end(), condition.names.begin(), condition.names.end());
  text += " when " + condition.text;
  form.clear();
  // The condition's arguments may be null, which it then says itself; the rule's own may not.
  const bool sees = sees_absence;
  sees_absence = true;
  find = [own, sees, holds = std::move(condition.holds),
          find = std::move(find)](const RuleArguments& arguments) -> Found {
    if (!sees) {
      for (size_t i = 0; i < own; ++i) {
        if (!arguments.has(i)) return std::nullopt;
      }
    }
    return holds(arguments.after(own)) ? find(arguments) : std::nullopt;
  };
  return std::move(*this);
}

Check dtype(std::vector<ScalarType> allowed) {
  std::string text = "be " + listed(allowed, name_of);
  std::string form = form_of("dtype", "[" + listed(allowed, quoted_dtype, ", ") + "]");
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
          },
          .form = std::move(form)};
}

Check same_dtype(const char* other) {
  return formed(fits(std::string("have the dtype of ") + other, {other},
                     [](const RuleArguments& own) {
                       return in_each(own, [&](const TensorView& view) -> Found {
                         if (view.dtype == own.tensor(1).dtype) return std::nullopt;
                         return "dtype " + name_of(view.dtype) + " beside " +
                                name_of(own.tensor(1).dtype);
                       });
                     }),
                form_of("same_dtype", in_quotes(other)));
}

Check dims(int64_t least, int64_t most) {
  std::string text = "have " + std::to_string(least) +
                     (least == most ? "" : " to " + std::to_string(most)) + " dimensions";
  return formed(fits(std::move(text), {},
                     [least, most](const RuleArguments& own) {
                       return in_each(own, [&](const TensorView& view) -> Found {
                         if (view.dims >= least && view.dims <= most) return std::nullopt;
                         return "sizes " + sizes_of(view);
                       });
                     }),
                form_of("dims", digits(least) + ", " + digits(most)));
}

Check contiguous() {
  return formed(fits("be contiguous", {},
                     [](const RuleArguments& own) {
                       return in_each(own, [](const TensorView& view) -> Found {
                         if (is_contiguous(view)) return std::nullopt;
                         return strides_of(view);
                       });
                     }),
                form_of("contiguous"));
}

Check contiguous_rows() {
  return formed(fits("be contiguous but for its rows", {},
                     [](const RuleArguments& own) {
                       return in_each(own, [](const TensorView& view) -> Found {
                         if (view.numel() == 0 || dense_from(view, 1)) return std::nullopt;
                         return strides_of(view);
                       });
                     }),
                form_of("contiguous_rows"));
}

Check contiguous_or_transposed() {
  return formed(fits("be contiguous, or the transpose of the last two dimensions of what is", {},
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
                     }),
                form_of("contiguous_or_transposed"));
}

Check not_empty() {
  return formed(that("not be empty", {},
                     [](const RuleArguments& own) {
                       return in_each(own, [](const TensorView& view) -> Found {
                         if (view.numel() > 0) return std::nullopt;
                         return "sizes " + sizes_of(view);
                       });
                     }),
                form_of("not_empty"));
}

Check absent() {
  Check check = that("be null", {}, [](const RuleArguments& own) -> Found {
    if (!given(own, 0)) return std::nullopt;
    return name_of(own.tensor().dtype) + " of sizes " + sizes_of(own.tensor());
  });
  check.form = form_of("absent");
  return check;
}

Check present() {
  Check check = fits("be given", {}, [](const RuleArguments& own) -> Found {
    return given(own, 0) ? Found() : "no value";
  });
  check.sees_absence = true;
  check.form = form_of("present");
  return check;
}

Check size_in(int dimension, std::vector<int64_t> allowed) {
  const std::string numbers = listed(allowed, digits, ", ");
  std::string text =
      "have size " + listed(allowed, digits) + " in its " + dimension_text(dimension);
  return formed(that(std::move(text), {},
                     [dimension, allowed = std::move(allowed)](const RuleArguments& own) {
                       return in_each(own, [&](const TensorView& view) -> Found {
                         const int64_t size = size_of(view, dimension);
                         if (std::find(allowed.begin(), allowed.end(), size) != allowed.end()) {
                           return std::nullopt;
                         }
                         return "sizes " + sizes_of(view);
                       });
                     }),
                form_of("size_in", digits(dimension) + ", [" + numbers + "]"));
}

Check size_between(int dimension, int64_t least, int64_t most, int64_t multiple) {
  std::string text = "have a size of " + std::to_string(least) +
                     (most == kNoMost ? " or more" : " to " + std::to_string(most)) +
                     multiple_text(multiple) + " in its " + dimension_text(dimension);
  return formed(that(std::move(text), {},
                     [=](const RuleArguments& own) {
                       return in_each(own, [&](const TensorView& view) -> Found {
                         const int64_t size = size_of(view, dimension);
                         if (size >= least && size <= most && size % multiple == 0)
                           return std::nullopt;
                         return "sizes " + sizes_of(view);
                       });
                     }),
                form_of("size_between", digits(dimension) + ", " + digits(least) + ", " +
                                            digits(most) + ", " + digits(multiple)));
}

Check same_size(int dimension, const char* other, int other_dimension) {
  return formed(fits("have the size of " + std::string(other) + "'s " +
                         dimension_text(other_dimension) + " in its " + dimension_text(dimension),
                     {other},
                     [=](const RuleArguments& own) {
                       const int64_t wanted = size_of(own.tensor(1), other_dimension);
                       return in_each(own, [&](const TensorView& view) -> Found {
                         if (size_of(view, dimension) == wanted) return std::nullopt;
                         return "sizes " + sizes_of(view) + " beside " + sizes_of(own.tensor(1));
                       });
                     }),
                form_of("same_size", digits(dimension) + ", " + in_quotes(other) + ", " +
                                         digits(other_dimension)));
}

Check same_sizes(const char* other) {
  return formed(fits(std::string("have the sizes of ") + other, {other},
                     [](const RuleArguments& own) {
                       const TensorView& wanted = own.tensor(1);
                       return in_each(own, [&](const TensorView& view) -> Found {
                         if (view.dims == wanted.dims &&
                             std::equal(view.sizes, view.sizes + view.dims, wanted.sizes)) {
                           return std::nullopt;
                         }
                         return "sizes " + sizes_of(view) + " beside " + sizes_of(wanted);
                       });
                     }),
                form_of("same_sizes", in_quotes(other)));
}

Check same_count(const char* other) {
  return formed(fits(std::string("have as many entries as ") + other, {other},
                     [](const RuleArguments& own) -> Found {
                       if (own.count() == own.count(1)) return std::nullopt;
                       return digits(own.count()) + " beside " + digits(own.count(1));
                     }),
                form_of("same_count", in_quotes(other)));
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
  return formed(that("be " + std::to_string(least) +
                         (most == kNoMost ? " or more" : " to " + std::to_string(most)),
                     {},
                     [=](const RuleArguments& own) -> Found {
                       if (own.integer() >= least && own.integer() <= most) return std::nullopt;
                       return "value " + std::to_string(own.integer());
                     }),
                form_of("between", digits(least) + ", " + digits(most)));
}

Check one_of(std::vector<int64_t> allowed) {
  const std::string numbers = listed(allowed, digits, ", ");
  std::string text = "be " + listed(allowed, digits);
  return formed(
      that(std::move(text), {},
           [allowed = std::move(allowed)](const RuleArguments& own) -> Found {
             if (std::find(allowed.begin(), allowed.end(), own.integer()) != allowed.end()) {
               return std::nullopt;
             }
             return "value " + std::to_string(own.integer());
           }),
      form_of("one_of", "[" + numbers + "]"));
}

Check one_of(std::vector<std::string> allowed) {
  const std::string texts = listed(allowed, in_quotes, ", ");
  std::string text =
      "be " + listed(allowed, [](const std::string& each) { return "'" + each + "'"; });
  return formed(fits(std::move(text), {},
                     [allowed = std::move(allowed)](const RuleArguments& own) -> Found {
                       if (std::find(allowed.begin(), allowed.end(), own.text()) != allowed.end()) {
                         return std::nullopt;
                       }
                       return "value '" + own.text() + "'";
                     }),
                form_of("one_of", "[" + texts + "]"));
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

// --- conditions ----------------------------------------------------------------------------------

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
