// The operators before MLA's attention: norm, rotary embedding, and the write of the latent and the
// rotary part to their caches.

#include "ops/attention/latent_cache.h"
#include "ops/attention/rotary.h"
#include "ops/reduction/rms_norm.h"
#include "ops/shared_rules.h"

namespace vnpu::ops {
namespace {

Tensor wide_rms_norm(const Tensor& x, const Tensor& gamma, double epsilon) {
  const Tensor wide = x.to(at::kFloat);
  return wide * at::rsqrt(wide.square().mean(-1, /*keepdim=*/true) + epsilon) *
         gamma.to(at::kFloat);
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
  if (kv.scalar_type() == at::kFloat) {  // bit-exact with the models' definition
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

}  // namespace vnpu::ops
