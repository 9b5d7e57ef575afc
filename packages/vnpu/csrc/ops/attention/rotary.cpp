// Rotary position embedding. All forms share one kernel: pairs (a, b) of a row are turned by an
// angle,
//
//   out[p] = x[a] * cos[p] - x[b] * sin[p]        out[q] = x[b] * cos[q] + x[a] * sin[q]
//
// and the modes differ in which elements are a pair. Arithmetic is in fp32, rounded once at the
// end.

#include "ops/attention/rotary.h"
#include "ops/shared_rules.h"

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>

namespace vnpu::ops {
namespace {

Tensor dense_rows(const Tensor& tensor) {
  return tensor.size(-1) > 1 && tensor.stride(-1) != 1 ? tensor.contiguous() : tensor;
}

// The leading dimensions as three, so that rows are addressed by three strides.
Tensor four_dimensional(const Tensor& tensor) {
  Tensor all = tensor;
  while (all.dim() < 4) all = all.unsqueeze(0);
  return all;
}

}  // namespace

void rotate(const Tensor& x, const Angles& angles, Pairing pairing, const Tensor& out) {
  const int64_t width = angles.cos.size(-1) * (angles.one_per_pair ? 2 : 1);
  if (x.dim() > 4 || x.dim() < angles.cos.dim()) {
    refuse("x has " + std::to_string(x.dim()) + " dimensions and cos " +
           std::to_string(angles.cos.dim()) + "; x takes at most 4 and at least those of cos.");
  }
  if (width > x.size(-1) || width % (pairing == Pairing::kQuarter ? 4 : 2) != 0) {
    refuse("the rotated width is " + std::to_string(width) + " and the head size " +
           std::to_string(x.size(-1)) +
           "; the width must be even (a multiple of 4 in quarter mode) and fit the head.");
  }
  require(angles.cos.sizes() == angles.sin.sizes(), "cos and sin differ in shape.");
  require(angles.cos.scalar_type() == angles.sin.scalar_type(), "cos and sin differ in dtype.");
  if (x.numel() == 0) return;
  if (out.size(-1) > 1 && out.stride(-1) != 1) {
    Tensor dense = at::empty_like(out, at::MemoryFormat::Contiguous);
    rotate(x, angles, pairing, dense);
    store(out, dense);
    return;
  }
  const Tensor source = four_dimensional(dense_rows(x));
  const Tensor target = four_dimensional(out);
  std::vector<int64_t> angle_sizes(source.sizes().begin(), source.sizes().end());
  angle_sizes.back() = angles.cos.size(-1);
  // Angles in another dtype than x's are only known to come as fp32.
  const bool same = angles.cos.scalar_type() == x.scalar_type();
  const Tensor cos = dense_rows(same ? angles.cos : angles.cos.to(at::kFloat)).expand(angle_sizes);
  const Tensor sin = dense_rows(same ? angles.sin : angles.sin.to(at::kFloat)).expand(angle_sizes);
  const int64_t rows = source.numel() / source.size(-1);
  const int64_t n1 = source.size(1);
  const int64_t n2 = source.size(2);
  const auto at_row = [&](const Tensor& tensor, int64_t row) {
    const int64_t k = row % n2;
    const int64_t j = row / n2 % n1;
    const int64_t i = row / n2 / n1;
    return i * tensor.stride(0) + j * tensor.stride(1) + k * tensor.stride(2);
  };
  const auto run = [&]<class T, class A>(const T*, const A*) {
    const T* const from = source.const_data_ptr<T>();
    T* const to = target.mutable_data_ptr<T>();
    const A* const c = cos.const_data_ptr<A>();
    const A* const s = sin.const_data_ptr<A>();
    at::parallel_for(0, rows, std::max<int64_t>(1, 32768 / width), [&](int64_t begin, int64_t end) {
      std::vector<float> turned(static_cast<size_t>(width));
      for (int64_t row = begin; row < end; ++row) {
        const T* const x_row = from + at_row(source, row);
        T* const out_row = to + at_row(target, row);
        rotate_row(x_row, c + at_row(cos, row), s + at_row(sin, row), angles.one_per_pair, pairing,
                   width, turned.data(), out_row);
        if (out_row != x_row) std::copy(x_row + width, x_row + source.size(-1), out_row + width);
      }
    });
  };
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, x.scalar_type(), "rotary", [&] {
    const scalar_t* const type = nullptr;
    const float* const wide = nullptr;
    same ? run(type, type) : run(type, wide);
  });
}

