#include "ops/moe/expert_exchange.h"

#include <c10/core/InferenceMode.h>

#include <cstring>
#include <numeric>

#include "ops/moe/expert_messages.h"
#include "ops/quantization/int8_quantization.h"

namespace vnpu::ops {
namespace {

// Data sent with a row. Plain bytes: messages stay within one host.
struct RowLabel {
  float scale;
  float weight;
  int32_t token;
  int32_t choice;
};

// A message: how many rows each expert of the receiver gets, their labels, the rows.
class Dispatch final : public ExpertMessages {
 public:
  Dispatch(const ExpertExchange& exchange, const DispatchTensors& call, const Touched& touched)
      : ExpertMessages(exchange,
                       announce_experts(Operation::kExpertDispatch, exchange, call.x.dtype,
                                        call.x.sizes[1], {call.quantized, call.smooth.has_value()}),
                       touched),
        call_(call) {}

 private:
  size_t row_bytes() const {
    return static_cast<size_t>(call_.rows.sizes[1]) * at::elementSize(call_.rows.dtype);
  }

  Messages compose() override {
    const c10::InferenceMode guard;
    const ExpertRoutes routes = this->routes();
    if (!call_.triples) store_numbers(routes);
    Tensors tensors;
    const Tensor x = tensors.make(call_.x);
    Tensor weights;
    if (call_.weights.has_value()) weights = tensors.make(*call_.weights).contiguous();
    Messages messages(routes.size());
    for (size_t r = 0; r < routes.size(); ++r) {
      std::vector<int64_t> counts;
      std::vector<ExpertAssignment> all;
      for (const auto& of_expert : routes[r]) {
        counts.push_back(static_cast<int64_t>(of_expert.size()));
        all.insert(all.end(), of_expert.begin(), of_expert.end());
      }
      std::vector<RowLabel> labels;
      for (const ExpertAssignment& a : all) {
        const float weight = weights.defined() && a.choice < top_k()
                                 ? weights.const_data_ptr<float>()[a.token * top_k() + a.choice]
                                 : 1.0f;
        labels.push_back({1.0f, weight, a.token, a.choice});
      }
      const Tensor rows = rows_of(x, all, labels);
      const size_t head = counts.size() * sizeof(int64_t);
      const size_t middle = labels.size() * sizeof(RowLabel);
      messages[r].resize(head + middle + all.size() * row_bytes());
      std::memcpy(messages[r].data(), counts.data(), head);
      if (all.empty()) continue;
      std::memcpy(messages[r].data() + head, labels.data(), middle);
      std::memcpy(messages[r].data() + head + middle, rows.const_data_ptr(), rows.nbytes());
    }
    return messages;
  }

  // The assignments' rows as they travel; quantized ones put their scales into the labels.
  Tensor rows_of(const Tensor& x, const std::vector<ExpertAssignment>& assignments,
                 std::vector<RowLabel>& labels) const {
    if (assignments.empty()) return {};
    std::vector<int64_t> tokens, experts;
    for (const ExpertAssignment& a : assignments) {
      tokens.push_back(a.token);
      experts.push_back(a.expert);
    }
    const Tensor rows = x.index_select(0, at::tensor(tokens)).contiguous();
    if (!call_.quantized) return rows;
    Tensor wide = rows.to(at::kFloat);
    if (call_.smooth.has_value()) {
      Tensors tensors;
      wide = wide * tensors.make(*call_.smooth).index_select(0, at::tensor(experts));
    }
    const auto [values, scales] = quantize_rows(wide);
    for (size_t i = 0; i < labels.size(); ++i) {
      labels[i].scale = scales.const_data_ptr<float>()[i];
    }
    return values.contiguous();
  }

