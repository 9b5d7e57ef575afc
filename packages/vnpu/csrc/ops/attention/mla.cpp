// What stands before multi-head latent attention: projections, norms, rotary embedding and the
// write to the caches of the latent and the rotary part.

#include "ops/attention/latent_cache.h"
#include "ops/attention/rotary.h"
#include "ops/matmul/blocked_matmul.h"
#include "ops/matmul/integer_matrices.h"
#include "ops/quantization/int8_quantization.h"
#include "ops/reduction/rms_norm.h"
#include "ops/shared_rules.h"

namespace vnpu::ops {
namespace {

Tensor wide_rms_norm(const Tensor& x, const Tensor& gamma, double epsilon) {
  const Tensor wide = x.to(at::kFloat);
  return wide * at::rsqrt(wide.square().mean(-1, /*keepdim=*/true) + epsilon) *
         gamma.to(at::kFloat);
}

struct LatentProlog {
  const Tensor& x;  // [batch, tokens, hidden] or [tokens, hidden]
  const LaidOut &down_query, &up_query;
  const Tensor& absorbed_key;  // [heads, size, latent]
  const LaidOut& down_key;
  const Tensor &query_gamma, &key_gamma, &sin, &cos;
  OptionalTensor cache_index;
  const InOut &latent_cache, &rope_cache;
  OptionalTensor x_scale, down_query_scale, up_query_scale, down_key_scale, latent_scale,
      rope_scale, smooth;
  double query_epsilon, key_epsilon;
  Text cache_mode;
  double query_factor = 1, key_factor = 1;
  OptionalTensor normed_query_out = {}, normed_query_scale_out = {}, query_scale_out = {};
  OptionalTensor ends = {};  // of the sequences that x [tokens, hidden] has
};

// x * weight as floats; integers carry a scale per row and one per column.
Tensor project(const Tensor& x, const LaidOut& weight, const OptionalTensor& row_scale,
               const OptionalTensor& scale) {
  const Tensor matrix = dense_weight(weight);
  if (matrix.scalar_type() != at::kChar)
    return multiply_rows(x.to(at::kFloat), matrix.to(at::kFloat));
  require(x.scalar_type() == at::kChar && row_scale && scale,
          "an int8 weight needs int8 rows and both scales.");
  return multiply_integers(x, matrix).to(at::kFloat) * scale->to(at::kFloat).reshape({-1}) *
         row_scale->to(at::kFloat).reshape({-1, 1});
}

void prolog(const LatentProlog& call, const Out& query_out, const Out& query_rope_out) {
  const Tensor x = call.x.reshape({-1, call.x.size(-1)});
  if (x.numel() == 0) return;
  const int64_t rows = x.size(0);
  const int64_t heads = call.absorbed_key.size(0);
  const int64_t size = call.absorbed_key.size(1);
  const int64_t latent = call.absorbed_key.size(2);
  const Tensor cos = call.cos.reshape({rows, 1, -1});
  const Tensor sin = call.sin.reshape({rows, 1, -1});
  const int64_t rope = cos.size(-1);
  // Intermediate results are rounded as the weights' unit takes them: to the query's 16 bits.
  const ScalarType type = query_rope_out.tensor.scalar_type();

  Tensor normed =
      wide_rms_norm(project(x, call.down_query, call.x_scale, call.down_query_scale).to(type),
                    call.query_gamma, call.query_epsilon) *
      call.query_factor;
  OptionalTensor normed_scale;
  if (dense_weight(call.up_query).scalar_type() == at::kChar) {
    if (call.smooth) normed = normed * call.smooth->to(at::kFloat).reshape({-1});
    const auto [values, scales] = quantize_rows(normed);
    normed = values;
    normed_scale = scales;
  } else {
    normed = normed.to(type);
  }
  const Tensor query = project(normed, call.up_query, normed_scale, call.up_query_scale)
                           .to(type)
                           .view({rows, heads, size + rope});
  const Tensor absorbed = multiply_rows(query.narrow(-1, 0, size).transpose(0, 1).to(at::kFloat),
                                        call.absorbed_key.to(at::kFloat))
                              .transpose(0, 1);
  if (call.query_scale_out && query_out.tensor.scalar_type() == at::kChar) {
    const auto [values, scales] = quantize_rows(absorbed.contiguous());
    store(query_out, values.view(query_out.tensor.sizes()));
    store(*call.query_scale_out, scales.reshape(call.query_scale_out->sizes()));
  } else {
    store(query_out, absorbed.reshape(query_out.tensor.sizes()));
  }
  const Tensor turned_query = at::empty({rows, heads, rope}, query.options());
  rotate(query.narrow(-1, size, rope), {cos, sin, false}, Pairing::kInterleaveHalf, turned_query);
  store(query_rope_out, turned_query.view(query_rope_out.tensor.sizes()));
  if (call.normed_query_out)
    store(*call.normed_query_out, normed.view(call.normed_query_out->sizes()));
  if (call.normed_query_scale_out && normed_scale) {
    store(*call.normed_query_scale_out,
          normed_scale->reshape(call.normed_query_scale_out->sizes()));
  }

  const Tensor key = project(x, call.down_key, call.x_scale, call.down_key_scale).to(type);
  const Tensor compressed =
      (wide_rms_norm(key.narrow(-1, 0, latent), call.key_gamma, call.key_epsilon) * call.key_factor)
          .to(type);
  const Tensor turned_key = at::empty({rows, 1, rope}, key.options());
  rotate(key.narrow(-1, latent, rope).unsqueeze(1), {cos, sin, false}, Pairing::kInterleaveHalf,
         turned_key);
  require(call.cache_index.has_value(), "cacheIndex is required in the paged cache modes.");
  const int64_t batches = call.x.dim() == 3 ? call.x.size(0) : 1;
  const LatentCacheTarget target{.mode = call.cache_mode,
                                 .index = *call.cache_index,
                                 .batches = batches,
                                 .tokens = rows / batches,
                                 .names_blocks = true,
                                 .ends = call.ends};
  const Tensor& latent_cache = call.latent_cache.tensor;
  const Tensor& rope_cache = call.rope_cache.tensor;
  write_latent_cache(for_cache(compressed, latent_cache, call.latent_scale, {}), latent_cache,
                     target);
  write_latent_cache(for_cache(turned_key.squeeze(1), rope_cache, call.rope_scale, {}), rope_cache,
                     target);
}

OptionalTensor filled(const OptionalOut& out) {
  return out && out.tensor->numel() > 0 ? OptionalTensor(*out.tensor) : OptionalTensor();
}

}  // namespace

static Check dtype_of_kv_or_int8() {
  return that("have the dtype of kv, or int8 with scales", {"kv"}, [](const RuleArguments& own) {
    const ScalarType type = own.tensor().dtype;
    return type == own.tensor(1).dtype || type == at::kChar;
  });
}
static Rules rules_of_kv_rms_norm_rope_cache() {
  return {"aclnnKvRmsNormRopeCache.md, parameters",
          {{"kv", {dtype(kHalves), dims(4, 4)}},
           {"kv", {size_in(1, {1}), not_empty(), size_in(-1, {576})}, {.tiling = true}},
           {"gamma", {same_dtype("kv"), dims(1, 1)}},
           {"gamma", size_in(0, {512}), {.tiling = true}},
           {"cos, sin", same_dtype("kv")},
           {"cos", size_in(-1, {64}), {.tiling = true}},
           {"cos", same_size(0, "kv", 0)},
           {"sin", same_sizes("cos")},
           {"index",
            {dtype({at::kLong}), fits("have an entry for each token", {"kv", "cache_mode"},
                                      [](const RuleArguments& own) {
                                        const TensorView& kv = own.tensor(1);
                                        const int64_t tokens = size_of(kv, 0) * size_of(kv, 2);
                                        const std::string& mode = own.text(2);
                                        const bool per_token =
                                            mode == "PA" || mode == "PA_BNSD" || mode == "PA_NZ";
                                        return !per_token || own.tensor().numel() == tokens;
                                      })}},
           {"rope_cache, latent_cache", {dtype_of_kv_or_int8(), contiguous()}},
           {"rope_cache",
            size_in(-1, {64}).when(equals("cache_mode", "PA_BNSD", "PA")),
            {.tiling = true}},
           {"latent_cache",
            size_in(-1, {512}).when(equals("cache_mode", "PA_BNSD", "PA")),
            {.tiling = true}},
           {"cache_mode", one_of("", "Norm", "PA", "PA_BNSD", "PA_NZ", "PA_BLK_BNSD", "PA_BLK_NZ")},
           {"rope_offset, latent_offset", absent(), {.until = CannRelease::k8_5}}},
          {.bytes = 32, .copies = true},
          kBigChips};
}
static void cost_of_kv_rms_norm_rope_cache(const Call& call, Work& work) {
  const TensorView& kv = call.tensor("kv");
  write_part(work, bytes_of(kv), 10 * kv.numel());
}
// Projections of the hidden states, norms, rotary embedding, absorption of the key's projection,
// and the tokens' rows of the cache.
static void prolog(const Call& call, Work& work) {
  const TensorView& x = call.tensor("x");
  const int64_t hidden = size_of(x, -1);
  const int64_t tokens = hidden > 0 ? x.numel() / hidden : 0;
  work.kind = Work::Class::kMatmul;
  const auto project = [&](const TensorView& weight, int64_t in) {
    const int64_t n = in > 0 ? weight.numel() / in : 0;
    work.products.push_back({1, tokens, n, in, arithmetic_of(weight)});
    work.read_bytes += bytes_of(weight);
    return n;
  };
  work.read_bytes = bytes_of(x);
  const int64_t rank = project(call.tensor("down_query"), hidden);
  project(call.tensor("down_key"), hidden);
  project(call.tensor("up_query"), rank);
  const TensorView& absorbed = call.tensor("absorbed_key");  // [heads, size, latent]
  work.products.push_back({size_of(absorbed, 0), tokens, size_of(absorbed, -1),
                           size_of(absorbed, -2), arithmetic_of(absorbed)});
  work.read_bytes += bytes_of(absorbed);
  const int64_t rows =
      tokens * (size_of(call.tensor("latent_cache"), -1) + size_of(call.tensor("rope_cache"), -1));
  work.written_bytes =
      rows * 2 + bytes_of(call.tensor("query")) + bytes_of(call.tensor("query_rope"));
  work.vector_operations =
      10 * (rows + call.tensor("query").numel() + call.tensor("query_rope").numel());
}
// kv [batch, 1, tokens, latent + rope]: norm of the latent part, rotation of the other, both to the
// cache.
VNPU_OPERATOR(KvRmsNormRopeCache,
              (const Tensor& kv, const Tensor& gamma, const Tensor& cos, const Tensor& sin,
               const Tensor& index, InOut rope_cache, InOut latent_cache,
               const OptionalTensor& rope_scale, const OptionalTensor& latent_scale,
               const OptionalTensor& rope_offset, const OptionalTensor& latent_offset,
               double epsilon, const Text& cache_mode, bool wants_rows, OptionalOut rope_out,
               OptionalOut latent_out),
              {.tier = kT2,
               .cost = cost_of_kv_rms_norm_rope_cache,
               .rules = rules_of_kv_rms_norm_rope_cache()}) {
  if (kv.numel() == 0) return;
  const int64_t latent = gamma.size(0);
  const int64_t rope = kv.size(-1) - latent;
  const Tensor rows = kv.narrow(-1, 0, latent);
  Tensor compressed;
  if (kv.scalar_type() == at::kFloat) {  // to the last bit as models define it
    compressed = wide_rms_norm(rows, gamma, epsilon);
  } else {
    compressed = at::empty(rows.sizes(), kv.options());
    rms_norm(rows, gamma, epsilon, compressed);
  }
  const Tensor turned = at::empty({kv.size(0), kv.size(1), kv.size(2), rope}, kv.options());
  rotate(kv.narrow(-1, latent, rope), {cos, sin, false}, Pairing::kInterleaveHalf, turned);
  if (wants_rows) {
    store(rope_out, turned);
    store(latent_out, compressed);
  }
  const LatentCacheTarget target{cache_mode, index, kv.size(0), kv.size(2)};
  write_latent_cache(for_cache(turned.view({-1, rope}), rope_cache.tensor, rope_scale, rope_offset),
                     rope_cache.tensor, target);
  write_latent_cache(
      for_cache(compressed.view({-1, latent}), latent_cache.tensor, latent_scale, latent_offset),
      latent_cache.tensor, target);
}

// What both versions are called with.
#define VNPU_PROLOG_CALL                                                                          \
  x, down_query, up_query, absorbed_key, down_key, query_gamma, key_gamma, sin, cos, cache_index, \
      latent_cache, rope_cache, x_scale, down_query_scale, up_query_scale, down_key_scale,        \
      latent_scale, rope_scale, smooth, query_epsilon, key_epsilon, cache_mode

VNPU_OPERATOR(MlaPrologV2WeightNz,
              (const Tensor& x, const LaidOut& down_query, const LaidOut& up_query,
               const Tensor& absorbed_key, const LaidOut& down_key, const Tensor& query_gamma,
               const Tensor& key_gamma, const Tensor& sin, const Tensor& cos,
               const Tensor& cache_index, InOut latent_cache, InOut rope_cache,
               const OptionalTensor& x_scale, const OptionalTensor& down_query_scale,
               const OptionalTensor& up_query_scale, const OptionalTensor& down_key_scale,
               const OptionalTensor& latent_scale, const OptionalTensor& rope_scale,
               const OptionalTensor& smooth, double query_epsilon, double key_epsilon,
               const Text& cache_mode, Out query, Out query_rope, OptionalOut query_scale),
              {.tier = kT2, .cost = prolog}) {
  prolog({VNPU_PROLOG_CALL, 1, 1, {}, {}, filled(query_scale)}, query, query_rope);
}

// The arguments are those of CANN 8.5.0 and later; before, queryNormFlag stood after cacheMode.
VNPU_OPERATOR(MlaPrologV3WeightNz,
              (const Tensor& x, const LaidOut& down_query, const LaidOut& up_query,
               const Tensor& absorbed_key, const LaidOut& down_key, const Tensor& query_gamma,
               const Tensor& key_gamma, const Tensor& sin, const Tensor& cos, InOut latent_cache,
               InOut rope_cache, const OptionalTensor& cache_index, const OptionalTensor& x_scale,
               const OptionalTensor& down_query_scale, const OptionalTensor& up_query_scale,
               const OptionalTensor& down_key_scale, const OptionalTensor& latent_scale,
               const OptionalTensor& rope_scale, const OptionalTensor& smooth,
               const OptionalTensor& actual_seq_len, const OptionalTensor&, double query_epsilon,
               double key_epsilon, const Text& cache_mode, int64_t weight_mode,
               int64_t cache_quant_mode, int64_t, int64_t joint_caches, int64_t joint_scales,
               int64_t, double query_factor, double key_factor, Out query, Out query_rope,
               OptionalOut query_scale, OptionalOut normed_query, OptionalOut normed_query_scale),
              {.tier = kT2, .cost = prolog}) {
  if (weight_mode > 2 || cache_quant_mode > 2 || joint_caches != 0 || joint_scales != 0) {
    refuse("weightQuantMode " + std::to_string(weight_mode) + ", kvCacheQuantMode " +
           std::to_string(cache_quant_mode) + ", ckvkrRepoMode " + std::to_string(joint_caches) +
           ": only floats and int8 (modes 0 to 2) in separate caches are supported.");
  }
  prolog({VNPU_PROLOG_CALL, query_factor, key_factor, filled(normed_query),
          filled(normed_query_scale), filled(query_scale), actual_seq_len},
         query, query_rope);
}

}  // namespace vnpu::ops
