#include "abi/llm_datadist/socket.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "device/failure.h"

namespace vnpu::transfer {

namespace {

constexpr char kPrefix[] = "vnpu-adxl ";
constexpr int kForever = -1;
constexpr int kMostWaiting = 64;

// An abstract name: it has no file, and is free when its process ends.
socklen_t address_of(const std::string& name, sockaddr_un& address) {
  const std::string text = kPrefix + name;
  address = {};
  address.sun_family = AF_UNIX;
  if (text.size() + 1 > sizeof(address.sun_path)) {
    throw Failure(FailureKind::kInvalidArgument,
                  "vnpu: the name of an engine, " + name + ", is too long: give \"address:port\".");
  }
  std::memcpy(address.sun_path + 1, text.data(), text.size());
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + text.size());
}

}  // namespace

Socket& Socket::operator=(Socket&& other) noexcept {
  std::swap(number_, other.number_);
  return *this;
}

Socket Socket::listen(const std::string& name) {
  sockaddr_un address;
  const socklen_t length = address_of(name, address);
  Socket made(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!made.is_open() || ::bind(made.number_, reinterpret_cast<sockaddr*>(&address), length) != 0 ||
      ::listen(made.number_, kMostWaiting) != 0) {
    throw Failure(FailureKind::kInvalidArgument, "vnpu: an engine named " + name +
                                                     " cannot listen: " + std::strerror(errno) +
                                                     ". Another one of this host has the name?");
  }
  return made;
}

Socket Socket::connect(const std::string& name) {
  sockaddr_un address;
  const socklen_t length = address_of(name, address);
  Socket made(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!made.is_open() ||
      ::connect(made.number_, reinterpret_cast<sockaddr*>(&address), length) != 0 ||
      !made.is_same_user()) {
    return Socket();
  }
  return made;
}

Socket Socket::accept() const {
  while (true) {
    Socket made(::accept4(number_, nullptr, nullptr, SOCK_CLOEXEC));
    if (!made.is_open()) {
      if (errno == EINTR || errno == ECONNABORTED) continue;
      return made;
    }
    if (made.is_same_user()) return made;
  }
}

bool Socket::is_same_user() const {
  ucred peer = {};
  socklen_t length = sizeof(peer);
  return ::getsockopt(number_, SOL_SOCKET, SO_PEERCRED, &peer, &length) == 0 &&
         peer.uid == ::geteuid();
}

void Socket::stop() const { ::shutdown(number_, SHUT_RDWR); }

void Socket::close() {
  if (number_ >= 0) ::close(number_);
  number_ = -1;
}

bool Socket::is_ready(short events, Deadline deadline) const {
  pollfd waited = {number_, events, 0};
  while (true) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
        deadline - std::chrono::steady_clock::now());
    const int found = ::poll(&waited, 1, static_cast<int>(std::max<int64_t>(left.count(), 0)));
    if (found != -1 || errno != EINTR) return found == 1;
  }
}

End Socket::send(const void* bytes, size_t count, Deadline deadline) const {
  const char* at = static_cast<const char*>(bytes);
  while (count > 0) {
    if (!is_ready(POLLOUT, deadline)) return End::kLate;
    const ssize_t sent = ::send(number_, at, count, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0 && (errno == EAGAIN || errno == EINTR)) continue;
    if (sent <= 0) return End::kGone;
    at += sent;
    count -= static_cast<size_t>(sent);
  }
  return End::kDone;
}

End Socket::receive(void* bytes, size_t count, Deadline deadline) const {
  char* at = static_cast<char*>(bytes);
  while (count > 0) {
    if (!is_ready(POLLIN, deadline)) return End::kLate;
    const ssize_t come = ::recv(number_, at, count, MSG_DONTWAIT);
    if (come < 0 && (errno == EAGAIN || errno == EINTR)) continue;
    if (come <= 0) return End::kGone;
    at += come;
    count -= static_cast<size_t>(come);
  }
  return End::kDone;
}

bool Socket::has_more() const {
  pollfd waited = {number_, POLLIN, 0};
  while (::poll(&waited, 1, kForever) == -1 && errno == EINTR) {
  }
  char byte;
  return ::recv(number_, &byte, 1, MSG_PEEK | MSG_DONTWAIT) == 1;
}

}  // namespace vnpu::transfer
