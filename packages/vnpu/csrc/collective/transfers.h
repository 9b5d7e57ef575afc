#pragma once

#include <vector>

#include "collective/element.h"
#include "collective/group.h"
#include "device/task.h"

namespace vnpu {

// One message to or from another rank (or this one).
struct Transfer {
  enum class Direction { kSend, kReceive };
  Direction direction;
  void* buffer;    // device address; only read for a send
  uint64_t count;  // elements
  ElementType type;
  uint32_t peer;
};

// Messages that are under way together: none waits for another, except that messages to (or from)
// one rank keep their order. A send is done when its last part fits into the mailbox.
class Transfers final : public Task {
 public:
  Transfers(GroupPtr group, const char* name, const std::vector<Transfer>& transfers);
  ~Transfers() override;
  Progress advance() override;
  void wait(std::chrono::microseconds limit) override { group_->wait(seen_, limit); }
  bool waits_outside() const override { return outside_; }
  std::string waiting_for() const override;
  void rewind() override;
  const GroupPtr& group() const { return group_; }

 private:
  struct Message {
    Transfer transfer;
    std::byte* data;
    size_t bytes;
    uint32_t chunks;
    uint32_t done = 0;  // chunks
    bool complete = false;
  };

  Group::Turn& turn(const Message& message) const;
  // Moves what can be moved now.
  void proceed(Message& message);
  void send(Message& message);
  void receive(Message& message);
  bool waits_for(uint32_t rank) const;
  void release_turns();

  const GroupPtr group_;
  const std::string call_site_;  // empty unless an observer needs it
  std::vector<Message> messages_;
  uint32_t seen_ = 0;  // rings of the bell before the last look at the mailboxes
  std::atomic<bool> outside_{false};
  Group::Wait waited_;
};

}  // namespace vnpu