  void deliver(const Messages& received) override {
    const c10::InferenceMode guard;
    const size_t ranks = received.size();
    const auto experts = static_cast<size_t>(own_experts());
    const size_t head = experts * sizeof(int64_t);
    std::vector<const int64_t*> counts;
    std::vector<int64_t> totals;  // rows from each rank
    int64_t total = 0;
    for (const auto& message : received) {
      counts.push_back(reinterpret_cast<const int64_t*>(message.data()));
      totals.push_back(std::accumulate(counts.back(), counts.back() + experts, int64_t{0}));
      total += totals.back();
    }
    const int64_t capacity = call_.rows.sizes[0];
    if (total > capacity) {
      give_up(std::to_string(total) + " rows came for the " + std::to_string(capacity) +
              " that expandX has room for. A token must not choose an expert twice.");
    }
    Tensor rows = at::empty({total, call_.rows.sizes[1]}, at::TensorOptions(call_.rows.dtype));
    Tensor ends = at::empty({static_cast<int64_t>(experts * ranks)}, at::kInt);
    Tensor per_expert = at::zeros({static_cast<int64_t>(experts)}, at::kLong);
    std::vector<RowLabel> labels(static_cast<size_t>(total));
    std::vector<int32_t> triples(static_cast<size_t>(total) * 3);
    std::vector<int64_t> next(ranks, 0);  // row of each rank's message
    int64_t at = 0;
    auto* const target = static_cast<std::byte*>(rows.mutable_data_ptr());
    for (size_t e = 0; e < experts; ++e) {
      for (size_t r = 0; r < ranks; ++r) {
        const auto count = static_cast<size_t>(counts[r][e]);
        const std::byte* const labels_at = received[r].data() + head;
        const std::byte* const rows_at =
            labels_at + static_cast<size_t>(totals[r]) * sizeof(RowLabel);
        const auto first = static_cast<size_t>(next[r]);
        if (count > 0) {
          std::memcpy(&labels[static_cast<size_t>(at)], labels_at + first * sizeof(RowLabel),
                      count * sizeof(RowLabel));
          std::memcpy(target + static_cast<size_t>(at) * row_bytes(), rows_at + first * row_bytes(),
                      count * row_bytes());
        }
        for (size_t i = 0; i < count; ++i) {
          const size_t row = static_cast<size_t>(at) + i;
          triples[row * 3] = static_cast<int32_t>(r);
          triples[row * 3 + 1] = labels[row].token;
          triples[row * 3 + 2] = labels[row].choice;
        }
        next[r] += counts[r][e];
        at += counts[r][e];
        per_expert.mutable_data_ptr<int64_t>()[e] += counts[r][e];
        ends.mutable_data_ptr<int32_t>()[e * ranks + r] = static_cast<int32_t>(at);
      }
    }
    Tensors tensors;
    const auto front = [&](const TensorView& view, const Tensor& values) {
      tensors.make(view).narrow(0, 0, values.size(0)).copy_(values);
    };
    front(call_.rows, rows);
    front(call_.ends, ends);
    front(call_.tokens_per_expert, call_.counts_as_sums ? per_expert.cumsum(0) : per_expert);
    if (call_.triples) front(call_.assist, at::tensor(triples, at::kInt));
    if (call_.total.has_value() && call_.total->numel() > 0) {
      tensors.make(*call_.total).fill_(total);
    }
    std::vector<float> scales, weights;
    for (const RowLabel& label : labels) {
      scales.push_back(label.scale);
      weights.push_back(label.weight);
    }
    if (call_.quantized) front(*call_.row_scales, at::tensor(scales, at::kFloat));
    if (call_.weights.has_value() && call_.row_weights.has_value()) {
      front(*call_.row_weights, at::tensor(weights, at::kFloat));
    }
  }

  // For each assignment, the number of earlier assignments to the same expert.
  void store_numbers(const ExpertRoutes& routes) const {
    Tensor numbers = at::zeros({tokens() * top_k()}, at::kInt);
    for (const auto& of_rank : routes) {
      for (const auto& of_expert : of_rank) {
        int32_t number = 0;
        for (const ExpertAssignment& a : of_expert) {
          if (a.choice >= top_k()) continue;
          numbers.mutable_data_ptr<int32_t>()[a.token * top_k() + a.choice] = number++;
        }
      }
    }
    Tensors tensors;
    tensors.make(call_.assist).narrow(0, 0, numbers.size(0)).copy_(numbers);
  }

