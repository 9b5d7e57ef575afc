#include "collective/bridge.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <mutex>
#include <thread>
#include <utility>

#include "collective/bridge_receiver.h"
#include "collective/bridge_sender.h"

namespace vnpu {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

// Time limit at process exit until the last messages have arrived and no rank of this host needs
// what this process receives for it.
constexpr std::chrono::seconds kExitLimit{10};
constexpr milliseconds kPollInterval{5};

struct Bridges {
  std::mutex mutex;
  std::vector<std::weak_ptr<Bridge>> bridges;

  static Bridges& instance() {
    // Never destroyed: its threads may outlive static destructors.
    static Bridges* const bridges = new Bridges();
    return *bridges;
  }
};

template <class Condition>
bool wait_until(const Condition& condition, steady_clock::time_point end) {
  while (!condition()) {
    if (steady_clock::now() >= end) return false;
    std::this_thread::sleep_for(kPollInterval);
  }
  return true;
}

}  // namespace

Bridge::Bridge(const Meeting& meeting, std::shared_ptr<Segment> segment, uint32_t rank)
    : ends_(meeting, std::move(segment), rank), process_(::getpid()) {}

std::shared_ptr<Bridge> Bridge::start(const Meeting& meeting, std::shared_ptr<Segment> segment,
                                      uint32_t rank) {
  const auto bridge = std::make_shared<Bridge>(meeting, std::move(segment), rank);
  {
    Bridges& all = Bridges::instance();
    std::lock_guard lock(all.mutex);
    static const int registered = std::atexit(finish_all_at_exit);
    static_cast<void>(registered);
    std::erase_if(all.bridges, [](const auto& entry) { return entry.expired(); });
    all.bridges.push_back(bridge);
  }
  const BridgeEnds& ends = bridge->ends_;
  const uint32_t here = ends.here();
  std::vector<uint32_t> sources;
  for (uint32_t r = 0; r < ends.places.size(); ++r) {
    if (!ends.is_here(r) && ends.receiver_of(r, here) == rank) sources.push_back(r);
  }
  bridge->senders_ = static_cast<uint32_t>(ends.ranks_of.size() - 1);
  bridge->receivers_ = static_cast<uint32_t>(sources.size());
  for (uint32_t host = 0; host < ends.ranks_of.size(); ++host) {
    if (host != here) std::thread([bridge, host] { bridge->send_to(host); }).detach();
  }
  for (const uint32_t source : sources) {
    std::thread([bridge, source] { bridge->receive_from(source); }).detach();
  }
  return bridge;
}

void Bridge::send_to(uint32_t host) {
  try {
    BridgeSender(ends_, host).run();
  } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch)
    // The receiving thread sees that the other host has ended, and reports it to the ranks that
    // wait.
  }
  --senders_;
}

void Bridge::receive_from(uint32_t rank) {
  try {
    BridgeReceiver(ends_, rank).run();
  } catch (const std::exception&) {
    RankBlock& block = ends_.segment->rank(rank);
    if (block.state.load() != static_cast<uint32_t>(RankState::kLeft)) {
      block.state.store(static_cast<uint32_t>(RankState::kLost), std::memory_order_release);
    }
    for (const uint32_t local : ends_.ranks_of[ends_.here()])
      ends_.segment->rank(local).bell.ring();
  }
  --receivers_;
}

std::string Bridge::loss_of(uint32_t rank) const {
  const RankBlock& block = ends_.segment->rank(rank);
  const auto state = static_cast<RankState>(block.state.load(std::memory_order_acquire));
  if (state == RankState::kLost) {
    return " is gone: its process, its host or the network to it ended";
  }
  const uint32_t receiver = ends_.receiver_of(rank, ends_.here());
  const RankBlock& mate = ends_.segment->rank(receiver);
  if (receiver != ends_.rank && mate.state.load() != static_cast<uint32_t>(RankState::kAbsent) &&
      !mate.process.alive()) {
    return " cannot be heard any more: rank " + std::to_string(receiver) + " (" +
           ends_.places[receiver].host + ":" + std::to_string(mate.process.pid) +
           "), which took in what it says, ended";
  }
  const int64_t heard = block.heard_ns.load(std::memory_order_acquire);
  const auto silent = steady_clock::now().time_since_epoch() - std::chrono::nanoseconds(heard);
  if (heard != 0 && silent > kSilence) {
    return " has said nothing for " +
           std::to_string(std::chrono::duration_cast<std::chrono::seconds>(silent).count()) +
           " s: its process was stopped, or its host or the network to it failed";
  }
  return "";
}

void Bridge::leave(milliseconds limit) {
  ends_.leaves = true;
  notify();
  wait_until([&] { return senders_ == 0; }, steady_clock::now() + limit);
}

// True if ranks of this host need what this process receives.
bool Bridge::is_needed() const {
  if (receivers_ == 0 || ends_.segment->header().failure_state != 0) return false;
  const std::vector<uint32_t>& here = ends_.ranks_of[ends_.here()];
  return std::any_of(here.begin(), here.end(), [&](uint32_t r) {
    const RankBlock& block = ends_.segment->rank(r);
    return r != ends_.rank && block.state == static_cast<uint32_t>(RankState::kJoined) &&
           block.process.alive();
  });
}

void Bridge::finish_at_exit() {
  // A fork has no threads.
  if (process_ != ::getpid()) return;
  const auto end = steady_clock::now() + kExitLimit;
  leave(kExitLimit);
  wait_until([&] { return !is_needed(); }, end);
  ends_.carrier->close();
  wait_until([&] { return receivers_ == 0 && senders_ == 0; },
             steady_clock::now() + std::chrono::seconds(1));
}

void Bridge::finish_all_at_exit() {
  std::vector<std::shared_ptr<Bridge>> bridges;
  {
    Bridges& all = Bridges::instance();
    std::lock_guard lock(all.mutex);
    for (const auto& entry : all.bridges) {
      if (auto bridge = entry.lock()) bridges.push_back(std::move(bridge));
    }
  }
  for (const auto& bridge : bridges) {
    bridge->ends_.leaves = true;
    bridge->notify();
  }
  for (const auto& bridge : bridges) bridge->finish_at_exit();
}

}  // namespace vnpu
