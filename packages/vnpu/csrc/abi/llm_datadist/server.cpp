#include "abi/llm_datadist/server.h"

namespace vnpu::transfer {

namespace {

// What one who has begun to ask may take for the rest, and to take the answer.
constexpr int64_t kRequestLimitMs = 60'000;

}  // namespace

Server::Server(const std::string& name, const Regions& regions)
    : regions_(regions), listening_(Socket::listen(name)), thread_([this] { run(); }) {}

Server::~Server() {
  listening_.stop();
  thread_.join();
  const std::lock_guard lock(mutex_);
  for (Client& client : clients_) client.socket.stop();
  for (Client& client : clients_) client.thread.join();
}

void Server::run() {
  while (true) {
    Socket socket = listening_.accept();
    if (!socket.is_open()) return;
    const std::lock_guard lock(mutex_);
    join_ended();
    Client& client = clients_.emplace_back();
    client.socket = std::move(socket);
    client.thread = std::thread([this, &client] { serve(client); });
  }
}

void Server::join_ended() {
  for (auto client = clients_.begin(); client != clients_.end();) {
    if (!client->has_ended) {
      ++client;
      continue;
    }
    client->thread.join();
    client = clients_.erase(client);
  }
}

void Server::serve(Client& client) {
  while (client.socket.has_more() && answer_one(client.socket)) {
  }
  client.socket.stop();
  client.has_ended = true;
}

// False where the connection is of no more use.
bool Server::answer_one(const Socket& socket) const {
  const Deadline deadline = after_ms(kRequestLimitMs);
  Header header;
  if (socket.receive(&header, sizeof(header), deadline) != End::kDone) return false;
  if (header.operation > Header::kWrite || header.pieces > Header::kMostPieces) return false;
  std::vector<Piece> pieces(header.pieces);
  if (socket.receive(pieces.data(), pieces.size() * sizeof(Piece), deadline) != End::kDone) {
    return false;
  }
  const bool is_held = regions_.hold(pieces);
  const Answer answer = is_held ? Answer::kDone : Answer::kNotRegistered;
  // What was not registered is not read on either side: a writer's bytes are on their way.
  if (!is_held) {
    socket.send(&answer, sizeof(answer), deadline);
    return false;
  }
  std::vector<char> bytes(bytes_of(pieces));
  if (header.operation == Header::kRead) {
    gather(pieces, bytes.data());
    return socket.send(&answer, sizeof(answer), deadline) == End::kDone &&
           socket.send(bytes.data(), bytes.size(), deadline) == End::kDone;
  }
  if (socket.receive(bytes.data(), bytes.size(), deadline) != End::kDone) return false;
  scatter(bytes.data(), pieces);
  return socket.send(&answer, sizeof(answer), deadline) == End::kDone;
}

}  // namespace vnpu::transfer
