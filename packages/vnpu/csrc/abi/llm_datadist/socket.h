#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>

namespace vnpu::transfer {

using Deadline = std::chrono::steady_clock::time_point;
inline Deadline after_ms(int64_t milliseconds) {
  return std::chrono::steady_clock::now() + std::chrono::milliseconds(milliseconds);
}

enum class End { kDone, kLate, kGone };

// A socket of this host by an engine's name, which only processes of the same user reach: a name is
// all that engines know of each other, and it has to be no way into their memory for anybody else.
class Socket {
 public:
  Socket() = default;
  explicit Socket(int number) : number_(number) {}
  ~Socket() { close(); }
  Socket(Socket&& other) noexcept : number_(other.number_) { other.number_ = -1; }
  Socket& operator=(Socket&& other) noexcept;
  Socket(const Socket&) = delete;
  Socket& operator=(const Socket&) = delete;

  // Throws Failure where the name is taken, or is too long.
  static Socket listen(const std::string& name);
  // Not open where nobody listens there, or somebody of another user.
  static Socket connect(const std::string& name);
  // Waits for a program that connects; not open once `stop` was called.
  Socket accept() const;

  bool is_open() const { return number_ >= 0; }
  void stop() const;  // ends the waits of other threads
  void close();
  End send(const void* bytes, size_t count, Deadline deadline) const;
  End receive(void* bytes, size_t count, Deadline deadline) const;
  // Waits for the first byte of what the other one says next. Ends with it, with its end or `stop`.
  bool has_more() const;

 private:
  bool is_ready(short events, Deadline deadline) const;
  bool is_same_user() const;
  int number_ = -1;
};

}  // namespace vnpu::transfer
