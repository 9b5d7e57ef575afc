// Rows of caches that are found one by one: their indices, their pooling, attention to them.

#include <algorithm>
#include <limits>

#include "launch/stage.h"
#include "operators/operators.h"
#include "operators/shared.h"

namespace davinci {
namespace {

Operator kDivMods("aclnnDivMods");
Operator kAdd("aclnnAdd");
Operator kFlip("aclnnFlip");
Operator kMul("aclnnMul");
Operator kInplaceIndexCopy("aclnnInplaceIndexCopy");
Operator kCat("aclnnCat");
Operator kInplaceMul("aclnnInplaceMul");
Operator kReduceSum("aclnnReduceSum");
Operator kInplaceMuls("aclnnInplaceMuls");
Operator kMatmul("aclnnMatmul");
Operator kInplaceRelu("aclnnInplaceRelu");
Operator kGeTensor("aclnnGeTensor");
Operator kTopk("aclnnTopk");

using Float = Number<double>;
using Integer = Number<int64_t>;
constexpr Float kHidden{-std::numeric_limits<double>::infinity()};
constexpr int64_t kRowDim = 0;
constexpr int64_t kLastDim = -1;

View flattened(const View& view) { return view.reshaped({view.numel()}); }

// Calls the function with a stage, the first row and the number of rows of each part. The device
// computes some parts while the host prepares the next ones.
template <class Function>
void for_parts(const char* name, const Tensor& like, int64_t rows, int64_t at_once,
               const Function& function) {
  constexpr int64_t kPartsOfStage = 8;
  for (int64_t start = 0; start < rows;) {
    Stage stage(name, like);
    for (int64_t part = 0; part < kPartsOfStage && start < rows; ++part, start += at_once) {
      function(stage, start, std::min(at_once, rows - start));
    }
    stage.submit();
  }
}

void check_rows(const char* name, const Tensor& tensor, at::IntArrayRef sizes,
                at::ScalarType dtype) {
  TORCH_CHECK_VALUE(tensor.sizes() == sizes && tensor.scalar_type() == dtype, name, " of sizes ",
                    tensor.sizes(), ", ", tensor.scalar_type(), ": give ", sizes, ", ", dtype);
}

void check_at_once(int64_t at_once) {
  TORCH_CHECK_VALUE(at_once > 0, "at_once is ", at_once, ": give at least 1");
}

}  // namespace

Tensor row_numbers(const arguments::row_numbers& a) {
  TORCH_CHECK_VALUE(a.rows_per_page > 0 && a.rows_per_block > 0 && a.block_table.dim() == 2 &&
                        a.block_table.is_contiguous() && a.block_table.scalar_type() == at::kInt &&
                        a.places.scalar_type() == at::kLong,
                    "pages of ", a.rows_per_page, " rows, blocks of ", a.rows_per_block,
                    ", a block table of sizes ", a.block_table.sizes(), ", ",
                    a.block_table.scalar_type(), ", and places of ", a.places.scalar_type(),
                    ": give positive numbers, [num_requests, max_blocks], contiguous, int32, and "
                    "int64");
  Tensor out = empty(a.places.sizes(), at::kLong, a.places);
  if (a.places.is_meta() || a.places.numel() == 0) return out;
  Stage stage("row_numbers", a.places);
  const std::vector<int64_t> sizes = a.places.sizes().vec();
  const Scratch scratch(a.places, {{at::kLong, sizes}, {at::kLong, sizes}, {at::kInt, sizes}});
  constexpr int32_t kFloor = 2;
  stage.run(kDivMods, a.places, Integer{a.rows_per_page}, kFloor, scratch[0]);
  stage.run(kAdd, scratch[0], a.requests, Integer{a.block_table.size(1)}, scratch[1]);
  stage.run(kIndexSelect, flattened(View::of(a.block_table)), kRowDim, flattened(scratch[1]),
            flattened(scratch[2]));
  stage.run(kAdd, a.places, scratch[0], Integer{-a.rows_per_page}, out);
  stage.run(kInplaceAdd, out, scratch[2], Integer{a.rows_per_block});
  stage.submit();
  return out;
}

void rotate_pairs(const arguments::rotate_pairs& a) {
  const int64_t size = a.cos.size(-1);
  TORCH_CHECK_VALUE(a.x.dim() == 3 && a.x.size(2) >= size && size % 2 == 0, "an input of sizes ",
                    a.x.sizes(), " for cosines of sizes ", a.cos.sizes(),
                    ": give [n, heads, size or more] and an even size");
  check_rows("cos", a.cos, {a.x.size(0), 1, size}, at::kFloat);
  check_rows("sin", a.sin, {a.x.size(0), 1, size}, at::kFloat);
  if (a.x.is_meta() || a.x.numel() == 0) return;
  Stage stage("rotate_pairs", a.x);
  const bool is_float = a.x.scalar_type() == at::kFloat;
  const std::vector<int64_t> sizes = {a.x.size(0), a.x.size(1), size};
  const Scratch scratch(a.x, {{at::kFloat, is_float ? std::vector<int64_t>{0} : sizes},
                              {at::kFloat, sizes},
                              {at::kFloat, sizes}});
  const View turned = View::of(a.x).narrowed(-1, a.x.size(2) - size, size);
  View entries = turned;
  if (!is_float) stage.run(kCast, turned, AclType{at::kFloat}, entries = scratch[0]);
  const std::vector<int64_t> last = {-1};
  stage.run(kFlip, entries.split_last(size / 2, 2), at::IntArrayRef(last),
            scratch[1].split_last(size / 2, 2));
  stage.run(kMul, entries, a.cos, scratch[2]);
  if (is_float) {
    stage.run(kAddcmul, scratch[2], scratch[1], a.sin, Float{1.0}, turned);
  } else {
    stage.run(kAddcmul, scratch[2], scratch[1], a.sin, Float{1.0}, scratch[0]);
    stage.run(kInplaceCopy, turned, scratch[0]);
  }
  stage.submit();
}

Tensor compress_tokens(const arguments::compress_tokens& a) {
  const int64_t features = a.ape.size(-1);
  const int64_t size = a.overlaps ? features / 2 : features;
  check_at_once(a.at_once);
  TORCH_CHECK_VALUE(a.entries.dim() == 2 && (!a.overlaps || a.entries.size(1) % 2 == 0),
                    "entries of sizes ", a.entries.sizes(),
                    ": give [n, tokens of a row], of two groups where they overlap");
  const int64_t count = a.entries.size(0);
  const int64_t length = a.entries.size(1);
  const int64_t num_tokens = a.projected.size(0);
  check_rows("projected", a.projected, {num_tokens, 2 * features}, at::kFloat);
  check_rows("states", a.states, {a.states.size(0), 2 * features}, at::kFloat);
  check_rows("places", a.places, {num_tokens}, at::kLong);
  check_rows("numbers", a.numbers, {num_tokens}, at::kLong);
  check_rows("entries", a.entries, {count, length}, at::kLong);
  check_rows("is_missing", a.is_missing, {count, length}, at::kBool);
  Tensor out = empty({count, size}, at::kFloat, a.projected);
  if (a.projected.is_meta() || num_tokens == 0) return out;
  Stage stage("compress_tokens", a.projected);
  const int64_t most = std::min(count, a.at_once);
  const int64_t owned = a.overlaps ? most : 0;
  const Scratch scratch(a.projected, {{at::kFloat, {num_tokens, features}},
                                      {at::kFloat, {most, length, 2 * features}},
                                      {at::kFloat, {most, length, size}},
                                      {at::kFloat, {owned, length, size}},
                                      {at::kFloat, {owned, length, size}}});
  stage.run(kIndexSelect, a.ape, kRowDim, a.places, scratch[0]);
  stage.run(kInplaceAdd, View::of(a.projected).narrowed(1, features, features), scratch[0],
            Integer{1});
  stage.run(kInplaceIndexCopy, a.states, kRowDim, a.numbers, a.projected);
  stage.submit();
  const auto pool = [&](Stage& stage, int64_t start, int64_t n) {
    const View gathered = scratch[1].narrowed(0, 0, n);
    stage.run(kIndexSelect, a.states, kRowDim, flattened(View::of(a.entries).narrowed(0, start, n)),
              gathered.reshaped({n * length, 2 * features}));
    View values = gathered.narrowed(2, 0, features);
    View gates = gathered.narrowed(2, features, features);
    stage.run(kInplaceMaskedFill, gates,
              View::of(a.is_missing).narrowed(0, start, n).unsqueezed(-1), kHidden);
    constexpr int64_t kTokenDim = 1;
    if (a.overlaps) {
      const auto own = [&](const View& of, const View& to) {
        const int64_t half = length / 2;
        stage.run(kCat,
                  Views{{of.narrowed(1, 0, half).narrowed(2, 0, size),
                         of.narrowed(1, half, half).narrowed(2, size, size)}},
                  kTokenDim, to);
        return to;
      };
      values = own(values, scratch[3].narrowed(0, 0, n));
      gates = own(gates, scratch[4].narrowed(0, 0, n));
    }
    const View weights = scratch[2].narrowed(0, 0, n);
    stage.run(kSoftmax, gates, kTokenDim, weights);
    stage.run(kInplaceMul, weights, values);
    const std::vector<int64_t> dims = {kTokenDim};
    stage.run(kReduceSum, weights, at::IntArrayRef(dims), false, AclType{at::kFloat},
              View::of(out).narrowed(0, start, n));
  };
  for_parts("compress_tokens", a.projected, count, a.at_once, pool);
  return out;
}

Tensor attend_to_rows(const arguments::attend_to_rows& a) {
  const at::ScalarType dtype = a.query.scalar_type();
  check_at_once(a.at_once);
  TORCH_CHECK_VALUE(a.query.dim() == 3 && a.numbers.dim() == 2, "queries of sizes ",
                    a.query.sizes(), " and numbers of sizes ", a.numbers.sizes(),
                    ": give [num_tokens, num_heads, size] and [num_tokens, width]");
  const int64_t tokens = a.query.size(0);
  const int64_t heads = a.query.size(1);
  const int64_t size = a.query.size(2);
  const int64_t width = a.numbers.size(1);
  check_rows("rows", a.rows, {a.rows.size(0), size}, dtype);
  check_rows("numbers", a.numbers, {tokens, width}, at::kLong);
  check_rows("is_hidden", a.is_hidden, {tokens, width}, at::kBool);
  if (a.sinks.has_value()) check_rows("sinks", *a.sinks, {heads}, at::kFloat);
  Tensor out = empty(a.query.sizes(), dtype, a.query);
  if (a.query.is_meta() || tokens == 0) return out;
  const bool is_float = dtype == at::kFloat;
  const int64_t most = std::min(tokens, a.at_once);
  const int64_t cast = is_float ? 0 : most;
  const int64_t columns = width + (a.sinks.has_value() ? 1 : 0);
  const Scratch scratch(a.query, {{dtype, {cast, width, size}},
                                  {at::kFloat, {most, width, size}},
                                  {at::kFloat, {cast, heads, size}},
                                  {at::kFloat, {most, heads, width}},
                                  {at::kFloat, {most, heads, columns}},
                                  {at::kFloat, {columns > width ? most : 0, heads, columns}},
                                  {at::kFloat, {cast, heads, size}}});
  const auto floats = [](Stage& stage, const View& from, const View& to) {
    if (from.dtype == at::kFloat) return from;
    stage.run(kCast, from, AclType{at::kFloat}, to);
    return to;
  };
  const auto compute = [&](Stage& stage, int64_t start, int64_t n) {
    // Pieces that a dtype does not need are empty.
    const auto part = [n](const View& view) {
      return view.narrowed(0, 0, std::min(n, view.size(0)));
    };
    const auto of_part = [&](const Tensor& tensor) {
      return View::of(tensor).narrowed(0, start, n);
    };
    const View gathered = part(scratch[is_float ? 1 : 0]);
    stage.run(kIndexSelect, a.rows, kRowDim, flattened(of_part(a.numbers)),
              gathered.reshaped({n * width, size}));
    const View chosen = floats(stage, gathered, part(scratch[1]));
    const View query = floats(stage, of_part(a.query), part(scratch[2]));
    View scores = part(scratch[3]);
    stage.run(kBatchMatMul, query, chosen.transposed(1, 2), scores, kKeepDtype);
    stage.run(kInplaceMuls, scores, Float{a.scale});
    stage.run(kInplaceMaskedFill, scores, of_part(a.is_hidden).unsqueezed(1), kHidden);
    if (a.sinks.has_value()) {
      View sinks = View::of(*a.sinks).reshaped({1, heads, 1});
      sinks.sizes[0] = n;
      sinks.strides[0] = 0;
      stage.run(kCat, Views{{scores, sinks}}, kLastDim, part(scratch[5]));
      scores = part(scratch[5]);
    }
    const View weights = part(scratch[4]);
    stage.run(kSoftmax, scores, kLastDim, weights);
    const View sum = is_float ? of_part(out) : part(scratch[6]);
    stage.run(kBatchMatMul, weights.narrowed(2, 0, width), chosen, sum, kKeepDtype);
    if (!is_float) stage.run(kCast, sum, AclType{dtype}, of_part(out));
  };
  for_parts("attend_to_rows", a.query, tokens, a.at_once, compute);
  return out;
}

Tensor choose_rows(const arguments::choose_rows& a) {
  check_at_once(a.at_once);
  TORCH_CHECK_VALUE(a.query.dim() == 3 && a.keys.dim() == 2 && a.keys.is_contiguous() &&
                        a.width > 0 && a.width <= a.keys.size(0),
                    "queries of sizes ", a.query.sizes(), " that choose ", a.width,
                    " keys of sizes ", a.keys.sizes(),
                    ": give [n, heads, size], and at least as many contiguous keys, at least 1");
  const int64_t tokens = a.query.size(0);
  const int64_t heads = a.query.size(1);
  const int64_t size = a.query.size(2);
  const int64_t num_rows = a.keys.size(0);
  check_rows("weights", a.weights, {tokens, heads}, at::kFloat);
  check_rows("keys", a.keys, {num_rows, size}, at::kFloat);
  check_rows("places", a.places, {num_rows}, at::kLong);
  check_rows("num_visible", a.num_visible, {tokens, 1}, at::kLong);
  Tensor out = empty({tokens, a.width}, at::kLong, a.query);
  if (a.query.is_meta() || tokens == 0) return out;
  const bool is_float = a.query.scalar_type() == at::kFloat;
  const int64_t most = std::min(tokens, a.at_once);
  const Scratch scratch(a.query, {{at::kFloat, {most, heads, size}},
                                  {at::kFloat, {most, heads, num_rows}},
                                  {at::kFloat, {most, 1, num_rows}},
                                  {at::kBool, {most, num_rows}},
                                  {at::kFloat, {most, a.width}},
                                  {at::kBool, {most, a.width}}});
  const auto compute = [&](Stage& stage, int64_t start, int64_t n) {
    const auto part = [n](const View& view) { return view.narrowed(0, 0, n); };
    const auto of_part = [&](const Tensor& tensor) {
      return View::of(tensor).narrowed(0, start, n);
    };
    View query = of_part(a.query);
    if (!is_float || !query.is_contiguous()) {
      stage.run(kCast, query, AclType{at::kFloat}, part(scratch[0]));
      query = part(scratch[0]);
    }
    const View products = part(scratch[1]);
    const View by_head = products.reshaped({n * heads, num_rows});
    stage.run(kMatmul, query.reshaped({n * heads, size}), View::of(a.keys).transposed(0, 1),
              by_head, kKeepDtype);
    stage.run(kInplaceRelu, by_head);
    stage.run(kBatchMatMul, of_part(a.weights).unsqueezed(1), products, part(scratch[2]),
              kKeepDtype);
    const View scores = part(scratch[2]).reshaped({n, num_rows});
    const View limit = of_part(a.num_visible);
    stage.run(kGeTensor, a.places, limit, part(scratch[3]));
    stage.run(kInplaceMaskedFill, scores, part(scratch[3]), kHidden);
    const View best = of_part(out);
    stage.run(kTopk, scores, a.width, kLastDim, true, true, part(scratch[4]), best);
    stage.run(kGeTensor, best, limit, part(scratch[5]));
    stage.run(kInplaceMaskedFill, best, part(scratch[5]), Integer{-1});
  };
  for_parts("choose_rows", a.query, tokens, a.at_once, compute);
  return out;
}

}  // namespace davinci
