#pragma once

#include <atomic>
#include <list>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "abi/llm_datadist/regions.h"
#include "abi/llm_datadist/socket.h"

namespace vnpu::transfer {

// What an engine asks another one for: a header, the pieces there, and where it writes the bytes.
// The answer is a status, and where it reads the bytes.
struct Header {
  static constexpr uint32_t kRead = 0;
  static constexpr uint32_t kWrite = 1;
  static constexpr uint32_t kMostPieces = 1 << 20;
  uint32_t operation;
  uint32_t pieces;
};
enum class Answer : uint32_t { kDone, kNotRegistered };

// Serves the memory of an engine to those that connect, until it is destroyed.
class Server {
 public:
  Server(const std::string& name, const Regions& regions);
  ~Server();

 private:
  struct Client {
    Socket socket;
    std::thread thread;
    std::atomic<bool> has_ended{false};
  };
  void run();
  void serve(Client& client);
  bool answer_one(const Socket& socket) const;
  void join_ended();

  const Regions& regions_;
  Socket listening_;
  std::mutex mutex_;
  std::list<Client> clients_;
  std::thread thread_;
};

}  // namespace vnpu::transfer
