#include "ops/passed_calls.h"

#include <algorithm>
#include <cstring>

namespace vnpu::ops {
namespace {

using Form = std::vector<uint64_t>;
using Kind = ArgumentValue::Kind;

void add_real(Form& form, double value) {
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(bits));
  form.push_back(bits);
}

void add_scalar(Form& form, const Scalar& value) {
  form.push_back(static_cast<uint64_t>(value.type()));
  if (value.isComplex()) {
    add_real(form, value.toComplexDouble().real());
    add_real(form, value.toComplexDouble().imag());
  } else if (value.isFloatingPoint()) {
    add_real(form, value.toDouble());
  } else {
    form.push_back(static_cast<uint64_t>(value.toLong()));
  }
}

void add_view(Form& form, const TensorView& view) {
  form.push_back(static_cast<uint64_t>(view.dims) | static_cast<uint64_t>(view.dtype) << 8 |
                 static_cast<uint64_t>(static_cast<uint32_t>(view.format)) << 32);
  for (int i = 0; i < view.dims; ++i) form.push_back(static_cast<uint64_t>(view.sizes[i]));
  for (int i = 0; i < view.dims; ++i) form.push_back(static_cast<uint64_t>(view.strides[i]));
}

// Each part begins with its number of entries, so that different calls have different encodings.
void add_value(Form& form, const ArgumentValue& value) {
  form.push_back(static_cast<uint64_t>(value.kind));
  switch (value.kind) {
    case Kind::kAbsent:
    case Kind::kOther: break;
    case Kind::kTensor: add_view(form, *value.tensor); break;
    case Kind::kTensors:
      form.push_back(value.tensors.count);
      for (size_t i = 0; i < value.tensors.count; ++i) add_view(form, value.tensors[i]);
      break;
    case Kind::kIntegers:
      form.push_back(value.integers->size());
      form.insert(form.end(), value.integers->begin(), value.integers->end());
      break;
    case Kind::kInteger: form.push_back(static_cast<uint64_t>(value.integer)); break;
    case Kind::kReal: add_real(form, value.real); break;
    case Kind::kScalar:
      form.push_back(static_cast<uint64_t>(value.scalar->dtype));
      add_scalar(form, value.scalar->value);
      break;
    case Kind::kText: {
      const std::string& text = *value.text;
      form.push_back(text.size());
      for (size_t i = 0; i < text.size(); i += sizeof(uint64_t)) {
        uint64_t bytes = 0;
        std::memcpy(&bytes, text.data() + i, std::min(sizeof(bytes), text.size() - i));
        form.push_back(bytes);
      }
      break;
    }
  }
}

// Valid until this thread's next call.
const Form& form_of(const ArgumentValue* arguments, const std::vector<int>& positions) {
  thread_local Form form;
  form.clear();
  for (const int position : positions) add_value(form, arguments[position]);
  return form;
}

}  // namespace

std::optional<uint64_t> PassedCalls::find(const ArgumentValue* arguments) {
  const Form& form = form_of(arguments, positions_);
  const std::lock_guard lock(mutex_);
  const Call& call = slot_of(form);
  return call.form == form ? std::optional(call.workspace_bytes) : std::nullopt;
}

void PassedCalls::remember(const ArgumentValue* arguments, uint64_t workspace_bytes) {
  const Form& form = form_of(arguments, positions_);
  const std::lock_guard lock(mutex_);
  slot_of(form) = Call{form, workspace_bytes};
}

PassedCalls::Call& PassedCalls::slot_of(const Form& form) {
  uint64_t hash = form.size();
  for (const uint64_t word : form) {
    hash = (hash ^ word) * 0x9e3779b97f4a7c15;  // 2^64 over the golden ratio
    hash ^= hash >> 32;
  }
  return calls_[hash >> (64 - kSlotBits)];
}

}  // namespace vnpu::ops
