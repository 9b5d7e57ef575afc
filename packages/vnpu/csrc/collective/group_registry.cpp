#include "collective/group_registry.h"

#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "device/failure.h"

namespace vnpu {
namespace {

struct Registry {
  std::mutex mutex;
  std::map<std::pair<std::string, int>, std::weak_ptr<Group>> groups;

  static Registry& instance() {
    // Never destroyed: groups may end after static destructors have run.
    static Registry* const registry = new Registry();
    return *registry;
  }
};

}  // namespace

GroupPtr find_group(const std::string& name, int device) {
  Registry& registry = Registry::instance();
  std::lock_guard lock(registry.mutex);
  const auto it = registry.groups.find({name, device});
  return it == registry.groups.end() ? nullptr : it->second.lock();
}

std::vector<GroupPtr> groups_of(int device) {
  Registry& registry = Registry::instance();
  std::lock_guard lock(registry.mutex);
  std::vector<GroupPtr> groups;
  for (const auto& [key, entry] : registry.groups) {
    const GroupPtr group = entry.lock();
    if (key.second == device && group != nullptr) groups.push_back(group);
  }
  return groups;
}

void register_group(const GroupPtr& group) {
  Registry& registry = Registry::instance();
  std::lock_guard lock(registry.mutex);
  std::erase_if(registry.groups, [](const auto& entry) { return entry.second.expired(); });
  const auto [it, added] =
      registry.groups.emplace(std::pair(group->name(), group->device()), group);
  if (!added) {
    throw Failure(FailureKind::kInvalidArgument,
                  "vnpu: device " + std::to_string(group->device()) + " takes part in a group " +
                      group->name() + " already. Destroy it first, or choose another name.");
  }
}

void forget_group(const GroupPtr& group) {
  Registry& registry = Registry::instance();
  std::lock_guard lock(registry.mutex);
  const auto it = registry.groups.find({group->name(), group->device()});
  if (it != registry.groups.end() && it->second.lock() == group) registry.groups.erase(it);
}

}  // namespace vnpu
