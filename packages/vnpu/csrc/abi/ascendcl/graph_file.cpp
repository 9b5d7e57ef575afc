// A graph as a file for chrome://tracing: which task comes where. Source: hicann/runtime
// docs/zh/api_ref/15, aclmdlRIDebugJsonPrint.

#include <cerrno>
#include <cstring>
#include <fstream>

#include "abi/ascendcl/declarations.h"
#include "abi/ascendcl/graphs.h"

using namespace vnpu;

namespace {

void write(const Graph& graph, std::ostream& file) {
  const char* separator = "[\n";
  for (size_t i = 0; i < graph.size(); ++i) {
    const char* const type = graph.node(i)->name;
    file << separator << R"({"name":")" << type << R"(","ph":"X","pid":")" << graph.id
         << R"(","tid":"stream )" << graph.stream_of_node(i) << R"(","ts":)" << i
         << R"(,"dur":1,"args":{"Model ID":)" << graph.id << R"(,"Stream ID":)"
         << graph.stream_of_node(i) << R"(,"Task ID":)" << i << R"(,"Task Type":")" << type
         << "\"}}";
    separator = ",\n";
  }
  file << (graph.size() == 0 ? "[]\n" : "\n]\n");
}

}  // namespace

VNPU_ACL(aclmdlRIDebugJsonPrint, (aclmdlRI model, const char* path, uint32_t flags)) {
  return abi::guarded("aclmdlRIDebugJsonPrint", [&] {
    const GraphPtr graph = abi::Graphs::instance().find(model);
    if (path == nullptr || flags > ACL_MDLRI_DEBUG_JSON_PRINT_VERBOSE) {
      throw Failure(FailureKind::kInvalidArgument,
                    "vnpu: a graph is written to a file with flags " + std::to_string(flags) +
                        "; it takes a path, and 0 or 1.");
    }
    // No kernel arguments: operators here have no kernels.
    std::ofstream file(path);
    write(*graph, file);
    if (!file.flush()) {
      throw Failure(FailureKind::kInvalidArgument, std::string("vnpu: cannot write \"") + path +
                                                       "\": " + std::strerror(errno) + ".");
    }
  });
}