namespace {

Pairing pairing_of(int64_t mode) {
  if (mode < 0 || mode > 3) {
    refuse("mode " + std::to_string(mode) +
           " is not known. Use 0 half, 1 interleave, 2 quarter or 3 interleave-half.");
  }
  return static_cast<Pairing>(mode);
}

Pairing pairing_of(const Text& mode) {
  if (mode.empty() || mode == "half") return Pairing::kHalf;
  if (mode == "interleave") return Pairing::kInterleave;
  if (mode == "quarter") return Pairing::kQuarter;
  refuse("rotaryMode '" + mode + "' is not known. Use half, interleave or quarter.");
}

void rotate_both(const InOut& query, const InOut& key, const Tensor& cos, const Tensor& sin,
                 int64_t layout, Pairing pairing) {
  // 1 BSND, 2 SBND, 3 BNSD, 4 TND; the heads' dimension of cos has size 1, so broadcasting does the
  // rest.
  if (layout < 1 || layout > 4) {
    refuse("layout " + std::to_string(layout) +
           " is not known. Use 1 BSND, 2 SBND, 3 BNSD, 4 TND.");
  }
  rotate(query.tensor, {cos, sin, false}, pairing, query.tensor);
  rotate(key.tensor, {cos, sin, false}, pairing, key.tensor);
}

// Angles of each token from a table of rows [cos | sin]: [tokens, 1, rotary/2] each. With several
// rows of positions (multimodal rotary embedding), `section` says which row supplies which angle.
std::pair<Tensor, Tensor> gather_angles(const Tensor& table, const Tensor& positions,
                                        const IntArray& section, bool interleaved) {
  const int64_t half = table.size(-1) / 2;
  const Tensor rows = at::index_select(table, 0, positions.reshape({-1}).contiguous());
  if (positions.dim() == 1) {
    const Tensor angles = rows.unsqueeze(1);
    return {angles.narrow(-1, 0, half), angles.narrow(-1, half, half)};
  }
  int64_t total = 0;
  for (const int64_t size : section) total += size;
  const auto groups = static_cast<int64_t>(section.size());
  if (groups != positions.size(0) || total != half) {
    refuse("mropeSection has " + std::to_string(groups) + " entries that sum to " +
           std::to_string(total) + "; positions have " + std::to_string(positions.size(0)) +
           " rows and half the rotary size is " + std::to_string(half) + ".");
  }
  const Tensor angles = rows.view({groups, -1, 1, 2 * half});
  std::vector<int64_t> source(static_cast<size_t>(half), 0);  // the row of positions of each angle
  if (interleaved) {
    // Angles 1, 4, 7 ... come from row 1 and 2, 5, 8 ... from row 2, as far as their sections
    // reach.
    require(groups == 3, "interleaved sections take three rows of positions.");
    for (int64_t g = 1; g < 3; ++g) {
      for (int64_t i = g; i < std::min(half, 3 * section[g]); i += 3) source[i] = g;
    }
  } else {
    int64_t i = 0;
    for (int64_t g = 0; g < groups; ++g) {
      for (int64_t n = 0; n < section[g]; ++n) source[i++] = g;
    }
  }
  Tensor mixed = angles[0].clone();
  for (int64_t i = 0; i < half; ++i) {
    if (source[i] == 0) continue;
    mixed.select(-1, i).copy_(angles[source[i]].select(-1, i));
    mixed.select(-1, half + i).copy_(angles[source[i]].select(-1, half + i));
  }
  return {mixed.narrow(-1, 0, half), mixed.narrow(-1, half, half)};
}

void rotate_from_table(const Tensor& positions, const Tensor& query, const Tensor& key,
                       const Tensor& table, const IntArray& section, int64_t head_size,
                       bool half_style, bool interleaved_sections, const Out& query_out,
                       const Out& key_out) {
  const auto [cos, sin] = gather_angles(table, positions, section, interleaved_sections);
  const Pairing pairing = half_style ? Pairing::kHalf : Pairing::kInterleave;
  const auto heads = [&](const Tensor& flat) {
    return flat.view(
        {flat.size(0), flat.numel() / std::max<int64_t>(1, flat.size(0)) / head_size, head_size});
  };
  require(query.size(-1) % head_size == 0 && key.size(-1) % head_size == 0,
          "the width of query or key is not a multiple of headSize.");
  if (query.size(0) == 0) return;
  rotate(heads(query), {cos, sin, true}, pairing, heads(query_out.tensor));
  rotate(heads(key), {cos, sin, true}, pairing, heads(key_out.tensor));
}

}  // namespace

