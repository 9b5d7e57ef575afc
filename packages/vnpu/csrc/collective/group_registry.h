#pragma once

#include <string>
#include <vector>

#include "collective/group.h"

namespace vnpu {

// The group of that name in which a device of this process takes part, null if there is none: for
// operators that communicate and are given a group's name.
GroupPtr find_group(const std::string& name, int device);
// All groups in which a device of this process takes part.
std::vector<GroupPtr> groups_of(int device);
// Makes a group known to find_group until it is forgotten. Throws if the name is taken.
void register_group(const GroupPtr& group);
// Frees its name; work that is under way may keep the group itself.
void forget_group(const GroupPtr& group);

}  // namespace vnpu
