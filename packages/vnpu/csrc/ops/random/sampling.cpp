// Filtering of logits by rank (top-k) and by probability mass (top-p). Rows [batch, vocabulary].

#include <limits>

#include "ops/operator.h"

namespace vnpu::ops {
namespace {

constexpr double kMinusInfinity = -std::numeric_limits<double>::infinity();

// The n largest of each row in descending order: values [batch, n], positions [batch, n].
struct Ranked {
  Tensor values;
  Tensor positions;
};

Ranked rank(const Tensor& logits, int64_t count) {
  // A full stable sort costs many times a selection of the largest.
  auto [values, positions] = count < logits.size(1) / 2
                                 ? at::topk(logits, count, 1, /*largest=*/true, /*sorted=*/true)
                                 : at::sort(logits, /*stable=*/true, 1, /*descending=*/true);
  return {values.narrow(1, 0, count), positions.narrow(1, 0, count)};
}

// -inf where a logit is smaller than its row's k-th largest; equal ones stay. k [batch]; rows whose
// k is the vocabulary or more stay as they are.
Tensor keep_top_k(const Tensor& logits, const Tensor& k) {
  const int64_t vocabulary = logits.size(1);
  const Tensor limited = k.lt(vocabulary).unsqueeze(1);
  const Tensor ranks = at::where(limited, k.to(at::kLong).clamp_min(1).unsqueeze(1), 1);
  const Ranked ranked = rank(logits, ranks.max().item<int64_t>());
  const Tensor threshold = ranked.values.gather(1, ranks - 1);
  return logits.masked_fill(logits.lt(threshold).logical_and(limited), kMinusInfinity);
}

// -inf outside the smallest set of likeliest tokens whose probability reaches p. p [batch]; rows
// whose p is 1 or more stay as they are.
Tensor keep_top_p(const Tensor& logits, const Tensor& p) {
  const int64_t vocabulary = logits.size(1);
  Tensor result = logits.clone();
  Tensor pending = at::nonzero(p.to(at::kFloat).lt(1)).squeeze(1);
  // Most distributions reach p within their first tokens; the others are sorted whole.
  for (const int64_t count : {std::min<int64_t>(vocabulary, 1024), vocabulary}) {
    if (pending.numel() == 0) break;
    const Tensor rows = logits.index_select(0, pending);
    const Tensor mass = p.to(at::kFloat).index_select(0, pending).unsqueeze(1);
    const Ranked ranked = rank(rows, count);
    const Tensor reached =
        at::exp(ranked.values - at::logsumexp(rows, 1, /*keepdim=*/true)).cumsum(1);
    // A token stays if the likelier tokens together have less than p; the first always stays.
    Tensor keep = at::ones_like(reached, at::kBool);
    keep.narrow(1, 1, count - 1).copy_(reached.narrow(1, 0, count - 1) < mass);
    const Tensor kept = at::where(keep, ranked.values, kMinusInfinity);
    result.index_copy_(0, pending,
                       at::full_like(rows, kMinusInfinity).scatter_(1, ranked.positions, kept));
    if (count == vocabulary) break;
    const Tensor covered = reached.select(1, count - 1).ge(mass.squeeze(1));
    pending = pending.masked_select(covered.logical_not());
  }
  return result;
}

}  // namespace

VNPU_OPERATOR(ApplyTopKTopP,
              (const Tensor& logits, const OptionalTensor& p, const OptionalTensor& k, Out out),
              {.tier = kT2, .cost = elements<40>}) {
  require(logits.dim() == 2, "logits must be [batch, vocabulary]");
  if (logits.numel() == 0) return;
  Tensor kept = logits.to(at::kFloat);
  if (k) kept = keep_top_k(kept, *k);
  if (p) kept = keep_top_p(kept, *p);
  store(out, kept);
}

}  // namespace vnpu::ops
