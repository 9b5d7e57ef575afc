// Filtering of logits by rank (top-k), by probability mass (top-p) and by relative probability
// (min-p), and the choice of a token. Rows [batch, vocabulary].

#include <limits>

#include "ops/operator.h"

namespace vnpu::ops {
namespace {

constexpr double kMinusInfinity = -std::numeric_limits<double>::infinity();

// Rows sorted downwards, as far as was asked: values [batch, n], positions [batch, n].
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
    // A token stays while the mass before it is short of p; the first always does.
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

// What TopKTopPSample and its second version take and produce.
struct Sample {
  Tensor logits;
  Tensor top_k;
  Tensor top_p;
  OptionalTensor q;       // [batch, vocabulary] exponential noise
  OptionalTensor min_ps;  // [batch]
  double eps;
  int64_t largest_k;     // a larger k means: no top-k
  bool input_is_logits;  // otherwise probabilities
};

struct Chosen {
  Tensor token;          // [batch] int64
  Tensor kept;           // [batch, vocabulary] float32: the input where kept, else the fill value
  Tensor positions;      // [batch, vocabulary] int64: tokens, likeliest first
  Tensor probabilities;  // [batch, vocabulary] float32: theirs, 0 where filtered out
};

Chosen choose(const Sample& a) {
  const Tensor input = a.logits.to(at::kFloat);
  const int64_t vocabulary = input.size(1);
  const double fill = a.input_is_logits ? kMinusInfinity : 0.0;
  const Tensor k = a.top_k.to(at::kLong).unsqueeze(1);
  const Tensor p = a.top_p.to(at::kFloat).unsqueeze(1);

  const Ranked ranked = rank(input, vocabulary);
  const Tensor order = at::arange(vocabulary, at::kLong).unsqueeze(0);
  // k outside [1, min(vocabulary, largest_k)] means: no top-k.
  const Tensor use_k = k.ge(1).logical_and(k.le(std::min(vocabulary, a.largest_k)));
  Tensor keep = order.lt(k).logical_or(use_k.logical_not());

  const Tensor within_k = at::where(keep, ranked.values, fill);
  const Tensor probabilities = a.input_is_logits ? at::softmax(within_k, 1) : within_k;
  // The mass before a token decides; p <= 0 leaves the likeliest, p >= 1 leaves all.
  const Tensor before = probabilities.cumsum(1) - probabilities;
  keep = keep.logical_and(before.lt(p).logical_or(p.ge(1)).logical_or(order.eq(0)));

  Tensor filtered = at::where(keep, probabilities, 0.0);
  if (a.min_ps) {
    const Tensor min_p = a.min_ps->to(at::kFloat).unsqueeze(1);
    const Tensor likely = filtered.ge(filtered.amax(1, /*keepdim=*/true) * min_p);
    keep = keep.logical_and(at::where(min_p.ge(1), order.eq(0), likely.logical_or(min_p.le(0))));
    filtered = at::where(keep, probabilities, 0.0);
  }
  const Tensor weights = a.q ? filtered / (a.q->to(at::kFloat) + a.eps) : filtered;
  const Tensor winner = weights.argmax(1, /*keepdim=*/true);
  const Tensor kept = at::full_like(input, fill)
                          .scatter_(1, ranked.positions, at::where(keep, ranked.values, fill));
  return {ranked.positions.gather(1, winner).squeeze(1), kept, ranked.positions, filtered};
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
// topKGuess only says how the device shall search; it does not change the result.
VNPU_OPERATOR(TopKTopPSample,
              (const Tensor& logits, const Tensor& top_k, const Tensor& top_p,
               const OptionalTensor& q, double eps, bool need_logits, int64_t, Out select_idx,
               Out top_kp_select),
              {.tier = kT2, .cost = elements<40>}) {
  if (logits.numel() == 0) return;
  const Chosen chosen = choose({.logits = logits,
                                .top_k = top_k,
                                .top_p = top_p,
                                .q = q,
                                .min_ps = std::nullopt,
                                .eps = eps,
                                .largest_k = 1024,
                                .input_is_logits = true});
  store(select_idx, chosen.token);
  if (need_logits) store(top_kp_select, chosen.kept);
}
// isNeedSampleResult: the caller draws from logitsSortMasked and logitsIdx itself.
VNPU_OPERATOR(TopKTopPSampleV2,
              (const Tensor& logits, const Tensor& top_k, const Tensor& top_p,
               const OptionalTensor& q, const OptionalTensor& min_ps, double eps, bool need_logits,
               int64_t, int64_t ks_max, bool input_is_logits, bool need_sample_result,
               Out select_idx, Out top_kp_select, Out logits_idx, Out logits_sort_masked),
              {.tier = kT2, .cost = elements<40>}) {
  if (logits.numel() == 0) return;
  const Chosen chosen = choose({.logits = logits,
                                .top_k = top_k,
                                .top_p = top_p,
                                .q = need_sample_result ? std::nullopt : q,
                                .min_ps = min_ps,
                                .eps = eps,
                                .largest_k = ks_max,
                                .input_is_logits = input_is_logits});
  store(select_idx, chosen.token.reshape(select_idx.tensor.sizes()));
  if (need_logits) store(top_kp_select, chosen.kept);
  if (need_sample_result) {
    store(logits_idx, chosen.positions);
    store(logits_sort_masked, chosen.probabilities);
  }
}

}  // namespace vnpu::ops
