#include "collective/segment.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <cstdio>
#include <cstring>
#include <ctime>

#include "collective/phantom.h"
#include "device/failure.h"
#include "device/faults.h"

namespace vnpu {
namespace {

constexpr size_t kPage = 4096;  // bytes

static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t), "a futex is a plain word");
static_assert(std::atomic<uint32_t>::is_always_lock_free, "shared between processes");
static_assert(sizeof(SegmentHeader) <= kPage);

size_t pages(size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

// Between processes, so without FUTEX_PRIVATE_FLAG.
long futex(std::atomic<uint32_t>* word, int operation, uint32_t value, const timespec* limit) {
  return ::syscall(SYS_futex, word, operation, value, limit, nullptr, 0);
}

std::string own_path(int file) { return "/proc/self/fd/" + std::to_string(file); }

std::string target_of(int file) {
  char target[256];
  const ssize_t length = ::readlink(own_path(file).c_str(), target, sizeof(target));
  return std::string(target, length > 0 ? static_cast<size_t>(length) : 0);
}

int open_file(const Invitation& invitation) {
  const std::string creator = "rank 0 (pid " + std::to_string(invitation.creator.pid) + ")";
  if (invitation.magic != Invitation::kMagic) {
    throw Failure(FailureKind::kInvalidArgument,
                  "vnpu: the root information of this group was not made by this version of vnpu. "
                  "All ranks must run the same version, and the bytes that rank 0 gets from "
                  "HcclGetRootInfo must reach the others unchanged.");
  }
  if (host_name() != invitation.host || pid_namespace() != invitation.pid_namespace) {
    throw Failure(FailureKind::kNotSupported,
                  "vnpu: " + creator + " runs on host " + invitation.host + ", this rank on " +
                      host_name() +
                      " (or in another container), and rank 0 has not said where they can meet. "
                      "Set HCCL_IF_IP to each host's own address, or HCCL_SOCKET_IFNAME to its "
                      "network interface, before the programs start.");
  }
  if (::geteuid() != invitation.user) {
    throw Failure(FailureKind::kNotSupported,
                  "vnpu: " + creator + " belongs to user " + std::to_string(invitation.user) +
                      ", this rank to user " + std::to_string(::geteuid()) +
                      ". Start all ranks as the same user.");
  }
  const std::string path =
      "/proc/" + std::to_string(invitation.creator.pid) + "/fd/" + std::to_string(invitation.file);
  // Opened with O_PATH first: the number may by now belong to another file, which must not be
  // touched.
  const bool is_gone = faults::reach(faults::Kind::kSegment, "open") == faults::Outcome::kGone;
  const int file = is_gone ? -1 : ::open(path.c_str(), O_PATH | O_CLOEXEC);
  const int error = is_gone ? ENOENT : errno;
  if (!invitation.creator.alive()) {
    if (file >= 0) ::close(file);
    throw Failure(FailureKind::kRemoteLost, "vnpu: " + creator +
                                                " ended before all ranks had joined its group. "
                                                "Its own output says why.");
  }
  if (file >= 0 && target_of(file) == "/memfd:" + std::string(invitation.identity) + " (deleted)") {
    const int own = ::open(own_path(file).c_str(), O_RDWR | O_CLOEXEC);
    ::close(file);
    if (own >= 0) return own;
  } else if (file >= 0 || error == ENOENT || error == ENXIO) {
    if (file >= 0) ::close(file);
    throw Failure(FailureKind::kInvalidArgument,
                  "vnpu: " + creator + " no longer offers the group " + invitation.identity +
                      ": the root information is old. Does the store still hold keys of a process "
                      "group that was destroyed? Give the new one another port or store.");
  }
  throw Failure(FailureKind::kNotSupported,
                "vnpu: the shared memory of the group cannot be opened at " + path + " (" +
                    std::strerror(error) +
                    "). The ranks of a group need access to each other's "
                    "/proc entries: same user, same container, no hidepid or ptrace restriction.");
}

size_t size_of_file(int file) {
  struct stat info = {};
  return ::fstat(file, &info) == 0 ? static_cast<size_t>(info.st_size) : 0;
}

// True if a fault plan truncates the file; closes it if another fault is planned.
bool is_map_truncated(int file) {
  try {
    return faults::reach(faults::Kind::kSegment, "map") == faults::Outcome::kTruncated;
  } catch (...) {
    ::close(file);
    throw;
  }
}

}  // namespace

void Bell::ring() {
  rings.fetch_add(1, std::memory_order_seq_cst);
  if (sleepers.load(std::memory_order_seq_cst) != 0) futex(&rings, FUTEX_WAKE, INT_MAX, nullptr);
}

void Bell::wait(uint32_t seen, std::chrono::microseconds limit) {
  const auto us = limit.count();
  const timespec time{static_cast<time_t>(us / 1'000'000),
                      static_cast<long>(us % 1'000'000 * 1000)};
  sleepers.fetch_add(1, std::memory_order_seq_cst);
  // Returns at once if the bell has rung since; any other return is treated like the limit.
  futex(&rings, FUTEX_WAIT, seen, &time);
  sleepers.fetch_sub(1, std::memory_order_seq_cst);
}

