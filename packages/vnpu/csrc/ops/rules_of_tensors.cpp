// Rules about the dtypes, dimensions, layouts and sizes of tensors.

#include <algorithm>
#include <utility>

#include "ops/rule_text.h"
#include "ops/rules.h"

namespace vnpu::ops {
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

}  // namespace

bool is_contiguous(const TensorView& view) { return view.numel() == 0 || dense_from(view, 0); }

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

}  // namespace vnpu::ops
