// New groups of some of a group's ranks.

#include "collective/group.h"
#include "collective/phantom.h"

namespace vnpu {
namespace {

using std::chrono::steady_clock;

constexpr std::chrono::milliseconds kOfferInterval{20};

// Never 0, which stands for nothing.
uint64_t signature_of(const std::vector<uint32_t>& members, uint64_t id) {
  uint64_t hash = 14695981039346656037u;  // FNV-1a, by words
  const auto add = [&](uint64_t word) { hash = (hash ^ word) * 1099511628211u; };
  add(id);
  for (const uint32_t member : members) add(member);
  return hash | 1;
}

}  // namespace

void Group::derive(const std::vector<uint32_t>& members, uint64_t id,
                   const std::function<void(const Invitation&)>& join) {
  if (ranks_are_phantoms()) {
    join(invite());
    return;
  }
  const uint64_t signature = signature_of(members, id);
  if (members.front() != rank_) {
    join(accept(members.front(), signature, id));
    return;
  }
  std::lock_guard lock(offering_);
  const Invitation invitation = invite();
  offer(signature, invitation);
  try {
    join(invitation);
  } catch (...) {
    offer(0, {});
    throw;
  }
  offer(0, {});
}

void Group::offer(uint64_t signature, const Invitation& invitation) {
  Offer& offer = own().offer;
  offer.version.fetch_add(1, std::memory_order_acq_rel);
  offer.signature = signature;
  offer.invitation = invitation;
  offer.version.fetch_add(1, std::memory_order_release);
  ring_others();
}

Invitation Group::accept(uint32_t first, uint64_t signature, uint64_t id) {
  const Offer& offer = segment_->rank(first).offer;
  const std::string what = "the start of group " + std::to_string(id) + " of " + describe(first) +
                           ", derived from group " + name_;
  const auto deadline = steady_clock::now() + limits_.connect;
  for (;;) {
    const uint32_t seen = rings();
    throw_if_failed();
    const uint32_t version = offer.version.load(std::memory_order_acquire);
    if (version % 2 == 0 && offer.signature == signature) {
      const Invitation invitation = offer.invitation;
      std::atomic_thread_fence(std::memory_order_acquire);
      std::lock_guard lock(accepting_);
      std::string& newest = accepted_[first];
      // The first member may not have taken back the offer of a group that has gone since.
      if (offer.version.load(std::memory_order_relaxed) == version &&
          newest != invitation.identity) {
        newest = invitation.identity;
        return invitation;
      }
    }
    if (!end_of(first).empty()) {
      throw Failure(FailureKind::kRemoteLost, "vnpu: " + describe(first) + " ended or left while " +
                                                  describe(rank_) + " waited for " + what +
                                                  ". Its own output says why.");
    }
    if (steady_clock::now() >= deadline) {
      throw Failure(FailureKind::kRemoteTimeout,
                    "vnpu: " + describe(rank_) + " waited " +
                        std::to_string(limits_.connect.count()) + " s for " + what +
                        ". All of its ranks must ask for it, with the same ranks in the same "
                        "order and the same id; a longer wait: HCCL_CONNECT_TIMEOUT=SECONDS.");
    }
    own().bell.wait(seen, kOfferInterval);
  }
}

}  // namespace vnpu
