#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "collective/carrier.h"
#include "collective/segment.h"

namespace vnpu {

// Location of a group's rank.
struct Place {
  std::string host;  // its name
  uint32_t number;   // hosts in the order of their first ranks
};

// A rank's knowledge of the others when it joins a group.
struct Meeting {
  Invitation root;                   // of rank 0; identifies the group
  Invitation local;                  // of the segment that the ranks of this host share
  bool is_creator;                   // true if this rank has made that segment
  std::vector<Place> places;         // by rank; empty: all ranks are on this host
  std::shared_ptr<Carrier> carrier;  // null likewise
};

// Ranks of a table, which takes the place of an invitation: all of them read the same file.
struct RankTable {
  uint32_t ranks;
  MeetingPoint meeting_point;
};

// Interface through which ranks of several hosts meet. Its implementation is in a library of its
// own, which needs Python and torch.
class MeetingRoom {
 public:
  MeetingRoom() = default;
  virtual ~MeetingRoom() = default;
  MeetingRoom(const MeetingRoom&) = delete;
  MeetingRoom& operator=(const MeetingRoom&) = delete;

  // A point in this process at which the ranks of a new group can meet.
  virtual MeetingPoint open() = 0;
  // Sends this rank's message to the others; returns the messages of all ranks.
  virtual std::vector<std::string> exchange(const MeetingPoint& point, uint32_t ranks,
                                            uint32_t rank, const std::string& own,
                                            std::chrono::seconds limit) = 0;
  // Connects all ranks; each of `peers`, the ranks of other hosts, proves that it knows the point's
  // secret.
  virtual std::shared_ptr<Carrier> connect(const MeetingPoint& point, uint32_t ranks, uint32_t rank,
                                           const std::vector<uint32_t>& peers,
                                           std::chrono::seconds limit) = 0;
  // Reads a file that RANK_TABLE_FILE names; the point is opened where `rank` is 0.
  virtual RankTable read_table(const std::string& path, uint32_t rank) = 0;
};

// Throws kNotSupported where the library cannot be loaded.
MeetingRoom& meeting_room();

// An invitation to a new group, whose ranks may be on other hosts where the environment names this
// host's address (HCCL_IF_IP, HCCL_SOCKET_IFNAME).
Invitation invite();

// Meets the ranks of an invitation. Throws kRemoteTimeout naming who is missing.
Meeting meet(const Invitation& invitation, uint32_t ranks, uint32_t rank,
             std::chrono::seconds limit);
// The meeting of ranks that are all on this host.
Meeting meet_here(const Invitation& invitation, uint32_t rank);

}  // namespace vnpu
