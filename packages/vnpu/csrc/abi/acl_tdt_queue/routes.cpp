// Routes between queues of data. Source: hicann/runtime docs/zh/api_ref/17-02 and 25-03.

#include <functional>
#include <vector>

#include "abi/acl_tdt_queue/copied_parameter.h"
#include "abi/ascendcl/declarations.h"
#include "acl/acl_tdt_queue.h"

using namespace vnpu;
using namespace vnpu::abi;

// Opaque in acl_tdt_queue.h.
struct acltdtQueueRoute {
  MessageQueues::Route ends;
  int32_t status = ACL_TDT_QUEUE_ROUTE_UNBIND;
};

struct acltdtQueueRouteList {
  std::vector<acltdtQueueRoute> routes;
};

struct acltdtQueueRouteQueryInfo {
  std::optional<acltdtQueueRouteQueryMode> mode;
  std::optional<uint32_t> from;
  std::optional<uint32_t> to;
};

namespace {

// Does this to each route, also behind one that fails; the text of the first failure is kept.
void for_each(acltdtQueueRouteList* list, int32_t reached,
              const std::function<void(const MessageQueues::Route&)>& action) {
  require_parameter(list != nullptr, "no list of routes is given.");
  std::string first;
  for (acltdtQueueRoute& route : list->routes) {
    try {
      action(route.ends);
      route.status = reached;
    } catch (const Failure& failure) {
      if (first.empty()) first = failure.what();
    }
  }
  if (!first.empty()) throw Failure(static_cast<FailureKind>(kFailed), first);
}

bool is_asked(const acltdtQueueRouteQueryInfo& query, const MessageQueues::Route& route) {
  const bool is_from = query.from == route.from, is_to = query.to == route.to;
  switch (*query.mode) {
    case ACL_TDT_QUEUE_ROUTE_QUERY_SRC: return is_from;
    case ACL_TDT_QUEUE_ROUTE_QUERY_DST: return is_to;
    case ACL_TDT_QUEUE_ROUTE_QUERY_SRC_AND_DST: return is_from && is_to;
    default: return false;  // none is bound abnormally
  }
}

void check_query(const acltdtQueueRouteQueryInfo& query) {
  require_parameter(query.mode.has_value(), "what a query goes by is not set (its mode, 0).");
  const acltdtQueueRouteQueryMode mode = *query.mode;
  const bool both = mode == ACL_TDT_QUEUE_ROUTE_QUERY_SRC_AND_DST;
  const bool by_from = both || mode == ACL_TDT_QUEUE_ROUTE_QUERY_SRC;
  const bool by_to = both || mode == ACL_TDT_QUEUE_ROUTE_QUERY_DST;
  require_parameter(by_from || by_to || mode == ACL_TDT_QUEUE_ROUTE_QUERY_ABNORMAL,
                    "no query goes by " + std::to_string(mode) + "; 0, 1, 2 and 100 are.");
  require_parameter((!by_from || query.from.has_value()) && (!by_to || query.to.has_value()),
                    "a query goes by a queue that is not set.");
}

}  // namespace

#define VNPU_TDT_CREATE(TYPE, NAME, PARAMETERS) \
  extern "C" __attribute__((visibility("default"))) TYPE* NAME PARAMETERS

#define VNPU_TDT_DESTROY(TYPE, NAME)                                        \
  VNPU_ACL(NAME, (const TYPE* object)) {                                    \
    return guarded(#NAME, [&] {                                             \
      require_parameter(object != nullptr, "nothing to destroy is given."); \
      delete object;                                                        \
    });                                                                     \
  }

VNPU_TDT_CREATE(acltdtQueueRoute, acltdtCreateQueueRoute, (uint32_t from, uint32_t to)) {
  return new acltdtQueueRoute{{from, to}};
}
VNPU_TDT_DESTROY(acltdtQueueRoute, acltdtDestroyQueueRoute)
VNPU_ACL(acltdtGetQueueRouteParam, (const acltdtQueueRoute* route, acltdtQueueRouteParamType type,
                                    size_t room, size_t* bytes, void* value)) {
  return guarded("acltdtGetQueueRouteParam", [&] {
    require_parameter(route != nullptr, "no route is given.");
    switch (type) {
      case ACL_TDT_QUEUE_ROUTE_SRC_UINT32:
        return write_parameter(route->ends.from, value, room, bytes, "a queue's number");
      case ACL_TDT_QUEUE_ROUTE_DST_UINT32:
        return write_parameter(route->ends.to, value, room, bytes, "a queue's number");
      case ACL_TDT_QUEUE_ROUTE_STATUS_INT32:
        return write_parameter(route->status, value, room, bytes, "a route's status");
    }
    require_parameter(false, "a route has no parameter " + std::to_string(type) + "; 0 to 2 are.");
  });
}