VNPU_OPERATOR(RotaryPositionEmbedding,
              (const Tensor& x, const Tensor& cos, const Tensor& sin, int64_t mode, Out out),
              {.tier = kT2, .cost = elements<6>}) {
  rotate(x, {cos, sin, false}, pairing_of(mode), out.tensor);
}

VNPU_OPERATOR(RotaryPositionEmbeddingV2,
              (const Tensor& x, const Tensor& cos, const Tensor& sin, int64_t mode,
               const OptionalTensor& rotation, Out out),
              {.tier = kT2, .cost = elements<6>}) {
  if (!rotation) {
    rotate(x, {cos, sin, false}, pairing_of(mode), out.tensor);
    return;
  }
  // A matrix in place of the rule for pairs: x @ rotation is what sin multiplies.
  const Tensor wide = x.to(at::kFloat);
  store(out, wide * cos + at::matmul(wide, rotation->to(at::kFloat)) * sin);
}

VNPU_OPERATOR(ApplyRotaryPosEmb,
              (InOut query, InOut key, const Tensor& cos, const Tensor& sin, int64_t layout),
              {.tier = kT2, .cost = elements<6>}) {
  rotate_both(query, key, cos, sin, layout, Pairing::kHalf);
}

VNPU_OPERATOR(ApplyRotaryPosEmbV2,
              (InOut query, InOut key, const Tensor& cos, const Tensor& sin, int64_t layout,
               const Text& rotary_mode),
              {.tier = kT2, .cost = elements<6>}) {
  rotate_both(query, key, cos, sin, layout, pairing_of(rotary_mode));
}

