#include "carrier/gloo_carrier.h"

#include <ATen/ops/from_blob.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include <stdexcept>
#include <vector>

namespace vnpu {
namespace {

at::Tensor bytes_at(void* data, size_t bytes) {
  return at::from_blob(data, {static_cast<int64_t>(bytes)}, at::TensorOptions(at::kByte));
}

}  // namespace

GlooCarrier::GlooCarrier(const std::string& name)
    : group_(c10d::resolve_process_group(name)),
      backend_(group_->getBackend(c10::DeviceType::CPU)) {
  c10d::unregister_process_group(name);
}

template <class Begin>
void GlooCarrier::complete(const Begin& begin, std::chrono::milliseconds limit) {
  Work work;
  {
    std::lock_guard lock(mutex_);
    if (is_closed_) throw std::runtime_error("the connection is closed");
    work = begin();
    under_way_.insert(work.get());
  }
  const auto done = [&] {
    std::lock_guard lock(mutex_);
    under_way_.erase(work.get());
    return !is_closed_;
  };
  try {
    const bool is_whole = work->wait(limit);
    if (!done() || !is_whole) throw std::runtime_error("the connection was closed");
  } catch (...) {
    done();
    throw;
  }
}

void GlooCarrier::send(uint32_t to, Channel channel, const void* data, size_t bytes,
                       std::chrono::milliseconds limit) {
  // Only read: gloo has one type for both directions.
  std::vector<at::Tensor> message{bytes_at(const_cast<void*>(data), bytes)};
  complete([&] { return backend_->send(message, static_cast<int>(to), static_cast<int>(channel)); },
           limit);
}

void GlooCarrier::receive(uint32_t from, Channel channel, void* data, size_t bytes,
                          std::chrono::milliseconds limit) {
  std::vector<at::Tensor> message{bytes_at(data, bytes)};
  complete(
      [&] { return backend_->recv(message, static_cast<int>(from), static_cast<int>(channel)); },
      limit);
}

void GlooCarrier::close() {
  std::lock_guard lock(mutex_);
  is_closed_ = true;
  for (c10d::Work* work : under_way_) work->abort();
}

}  // namespace vnpu
