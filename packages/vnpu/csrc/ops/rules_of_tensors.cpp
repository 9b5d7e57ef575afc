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

// The first tensor of the argument for which `holds` is false; null where there is none.
template <class Holds>
const TensorView* failing(const ArgumentValue& value, Holds holds) {
  const bool is_one = value.kind == ArgumentValue::Kind::kTensor;
  for (size_t i = 0; i < (is_one ? 1 : value.tensors.count); ++i) {
    const TensorView& view = is_one ? *value.tensor : value.tensors[i];
    if (!holds(view)) return &view;
  }
  return nullptr;
}

// A check of each tensor of the argument. holds(view, arguments)
template <class Holds>
Check of_each(std::string text, std::vector<const char*> names, std::string form, Holds holds,
              bool is_limit = false) {
  const auto find = [names, holds = std::move(holds)](const RuleArguments& own) -> Found {
    const TensorView* const view =
        failing(own[0], [&](const TensorView& each) { return holds(each, own); });
    return view == nullptr ? Found() : described(*view) + beside(own, names);
  };
  Check check = that(std::move(text), std::move(names), Find(find));
  check.is_limit = is_limit;
  return formed(std::move(check), std::move(form));
}

// Rules on the layout of tensors in memory. lies(view): true if one has that layout
template <class Lies>
Check lying(std::string text, const char* form, Lies lies) {
  const auto find = [lies](const RuleArguments& own) -> Found {
    const TensorView* const view = failing(own[0], lies);
    if (view == nullptr) return std::nullopt;
    const std::vector<int64_t> strides(view->strides, view->strides + view->dims);
    return "strides [" + listed(strides, digits, ", ") + "] for " + described(*view);
  };
  return formed(fits(std::move(text), {}, Find(find)), form_of(form));
}

bool same_sizes(const TensorView& one, const TensorView& other) {
  return one.dims == other.dims && std::equal(one.sizes, one.sizes + one.dims, other.sizes);
}

}  // namespace

bool is_contiguous(const TensorView& view) { return view.numel() == 0 || dense_from(view, 0); }

Check dtype(std::vector<ScalarType> allowed) {
  std::string text = "be " + listed(allowed, name_of);
  std::string form = form_of("dtype", "[" + listed(allowed, quoted_dtype, ", ") + "]");
  Check check = of_each(
      std::move(text), {}, std::move(form),
      [allowed](const TensorView& view, const RuleArguments&) {
        return contains(allowed, view.dtype);
      },
      true);
  check.find = [allowed = std::move(allowed),
                of_tensors = std::move(check.find)](const RuleArguments& own) -> Found {
    if (own[0].kind != ArgumentValue::Kind::kScalar) return of_tensors(own);
    if (contains(allowed, own.scalar().dtype)) return std::nullopt;
    return described(own[0]);
  };
  return check;
}

Check same_dtype(const char* other) {
  return of_each(std::string("have the dtype of ") + other, {other},
                 form_of("same_dtype", in_quotes(other)),
                 [](const TensorView& view, const RuleArguments& own) {
                   return view.dtype == own.tensor(1).dtype;
                 });
}

Check dims(int64_t least, int64_t most) {
  return of_each(
      "have " + digits(least) + (least == most ? "" : " to " + digits(most)) + " dimensions", {},
      form_of("dims", digits(least) + ", " + digits(most)),
      [=](const TensorView& view, const RuleArguments&) {
        return view.dims >= least && view.dims <= most;
      });
}

Check contiguous() { return lying("be contiguous", "contiguous", is_contiguous); }

Check contiguous_rows() {
  return lying("be contiguous but for its rows", "contiguous_rows",
               [](const TensorView& view) { return view.numel() == 0 || dense_from(view, 1); });
}

Check contiguous_or_transposed() {
  return lying("be contiguous, or the transpose of the last two dimensions of what is",
               "contiguous_or_transposed", [](TensorView view) {
                 if (is_contiguous(view)) return true;
                 if (view.dims < 2) return false;
                 std::swap(view.sizes[view.dims - 1], view.sizes[view.dims - 2]);
                 std::swap(view.strides[view.dims - 1], view.strides[view.dims - 2]);
                 return is_contiguous(view);
               });
}

Check not_empty() {
  return of_each(
      "not be empty", {}, form_of("not_empty"),
      [](const TensorView& view, const RuleArguments&) { return view.numel() > 0; }, true);
}

Check absent() {
  return formed(that("be null", {}, [](const RuleArguments& own) { return !given(own, 0); }),
                form_of("absent"));
}

Check present() {
  Check check = fits("be given", {}, [](const RuleArguments& own) -> Found {
    return given(own, 0) ? Found() : "no value";
  });
  check.sees_absence = true;
  return formed(std::move(check), form_of("present"));
}

Check size_in(int dimension, std::vector<int64_t> allowed) {
  return of_each(
      "have size " + listed(allowed, digits) + " in its " + dimension_text(dimension), {},
      form_of("size_in", digits(dimension) + ", [" + listed(allowed, digits, ", ") + "]"),
      [=](const TensorView& view, const RuleArguments&) {
        return contains(allowed, size_of(view, dimension));
      },
      true);
}

Check size_between(int dimension, int64_t least, int64_t most, int64_t multiple) {
  return of_each(
      "have a size of " + digits(least) + (most == kNoMost ? " or more" : " to " + digits(most)) +
          multiple_text(multiple) + " in its " + dimension_text(dimension),
      {},
      form_of("size_between", digits(dimension) + ", " + digits(least) + ", " + digits(most) +
                                  ", " + digits(multiple)),
      [=](const TensorView& view, const RuleArguments&) {
        const int64_t size = size_of(view, dimension);
        return size >= least && size <= most && size % multiple == 0;
      },
      true);
}

Check same_size(int dimension, const char* other, int other_dimension) {
  return of_each("have the size of " + std::string(other) + "'s " +
                     dimension_text(other_dimension) + " in its " + dimension_text(dimension),
                 {other},
                 form_of("same_size", digits(dimension) + ", " + in_quotes(other) + ", " +
                                          digits(other_dimension)),
                 [=](const TensorView& view, const RuleArguments& own) {
                   return size_of(view, dimension) == size_of(own.tensor(1), other_dimension);
                 });
}

Check same_sizes(const char* other) {
  return of_each(std::string("have the sizes of ") + other, {other},
                 form_of("same_sizes", in_quotes(other)),
                 [](const TensorView& view, const RuleArguments& own) {
                   return same_sizes(view, own.tensor(1));
                 });
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
  return fits(std::string("have the sizes of ") + other + ", each", {other},
              [](const RuleArguments& own) -> Found {
                const ViewSpan& seen = own[0].tensors;
                const ViewSpan& wanted = own[1].tensors;
                for (size_t i = 0; i < std::min(seen.count, wanted.count); ++i) {
                  if (same_sizes(seen[i], wanted[i])) continue;
                  return described(seen[i]) + " beside " + described(wanted[i]) + " as number " +
                         digits(static_cast<int64_t>(i));
                }
                return std::nullopt;
              });
}

}  // namespace vnpu::ops