  const DispatchTensors call_;
};

// A message: the results of the receiver's rows.
class Combine final : public ExpertMessages {
 public:
  Combine(const ExpertExchange& exchange, const CombineTensors& call, const Touched& touched)
      : ExpertMessages(exchange,
                       announce_experts(Operation::kExpertCombine, exchange, call.rows.dtype,
                                        call.rows.sizes[1], {}),
                       touched),
        call_(call) {}

 private:
  Messages compose() override {
    const c10::InferenceMode guard;
    Tensors tensors;
    const Tensor rows = tensors.make(call_.rows).contiguous();
    const auto* const source = static_cast<const std::byte*>(rows.const_data_ptr());
    const size_t row_bytes = static_cast<size_t>(rows.size(1)) * rows.element_size();
    const Tensor ends = tensors.make(call_.ends).contiguous();
    const int32_t* const end_of = ends.const_data_ptr<int32_t>();
    Messages messages(group().ranks());
    int64_t begin = 0;
    for (int64_t e = 0; e < own_experts(); ++e) {
      for (size_t r = 0; r < messages.size(); ++r) {
        const int64_t end = end_of[static_cast<size_t>(e) * messages.size() + r];
        if (end < begin || end > rows.size(0)) {
          give_up("epSendCounts say that rows " + std::to_string(begin) + " to " +
                  std::to_string(end) + " of " + std::to_string(rows.size(0)) +
                  " are of one rank and expert. Pass epRecvCounts of the dispatch.");
        }
        messages[r].insert(messages[r].end(), source + static_cast<size_t>(begin) * row_bytes,
                           source + static_cast<size_t>(end) * row_bytes);
        begin = end;
      }
    }
    return messages;
  }

  void deliver(const Messages& received) override {
    const c10::InferenceMode guard;
    Tensors tensors;
    const Tensor sums = tensors.make(call_.sums);
    const int64_t hidden = call_.rows.sizes[1];
    const int64_t choices = top_k() + places().shared_choices();
    const ExpertRoutes routes = this->routes();
    const size_t row_bytes = static_cast<size_t>(hidden) * at::elementSize(call_.rows.dtype);
    std::vector<std::byte> all;
    Tensor row_of = at::full({tokens(), choices}, -1, at::kLong);
    int64_t row = 0;
    for (size_t r = 0; r < received.size(); ++r) {
      const int64_t first = row;
      for (const auto& of_expert : routes[r]) {
        for (const ExpertAssignment& a : of_expert) {
          row_of.mutable_data_ptr<int64_t>()[a.token * choices + a.choice] = row++;
        }
      }
      const size_t expected = static_cast<size_t>(row - first) * row_bytes;
      if (received[r].size() != expected) {
        give_up(group().describe(static_cast<uint32_t>(r)) + " returned " +
                std::to_string(received[r].size() / row_bytes) + " rows of " +
                std::to_string(expected / row_bytes) +
                ". Combine needs expertIds and xActiveMask as dispatch had them.");
      }
      all.insert(all.end(), received[r].begin(), received[r].end());
    }
    Tensor sum = at::zeros(sums.sizes(), at::kFloat);
    if (row > 0) {
      const Tensor rows = at::from_blob(all.data(), {row, hidden}, call_.rows.dtype).to(at::kFloat);
      const Tensor weights = tensors.make(call_.weights);
      for (int64_t i = 0; i < choices; ++i) {
        const Tensor which = row_of.select(1, i);
        Tensor part = rows.index_select(0, which.clamp_min(0));
        if (i < top_k()) part = part * weights.select(1, i).unsqueeze(-1);
        sum = sum + part.masked_fill(which.lt(0).unsqueeze(-1), 0);
      }
    }
    if (call_.shared_x.has_value()) sum = sum + tensors.make(*call_.shared_x).to(at::kFloat);
    store(sums, sum);
  }

  const CombineTensors call_;
};

}  // namespace

TaskPtr dispatch_to_experts(const ExpertExchange& exchange, const DispatchTensors& tensors,
                            const Touched& touched) {
  return std::make_shared<Dispatch>(exchange, tensors, touched);
}

TaskPtr combine_from_experts(const ExpertExchange& exchange, const CombineTensors& tensors,
                             const Touched& touched) {
  return std::make_shared<Combine>(exchange, tensors, touched);
}

}  // namespace vnpu::ops
