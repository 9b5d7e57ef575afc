#include "ops/legacy/legacy_operator.h"

#include <map>
#include <sstream>

#include "device/core_limits.h"
#include "ops/costs.h"
#include "ops/handles.h"
#include "ops/legacy/private_layouts.h"

namespace vnpu::ops {
namespace {

struct Row {
  LegacyBody body;
  LegacyWork work;
};

std::map<std::string, Row>& rows() {
  static auto* const all = new std::map<std::string, Row>();
  return *all;
}

// All memory behind a tensor, dense.
aclTensor memory_of(const char* name, const abi::LegacyTensor& tensor) {
  if (tensor.storage_sizes.size() > static_cast<size_t>(kMaxDims)) {
    throw Failure(FailureKind::kOperatorInvalid,
                  std::string(name) + ": a tensor of " +
                      std::to_string(tensor.storage_sizes.size()) +
                      " dimensions in memory; at most 8 are possible.");
  }
  aclTensor memory;
  TensorView& view = memory.view;
  view.storage = tensor.data;
  view.dtype = read_dtype(tensor.dtype);
  view.dims = static_cast<int8_t>(tensor.storage_sizes.size());
  int64_t step = 1;
  for (size_t i = tensor.storage_sizes.size(); i-- > 0;) {
    view.sizes[i] = tensor.storage_sizes[i];
    view.strides[i] = step;
    step *= tensor.storage_sizes[i];
  }
  return memory;
}

// A tensor of a call as it lies in memory, and what it stands for.
struct LaidOutTensor {
  TensorView memory;
  Tensor on_host = {};  // a copy, of what the caller keeps only for the call
  int32_t format = 0;
  std::vector<int64_t> sizes = {};

  Tensor plain(Tensors& tensors) const {
    // Contiguous: ATen's rounding depends on the memory's layout.
    return plain_of(on_host.defined() ? on_host : tensors.make(memory), format, sizes).contiguous();
  }
};

class LegacyTask final : public OperatorTask {
 public:
  // name: lives as long as the process
  LegacyTask(const char* name, const Row& row, const abi::LegacyCall& call)
      : OperatorTask(name), body_(row.body), attributes_(call.attributes) {
    Launch launch{name};
    for (const abi::LegacyTensor& input : call.inputs) {
      launch.next();
      if (input.dtype < 0) {
        inputs_.emplace_back();
        continue;
      }
      const aclTensor memory = memory_of(name, input);
      LaidOutTensor kept{.memory = memory.view, .format = input.format, .sizes = input.sizes};
      if (input.on_host) {
        kept.on_host =
            at::from_blob(input.data, input.storage_sizes, at::TensorOptions(memory.view.dtype))
                .clone();
      } else {
        launch.view(&memory, false, true);
      }
      inputs_.emplace_back(std::move(kept));
    }
    for (const abi::LegacyTensor& output : call.outputs) {
      const aclTensor memory = memory_of(name, output);
      launch.next().view(&memory, true, false);
      outputs_.push_back({.memory = memory.view, .format = output.format, .sizes = output.sizes});
    }
    touched = std::move(launch.touched);
    if (keeps_work) work = work_of_call(row.work);
  }

 private:
  void run() override {
    Tensors tensors;
    std::vector<Tensor> inputs;
    for (const auto& input : inputs_) {
      inputs.push_back(input ? input->plain(tensors) : Tensor());
    }
    std::vector<std::vector<int64_t>> sizes;
    for (const LaidOutTensor& output : outputs_) sizes.push_back(output.sizes);
    const LegacyArguments arguments(std::move(inputs), std::move(sizes), attributes_);
    const Results results = body_(arguments);
    if (const auto name = arguments.unseen_attribute()) {
      refuse("attribute '" + *name + "' is not known here; see csrc/ops/legacy");
    }
    for (size_t i = 0; i < results.size() && i < outputs_.size(); ++i) {
      const LaidOutTensor& output = outputs_[i];
      const Tensor memory = tensors.make(output.memory);
      const Tensor result = results[i].to(output.memory.dtype);
      const bool is_number = result.numel() == 1;
      lay_out(is_number ? result.reshape({}).expand(output.sizes) : result.expand(output.sizes),
              memory, output.format, output.sizes);
    }
  }

