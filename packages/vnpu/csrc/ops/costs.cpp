#include "ops/costs.h"

#include <algorithm>

#include "device/failure.h"
#include "ops/parameters.h"
#include "timing/model.h"

namespace vnpu::ops {
const ArgumentValue* Call::find(std::string_view name) const {
  for (size_t i = 0; i < names_.size(); ++i) {
    if (names_[i] == name) return &values_[i];
  }
  return nullptr;
}

bool Call::has(std::string_view name) const {
  const ArgumentValue* const value = find(plain_name(name));
  if (value == nullptr || value->kind == ArgumentValue::Kind::kAbsent) return false;
  return value->kind != ArgumentValue::Kind::kTensors || value->tensors.count > 0;
}

std::vector<const TensorView*> Call::tensors(std::string_view name) const {
  const ArgumentValue* const value = find(plain_name(name));
  std::vector<const TensorView*> views;
  if (value == nullptr) return views;
  if (value->kind == ArgumentValue::Kind::kTensor) views.push_back(value->tensor);
  if (value->kind == ArgumentValue::Kind::kTensors) {
    for (uint32_t i = 0; i < value->tensors.count; ++i) views.push_back(&value->tensors[i]);
  }
  return views;
}

const TensorView& Call::tensor(std::string_view name) const {
  const std::vector<const TensorView*> views = tensors(name);
  if (views.empty()) {
    throw Failure(FailureKind::kInternal,
                  "vnpu: a cost asks for the tensor '" + std::string(name) +
                      "', which the call has not. The cost's row is wrong.");
  }
  return *views.front();
}

int64_t Call::integer(std::string_view name, int64_t otherwise) const {
  const ArgumentValue* const value = find(plain_name(name));
  const bool is_there = value != nullptr && value->kind == ArgumentValue::Kind::kInteger;
  return is_there ? value->integer : otherwise;
}

const std::vector<int64_t>* Call::integers(std::string_view name) const {
  const ArgumentValue* const value = find(plain_name(name));
  const bool is_there = value != nullptr && value->kind == ArgumentValue::Kind::kIntegers;
  return is_there ? value->integers : nullptr;
}

const std::string& Call::text(std::string_view name) const {
  static const std::string none;
  const ArgumentValue* const value = find(plain_name(name));
  return value != nullptr && value->kind == ArgumentValue::Kind::kText ? *value->text : none;
}

int64_t Call::largest() const {
  int64_t most = 0;
  for (size_t i = 0; i < names_.size(); ++i) {
    const ArgumentValue& value = values_[i];
    if (value.kind == ArgumentValue::Kind::kTensor) most = std::max(most, value.tensor->numel());
    if (value.kind != ArgumentValue::Kind::kTensors) continue;
    for (uint32_t j = 0; j < value.tensors.count; ++j) {
      most = std::max(most, value.tensors[j].numel());
    }
  }
  return most;
}

int64_t bytes_of(const TensorView& view) {
  return view.numel() * static_cast<int64_t>(c10::elementSize(view.dtype));
}

timing::Arithmetic arithmetic_of(const TensorView& view) {
  switch (c10::elementSize(view.dtype)) {
    case 1: return timing::Arithmetic::kInt8;
    case 2:
      return view.dtype == at::kHalf ? timing::Arithmetic::kFloat16 : timing::Arithmetic::kBfloat16;
    default: return timing::Arithmetic::kFloat32;
  }
}

void for_each_element(const Call& call, Work& work, int64_t operations) {
  const int64_t elements = call.largest();
  work.vector_operations += operations * elements;
  work.wide = elements > 0 && (work.read_bytes + work.written_bytes) / elements >= 4 * 2;
}

void multiply(Work& work, const TensorView& left, const TensorView& right) {
  work.kind = timing::Work::Class::kMatmul;
  timing::MatrixProduct product;
  product.k = size_of(left, -1);
  product.n = right.dims < 2 ? 1 : size_of(right, -1);
  for (int i = 0; i + 2 < right.dims; ++i) product.batch *= right.sizes[i];
  if (product.k > 0 && product.batch > 0) {
    product.m = left.numel() / product.k / product.batch;
  }
  product.arithmetic = arithmetic_of(left);
  work.products.push_back(product);
}

int64_t routed_rows(int64_t rows) {
  const timing::Model* const model = timing::Model::instance();
  return model == nullptr ? rows : model->routed_rows(rows);
}

int64_t routed_bytes(const TensorView& rows) {
  const int64_t count = size_of(rows, -1) > 0 ? rows.numel() / size_of(rows, -1) : 0;
  return count > 0 ? bytes_of(rows) / count * routed_rows(count) : 0;
}

void write_part(Work& work, int64_t bytes, int64_t operations) {
  work.read_bytes = bytes;
  work.written_bytes = bytes;
  work.vector_operations = operations;
}

}  // namespace vnpu::ops