Invitation Segment::create() {
  static std::atomic<uint64_t> groups{0};
  Invitation invitation{};
  invitation.magic = Invitation::kMagic;
  invitation.pid_namespace = pid_namespace();
  invitation.creator = ProcessIdentity::self();
  invitation.user = ::geteuid();
  std::snprintf(invitation.host, sizeof(invitation.host), "%s", host_name().c_str());
  std::snprintf(invitation.identity, sizeof(invitation.identity), "vnpu_%d_%llx_%llu",
                invitation.creator.pid,
                static_cast<unsigned long long>(invitation.creator.start_time),
                static_cast<unsigned long long>(groups.fetch_add(1)));
  faults::reach(faults::Kind::kSegment, "create");
  const int file = ::memfd_create(invitation.identity, MFD_CLOEXEC | MFD_ALLOW_SEALING);
  // If the file became shorter, processes that map it would end by SIGBUS.
  if (file < 0 || ::ftruncate(file, kPage) != 0 || ::fcntl(file, F_ADD_SEALS, F_SEAL_SHRINK) != 0) {
    const int error = errno;
    if (file >= 0) ::close(file);
    errno = error;
    throw Failure(FailureKind::kInternal,
                  std::string("vnpu: no shared memory for a group of ranks: ") +
                      std::strerror(errno) + ". Check the limits on open files and memory.");
  }
  invitation.file = file;
  return invitation;
}

void Segment::close_invitation(const Invitation& invitation) {
  if (invitation.creator.pid == ::getpid()) ::close(invitation.file);
}

Segment::Segment(const Invitation& invitation, uint32_t ranks) : ranks_(ranks) {
  const bool phantoms = ranks_are_phantoms();
  const uint32_t most = phantoms ? kMaxPhantoms : kMaxRanks;
  if (ranks == 0 || ranks > most) {
    throw Failure(FailureKind::kInvalidArgument, "vnpu: a group has 1 to " + std::to_string(most) +
                                                     " ranks, not " + std::to_string(ranks) + ".");
  }
  const int file = open_file(invitation);
  const size_t n = ranks;
  sizes_at_ = pages(sizeof(SegmentHeader)) + pages(n * sizeof(RankBlock));
  mailboxes_at_ = sizes_at_ + pages(n * 2 * 2 * n * sizeof(uint64_t));
  slots_at_ = mailboxes_at_ + pages(n * n * sizeof(Mailbox));
  chunks_at_ = slots_at_ + n * 2 * kSlot;
  // Phantoms send nothing.
  bytes_ = chunks_at_ + (phantoms ? 0 : n * n * Mailbox::kDepth * Mailbox::kChunk);

  // All ranks set the same size; a rank with another number of ranks must not change it.
  void* first = ::mmap(nullptr, kPage, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (first == MAP_FAILED) {
    ::close(file);
    throw Failure(FailureKind::kInternal,
                  std::string("vnpu: cannot map shared memory: ") + std::strerror(errno) + ".");
  }
  uint32_t expected = 0;
  static_cast<SegmentHeader*>(first)->ranks.compare_exchange_strong(expected, ranks);
  ::munmap(first, kPage);
  if (expected != 0 && expected != ranks) {
    ::close(file);
    throw Failure(FailureKind::kInvalidArgument,
                  "vnpu: this rank was told that the group has " + std::to_string(ranks) +
                      " ranks, another one " + std::to_string(expected) +
                      ". Give all ranks the same world size.");
  }
  const bool is_truncated = is_map_truncated(file);
  void* base = MAP_FAILED;
  std::string why;
  if (::ftruncate(file, static_cast<off_t>(bytes_)) != 0) {
    why = std::strerror(errno);
  } else if (is_truncated || size_of_file(file) != bytes_) {
    why = "its file is too short, or longer than all ranks make it";
  } else {
    base = ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
    if (base == MAP_FAILED) why = std::strerror(errno);
  }
  ::close(file);
  if (base == MAP_FAILED) {
    throw Failure(FailureKind::kOutOfMemory, "vnpu: cannot map " + std::to_string(bytes_ >> 20) +
                                                 " MiB of shared memory for a group of " +
                                                 std::to_string(ranks) + " ranks: " + why + ".");
  }
  base_ = static_cast<std::byte*>(base);
  ::madvise(base_, bytes_, MADV_DONTDUMP);
}

Segment::~Segment() { ::munmap(base_, bytes_); }

RankBlock& Segment::rank(uint32_t rank) const {
  return reinterpret_cast<RankBlock*>(base_ + pages(sizeof(SegmentHeader)))[rank];
}

uint64_t* Segment::sizes(uint32_t rank, uint64_t sequence) const {
  return reinterpret_cast<uint64_t*>(base_ + sizes_at_) +
         (size_t{rank} * 2 + sequence % 2) * 2 * ranks_;
}

std::byte* Segment::slot(uint32_t rank, uint32_t round) const {
  return base_ + slots_at_ + (size_t{rank} * 2 + round % 2) * kSlot;
}

Mailbox& Segment::mailbox(uint32_t from, uint32_t to) const {
  return reinterpret_cast<Mailbox*>(base_ + mailboxes_at_)[size_t{from} * ranks_ + to];
}

std::byte* Segment::mailbox_chunk(uint32_t from, uint32_t to, uint32_t chunk) const {
  const size_t box = size_t{from} * ranks_ + to;
  return base_ + chunks_at_ + (box * Mailbox::kDepth + chunk % Mailbox::kDepth) * Mailbox::kChunk;
}

}  // namespace vnpu