VNPU_TDT_CREATE(acltdtQueueRouteList, acltdtCreateQueueRouteList, ()) {
  return new acltdtQueueRouteList();
}
VNPU_TDT_DESTROY(acltdtQueueRouteList, acltdtDestroyQueueRouteList)
VNPU_ACL(acltdtAddQueueRoute, (acltdtQueueRouteList * list, const acltdtQueueRoute* route)) {
  return guarded("acltdtAddQueueRoute", [&] {
    require_parameter(list != nullptr && route != nullptr, "a list, or its route, is missing.");
    list->routes.push_back(*route);
  });
}
VNPU_ACL(acltdtGetQueueRoute,
         (const acltdtQueueRouteList* list, size_t index, acltdtQueueRoute* route)) {
  return guarded("acltdtGetQueueRoute", [&] {
    require_parameter(list != nullptr && route != nullptr, "a list, or its route, is missing.");
    require_parameter(index < list->routes.size(), "route " + std::to_string(index) +
                                                       " of a list of " +
                                                       std::to_string(list->routes.size()) + ".");
    *route = list->routes[index];
  });
}
extern "C" __attribute__((visibility("default"))) size_t
acltdtGetQueueRouteNum(const acltdtQueueRouteList* list) {
  return list == nullptr ? 0 : list->routes.size();
}

VNPU_TDT_CREATE(acltdtQueueRouteQueryInfo, acltdtCreateQueueRouteQueryInfo, ()) {
  return new acltdtQueueRouteQueryInfo();
}
VNPU_TDT_DESTROY(acltdtQueueRouteQueryInfo, acltdtDestroyQueueRouteQueryInfo)
VNPU_ACL(acltdtSetQueueRouteQueryInfo,
         (acltdtQueueRouteQueryInfo * query, acltdtQueueRouteQueryInfoParamType type, size_t bytes,
          const void* value)) {
  return guarded("acltdtSetQueueRouteQueryInfo", [&] {
    require_parameter(query != nullptr, "no query is given.");
    switch (type) {
      case ACL_TDT_QUEUE_ROUTE_QUERY_MODE_ENUM: {
        acltdtQueueRouteQueryMode mode{};
        read_parameter(value, bytes, mode, "what a query goes by");
        query->mode = mode;
        return;
      }
      case ACL_TDT_QUEUE_ROUTE_QUERY_SRC_ID_UINT32:
        return read_parameter(value, bytes, query->from.emplace(), "a queue's number");
      case ACL_TDT_QUEUE_ROUTE_QUERY_DST_ID_UINT32:
        return read_parameter(value, bytes, query->to.emplace(), "a queue's number");
    }
    require_parameter(false, "a query has no parameter " + std::to_string(type) + "; 0 to 2 are.");
  });
}

VNPU_ACL(acltdtBindQueueRoutes, (acltdtQueueRouteList * list)) {
  return guarded("acltdtBindQueueRoutes", [&] {
    for_each(list, ACL_TDT_QUEUE_ROUTE_BIND,
             [](const auto& route) { MessageQueues::instance().bind(route); });
  });
}
VNPU_ACL(acltdtUnbindQueueRoutes, (acltdtQueueRouteList * list)) {
  return guarded("acltdtUnbindQueueRoutes", [&] {
    for_each(list, ACL_TDT_QUEUE_ROUTE_UNBIND,
             [](const auto& route) { MessageQueues::instance().unbind(route); });
  });
}
VNPU_ACL(acltdtQueryQueueRoutes,
         (const acltdtQueueRouteQueryInfo* query, acltdtQueueRouteList* list)) {
  return guarded("acltdtQueryQueueRoutes", [&] {
    require_parameter(query != nullptr && list != nullptr, "a query, or its list, is missing.");
    list->routes.clear();
    check_query(*query);
    for (const MessageQueues::Route& route : MessageQueues::instance().routes()) {
      if (is_asked(*query, route)) list->routes.push_back({route, ACL_TDT_QUEUE_ROUTE_BIND});
    }
  });
}