  std::shared_ptr<const timing::Work> work_of_call(LegacyWork kind) const {
    auto counted = std::make_shared<timing::Work>();
    int64_t elements = 0;
    const auto count = [&](const LaidOutTensor& tensor, int64_t& bytes) {
      if (tensor.on_host.defined()) return;
      elements = std::max(elements, tensor.memory.numel());
      counted->wide |= at::elementSize(tensor.memory.dtype) >= 4;
      bytes += bytes_of(tensor.memory);
    };
    for (const auto& input : inputs_) {
      if (input) count(*input, counted->read_bytes);
    }
    for (const LaidOutTensor& output : outputs_) count(output, counted->written_bytes);
    counted->vector_operations = elements;
    if (kind == LegacyWork::kProduct && inputs_[0] && outputs_[0].sizes.size() >= 2) {
      const std::vector<int64_t>& out = outputs_[0].sizes;
      timing::MatrixProduct product;
      product.n = out.back();
      product.m = out[out.size() - 2];
      const int64_t written = c10::multiply_integers(out);
      product.batch = product.m * product.n == 0 ? 0 : written / (product.m * product.n);
      const int64_t rows_read = product.batch * product.m;
      product.k = rows_read == 0 ? 0 : c10::multiply_integers(inputs_[0]->sizes) / rows_read;
      product.arithmetic = arithmetic_of(inputs_[0]->memory);
      counted->kind = timing::Work::Class::kMatmul;
      counted->vector_operations = 0;
      counted->products.push_back(product);
    }
    return counted;
  }

  LegacyBody body_;
  std::vector<std::optional<LaidOutTensor>> inputs_;
  std::vector<LaidOutTensor> outputs_;
  abi::LegacyAttributes attributes_;
};

}  // namespace

const Tensor& LegacyArguments::operator[](size_t index) const {
  if (!has(index)) refuse("input " + std::to_string(index) + " is missing");
  return inputs_[index];
}

std::vector<int64_t> LegacyArguments::numbers(size_t index) const {
  const Tensor all = (*this)[index].to(at::kLong).reshape(-1).contiguous();
  return {all.const_data_ptr<int64_t>(), all.const_data_ptr<int64_t>() + all.numel()};
}

template <class Value>
const Value* LegacyArguments::find(const char* name) const {
  seen_.insert(name);
  const auto found = attributes_.find(name);
  if (found == attributes_.end()) return nullptr;
  const Value* const value = std::get_if<Value>(&found->second);
  if (value == nullptr) refuse(std::string("attribute '") + name + "' has another type");
  return value;
}

std::optional<std::string> LegacyArguments::unseen_attribute() const {
  for (const auto& [name, value] : attributes_) {
    // Keys with a line in front choose an engine.
    if (name[0] != '_' && seen_.count(name) == 0) return name;
  }
  return std::nullopt;
}

bool LegacyArguments::flag(const char* name, bool otherwise) const {
  const bool* const value = find<bool>(name);
  return value == nullptr ? otherwise : *value;
}
int64_t LegacyArguments::integer(const char* name, int64_t otherwise) const {
  const int64_t* const value = find<int64_t>(name);
  return value == nullptr ? otherwise : *value;
}
double LegacyArguments::real(const char* name, double otherwise) const {
  const double* const value = find<double>(name);
  return value == nullptr ? otherwise : *value;
}
std::vector<int64_t> LegacyArguments::integers(const char* name) const {
  const auto* const value = find<std::vector<int64_t>>(name);
  return value == nullptr ? std::vector<int64_t>() : *value;
}

bool legacy(const char* names, LegacyBody body, LegacyWork work) {
  std::istringstream words(names);
  for (std::string name; words >> name;) rows()[name] = {body, work};
  return true;
}

TaskPtr legacy_task(const abi::LegacyCall& call) {
  const auto found = rows().find(call.type);
  if (found == rows().end()) return nullptr;
  auto task = std::make_shared<LegacyTask>(found->first.c_str(), found->second, call);
  task->cores = core_limits::of_launch();
  return task;
}

}  // namespace vnpu::ops
