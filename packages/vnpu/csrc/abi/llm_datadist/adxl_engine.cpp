// libllm_datadist: engines that read and write each other's memory, on one host.

#include "abi/llm_datadist/adxl_engine.h"

#include <map>
#include <mutex>
#include <optional>
#include <string>

#include "abi/llm_datadist/server.h"
#include "device/failure.h"
#include "device/fork.h"
#include "interface/status.h"

namespace adxl {

using namespace vnpu;
using transfer::Answer;
using transfer::End;
using transfer::Header;
using transfer::Piece;
using transfer::Socket;

namespace {

// Its words are those of aclGetRecentErrMsg.
Status tell(Status status, const std::string& what) {
  abi::report(FailureKind::kInvalidArgument, "vnpu: " + what);
  return status;
}

template <class Body>
Status guarded(const char* where, Body&& body) {
  if (is_forked_copy) {
    abi::report_forked_copy(where);
    return FAILED;
  }
  try {
    return body();
  } catch (const Failure& failure) {
    abi::report(failure.kind, failure.what());
    const bool is_theirs = failure.kind == FailureKind::kInvalidArgument ||
                           failure.kind == FailureKind::kIllegalAddress;
    return is_theirs ? PARAM_INVALID : FAILED;
  } catch (...) {
    abi::report_exception(where);
    return FAILED;
  }
}

std::string absent(const std::string& name) {
  return "no engine of this user and host is named " + name +
         ": virtual devices transfer within a host.";
}

// Both sides of a call: where the bytes are there, and here.
struct Sides {
  std::vector<Piece> there, here;
};

Sides sides_of(const std::vector<TransferOpDesc>& pieces) {
  Sides sides;
  for (const TransferOpDesc& piece : pieces) {
    sides.there.push_back({piece.remote_addr, piece.len});
    sides.here.push_back({piece.local_addr, piece.len});
  }
  return sides;
}

End ask(const Socket& socket, TransferOp operation, const Sides& sides, transfer::Deadline deadline,
        Answer& answer) {
  const Header header = {operation == READ ? Header::kRead : Header::kWrite,
                         static_cast<uint32_t>(sides.there.size())};
  std::vector<char> bytes(transfer::bytes_of(sides.here));
  End end = socket.send(&header, sizeof(header), deadline);
  if (end == End::kDone) {
    end = socket.send(sides.there.data(), sides.there.size() * sizeof(Piece), deadline);
  }
  if (end == End::kDone && operation == WRITE) {
    transfer::gather(sides.here, bytes.data());
    end = socket.send(bytes.data(), bytes.size(), deadline);
    // One who refuses answers before all bytes have come, and closes: the answer says why.
    if (end == End::kGone) end = End::kDone;
  }
  if (end == End::kDone) end = socket.receive(&answer, sizeof(answer), deadline);
  if (end != End::kDone || answer != Answer::kDone || operation == WRITE) return end;
  end = socket.receive(bytes.data(), bytes.size(), deadline);
  if (end == End::kDone) transfer::scatter(bytes.data(), sides.here);
  return end;
}

}  // namespace

class AdxlEngine::AdxlEngineImpl {
 public:
  transfer::Regions regions;
  std::optional<transfer::Server> server;
  std::mutex mutex;  // one transfer after the other
  std::map<std::string, Socket> connected;
  bool connects_itself = false;  // a transfer with who is not connected connects

  // Needs the mutex. The connection; not open where there is no such engine.
  const Socket& connection(const std::string& name);
};

const Socket& AdxlEngine::AdxlEngineImpl::connection(const std::string& name) {
  Socket& socket = connected[name];
  if (!socket.is_open()) socket = Socket::connect(name);
  return socket;
}

AdxlEngine::AdxlEngine() : impl_(std::make_unique<AdxlEngineImpl>()) {}
AdxlEngine::~AdxlEngine() = default;

Status AdxlEngine::Initialize(const AscendString& engine,
                              const std::map<AscendString, AscendString>& options) {
  return guarded("Initialize", [&]() -> Status {
    const auto connects = options.find("AutoConnect");
    impl_->connects_itself = connects != options.end() && connects->second.text() == "1";
    if (!impl_->server) impl_->server.emplace(engine.text(), impl_->regions);
    return SUCCESS;
  });
}

void AdxlEngine::Finalize() {
  impl_->server.reset();
  const std::lock_guard lock(impl_->mutex);
  impl_->connected.clear();
}

Status AdxlEngine::RegisterMem(const MemDesc& memory, MemType type, MemHandle& handle) {
  return guarded("RegisterMem", [&]() -> Status {
    handle = impl_->regions.add(memory.addr, memory.len, type == MEM_DEVICE);
    return SUCCESS;
  });
}

Status AdxlEngine::DeregisterMem(MemHandle handle) {
  return guarded("DeregisterMem", [&]() -> Status {
    if (impl_->regions.remove(handle)) return SUCCESS;
    return tell(PARAM_INVALID, "DeregisterMem of what is not registered.");
  });
}

Status AdxlEngine::Connect(const AscendString& remote, int32_t) {
  return guarded("Connect", [&]() -> Status {
    const std::string name = remote.text();
    const std::lock_guard lock(impl_->mutex);
    if (impl_->connected.contains(name)) {
      return tell(ALREADY_CONNECTED, "Connect to " + name + ", which is connected.");
    }
    if (impl_->connection(name).is_open()) return SUCCESS;
    impl_->connected.erase(name);
    return tell(FAILED, absent(name));
  });
}

Status AdxlEngine::Disconnect(const AscendString& remote, int32_t) {
  return guarded("Disconnect", [&]() -> Status {
    const std::lock_guard lock(impl_->mutex);
    if (impl_->connected.erase(remote.text()) == 1) return SUCCESS;
    return tell(NOT_CONNECTED, "Disconnect from " + remote.text() + ", which is not connected.");
  });
}

Status AdxlEngine::TransferSync(const AscendString& remote, TransferOp operation,
                                const std::vector<TransferOpDesc>& pieces, int32_t timeout_ms) {
  return guarded("TransferSync", [&]() -> Status {
    const std::string name = remote.text();
    const std::lock_guard lock(impl_->mutex);
    if (!impl_->connects_itself && !impl_->connected.contains(name)) {
      return tell(NOT_CONNECTED, "a transfer with " + name + ", which is not connected.");
    }
    const Sides sides = sides_of(pieces);
    if (pieces.empty() || timeout_ms <= 0 || pieces.size() > Header::kMostPieces ||
        !impl_->regions.hold(sides.here)) {
      return tell(PARAM_INVALID, "a transfer of " + std::to_string(pieces.size()) + " pieces in " +
                                     std::to_string(timeout_ms) +
                                     " ms: give pieces of registered memory, and a limit.");
    }
    const Socket& socket = impl_->connection(name);
    if (!socket.is_open()) {
      impl_->connected.erase(name);
      return tell(FAILED, absent(name));
    }
    Answer answer = Answer::kDone;
    const End end = ask(socket, operation, sides, transfer::after_ms(timeout_ms), answer);
    if (end == End::kDone && answer == Answer::kDone) return SUCCESS;
    impl_->connected.erase(name);  // what comes now would be of this transfer
    if (end == End::kLate) {
      return tell(TIMEOUT,
                  "a transfer with " + name + " took over " + std::to_string(timeout_ms) + " ms.");
    }
    if (end == End::kGone) return tell(FAILED, "the engine " + name + " has ended.");
    return tell(PARAM_INVALID, "the engine " + name + " has not registered all of that memory.");
  });
}

}  // namespace adxl