constexpr char kRotary[] = "aclnnRopeWithSinCosCache.md, constraints";
// 32 entries in 16-bit types, 16 in float32.
static Check multiple_of_64_bytes(const char* typed_by) {
  return that("be a multiple of 32 (float32: 16)", {typed_by}, [](const RuleArguments& own) {
    const int64_t multiple = own.tensor(1).dtype == at::kFloat ? 16 : 32;
    return own.integer() > 0 && own.integer() % multiple == 0;
  });
}
static Rules rules_of_rope_with_sin_cos_cache() {
  return {
      kRotary,
      {{"query", {dtype({at::kHalf, at::kBFloat16, at::kFloat}), dims(2, 2), contiguous_rows()}},
       {"key", {same_dtype("query"), dims(2, 2), contiguous_rows()}},
       {"table", {same_dtype("query"), contiguous()}},
       {"query, key", not_empty(), {.tiling = true}},
       {"key", same_size(0, "query", 0)},
       {"head_size",
        multiple_of_64_bytes("query"),
        "op-plugin torch_npu-npu_mrope.md, head_size",
        {.tiling = true}},
       {"table",
        that("have rows of a multiple of 32 entries (float32: 16), at most headSize", {"head_size"},
             [](const RuleArguments& own) {
               const int64_t size = size_of(own.tensor(), -1);
               const int64_t multiple = own.tensor().dtype == at::kFloat ? 16 : 32;
               return size % multiple == 0 && size <= own.integer(1);
             }),
        "op-plugin torch_npu-npu_mrope.md, rotary_dim",
        {.tiling = true}},
       {"positions", dtype({at::kLong}), {.until = CannRelease::k8_5}},
       {"positions", dtype({at::kLong, at::kInt}), {.since = CannRelease::k9_0}},
       {"positions", fits("have an entry for each token", {"query"},
                          [](const RuleArguments& own) {
                            return size_of(own.tensor(), -1) == size_of(own.tensor(1), 0);
                          })},
       {"section",
        that("be [0, 0, 0] or [16, 24, 24]", {},
             [](const RuleArguments& own) {
               const std::vector<int64_t>& section = own.integers();
               return section.empty() || section == std::vector<int64_t>{0, 0, 0} ||
                      section == std::vector<int64_t>{16, 24, 24};
             }),
        {.until = CannRelease::k8_5, .tiling = true}}},
      {.bytes = 16 * kMiB},
      kBigChips};
}
// Of the table of sines and cosines, the rows of the tokens.
static void cost_of_rope_with_sin_cos_cache(const Call& call, Work& work) {
  const int64_t query = bytes_of(call.tensor("query"));
  const int64_t key = bytes_of(call.tensor("key"));
  work.read_bytes = query + key +
                    call.tensor("positions").numel() * size_of(call.tensor("table"), -1) *
                        static_cast<int64_t>(c10::elementSize(call.tensor("table").dtype));
  work.written_bytes = query + key;
  work.vector_operations = 6 * (call.tensor("query").numel() + call.tensor("key").numel());
}
VNPU_OPERATOR(RopeWithSinCosCache,
              (const Tensor& positions, const Tensor& query, const Tensor& key, const Tensor& table,
               const IntArray& section, int64_t head_size, bool half_style, Out query_out,
               Out key_out),
              {.tier = kT2,
               .cost = cost_of_rope_with_sin_cos_cache,
               .rules = rules_of_rope_with_sin_cos_cache()}) {
  rotate_from_table(positions, query, key, table, section, head_size, half_style, false, query_out,
                    key_out);
}

VNPU_OPERATOR(RopeWithSinCosCacheV2,
              (const Tensor& positions, const Tensor& query, const Tensor& key, const Tensor& table,
               const IntArray& section, int64_t head_size, bool half_style, int64_t cache_mode,
               Out query_out, Out key_out),
              {.tier = kT2,
               .cost = cost_of_rope_with_sin_cos_cache,
               .rules = rules_of_rope_with_sin_cos_cache()}) {
  rotate_from_table(positions, query, key, table, section, head_size, half_style, cache_mode == 1,
                    query_out, key_out);
}

static Rules rules_of_interleave_rope() {
  return {"aclnnInterleaveRope.md, parameters",
          {{"x", {dtype(kHalves), dims(4, 4)}},
           {"x", {not_empty(), size_in(-1, {64})}, {.tiling = true}},
           {"cos, sin", same_dtype("x")},
           {"cos", {size_in(-1, {64}), size_in(1, {1})}, {.tiling = true}},
           {"cos", same_size(0, "x", 0)},
           {"sin", same_sizes("cos")},
           {"out", {same_sizes("x"), same_dtype("x")}}},
          {.bytes = 32, .copies = true},
          kBigChips};
}
VNPU_OPERATOR(InterleaveRope, (const Tensor& x, const Tensor& cos, const Tensor& sin, Out out),
              {.tier = kT2, .cost = elements<6>, .rules = rules_of_interleave_rope()}) {
  rotate(x, {cos, sin, false}, Pairing::kInterleaveHalf, out.tensor);
}

}  // namespace vnpu::ops
