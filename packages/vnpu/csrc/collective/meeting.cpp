#include "collective/meeting.h"

#include <dlfcn.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <utility>

#include "collective/phantom.h"
#include "device/failure.h"
#include "device/process.h"

namespace vnpu {
namespace {

bool is_set(const char* name) {
  const char* const value = std::getenv(name);
  return value != nullptr && *value != '\0';
}

std::string folder_of_this_library() {
  Dl_info info = {};
  if (::dladdr(reinterpret_cast<void*>(&meeting_room), &info) == 0) return "";
  const std::string path = info.dli_fname;
  return path.substr(0, path.rfind('/') + 1);
}

// Data that each rank sends to the others.
struct Word {
  char host[256];
  uint64_t pid_namespace;
  Invitation invitation;  // to a segment on its host

  explicit Word(const Invitation& own) : host{}, pid_namespace(vnpu::pid_namespace()) {
    std::strncpy(host, host_name().c_str(), sizeof(host) - 1);
    invitation = own;
    invitation.meeting_point = {};  // the secret is not told
  }
  explicit Word(const std::string& text) {
    if (text.size() != sizeof(Word)) {
      throw Failure(FailureKind::kInvalidArgument,
                    "vnpu: a rank of this group runs another version of vnpu. Install the same "
                    "one on all hosts.");
    }
    std::memcpy(this, text.data(), sizeof(Word));
  }
  std::string text() const {
    return std::string(reinterpret_cast<const char*>(this), sizeof(Word));
  }
};

// Numbers the hosts in the order of their first ranks.
std::vector<Place> places_of(const std::vector<Word>& words, std::vector<uint32_t>& first_ranks) {
  std::map<std::pair<std::string, uint64_t>, uint32_t> numbers;
  std::vector<Place> places;
  for (const Word& word : words) {
    const auto [host, is_new] = numbers.emplace(std::pair(word.host, word.pid_namespace),
                                                static_cast<uint32_t>(numbers.size()));
    if (is_new) first_ranks.push_back(static_cast<uint32_t>(places.size()));
    places.push_back({word.host, host->second});
  }
  return places;
}

}  // namespace

MeetingRoom& meeting_room() {
  static MeetingRoom& room = []() -> MeetingRoom& {
    // It needs an interpreter in the process, and takes the process's own torch.
    const bool has_python = ::dlsym(RTLD_DEFAULT, "Py_IsInitialized") != nullptr;
    const std::string path = folder_of_this_library() + "libvnpu_gloo.so";
    void* const library = has_python ? ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL) : nullptr;
    void* const function = library == nullptr ? nullptr : ::dlsym(library, "vnpu_meeting_room");
    if (function == nullptr) {
      const char* const reason = has_python ? ::dlerror() : "this program has no Python";
      throw Failure(FailureKind::kNotSupported,
                    "vnpu: a group cannot reach over hosts here (" + path + ": " +
                        (reason == nullptr ? "not found" : reason) +
                        "). Its ranks need Python and torch: run them as Python programs, or unset "
                        "HCCL_IF_IP, HCCL_SOCKET_IFNAME and RANK_TABLE_FILE to stay on one host.");
    }
    return *reinterpret_cast<MeetingRoom* (*)()>(function)();
  }();
  return room;
}

Invitation invite() {
  Invitation invitation = Segment::create();
  if (ranks_are_phantoms() || !(is_set("HCCL_IF_IP") || is_set("HCCL_SOCKET_IFNAME"))) {
    return invitation;
  }
  try {
    invitation.meeting_point = meeting_room().open();
  } catch (...) {
    Segment::close_invitation(invitation);
    throw;
  }
  return invitation;
}

Meeting meet_here(const Invitation& invitation, uint32_t rank) {
  return {invitation, invitation, rank == 0, {}, nullptr};
}

Meeting meet(const Invitation& invitation, uint32_t ranks, uint32_t rank,
             std::chrono::seconds limit) {
  const MeetingPoint& point = invitation.meeting_point;
  if (invitation.magic != Invitation::kMagic || point.address[0] == '\0' || ranks < 2 ||
      ranks > Segment::kMaxRanks || rank >= ranks || ranks_are_phantoms()) {
    return meet_here(invitation, rank);
  }
  const Invitation own = rank == 0 ? invitation : Segment::create();
  bool is_unused = rank != 0;
  try {
    std::vector<Word> words;
    for (const std::string& text :
         meeting_room().exchange(point, ranks, rank, Word(own).text(), limit)) {
      words.emplace_back(text);
    }
    std::vector<uint32_t> first_ranks;
    std::vector<Place> places = places_of(words, first_ranks);
    const uint32_t here = places[rank].number;
    Meeting meeting{words[0].invitation, words[first_ranks[here]].invitation,
                    first_ranks[here] == rank, std::move(places), nullptr};
    if (!meeting.is_creator) Segment::close_invitation(own);
    is_unused = is_unused && meeting.is_creator;
    if (first_ranks.size() == 1) {
      meeting.places.clear();
      return meeting;
    }
    std::vector<uint32_t> peers;
    for (uint32_t r = 0; r < ranks; ++r) {
      if (meeting.places[r].number != here) peers.push_back(r);
    }
    meeting.carrier = meeting_room().connect(point, ranks, rank, peers, limit);
    return meeting;
  } catch (...) {
    if (is_unused) Segment::close_invitation(own);
    throw;
  }
}

}  // namespace vnpu
