#pragma once

#include <map>
#include <string>
#include <vector>

#include "timing/simulation.h"

namespace vnpu::timing {

// Collects the tasks of modelled devices and writes them for Perfetto (Trace Event Format, an array
// with one event on each line): a row for each stream, an arrow from each event's record to its
// wait, a counter for each resource: the share of it in use. It has no process number, date or
// path, so that the same run gives the same bytes.
class TimelineFile {
 public:
  // path: of the written file; machine: title of the modelled machine, for the reader
  TimelineFile(std::string path, std::string machine);

  void add(const Span& span);
  // Share of each resource that the device uses from `now` on.
  void add_use(int device, Time now, const Shares& use);
  void name_stream(int device, int stream, const std::string& name);
  // The number of a label; 0 is "".
  uint32_t label(const std::string& text);
  // Forgets what was added so far.
  void clear();
  // Writes all; does nothing where nothing was added since the last time.
  void write();

 private:
  const std::string path_;
  const std::string machine_;
  struct Use {
    int device;
    Time now;
    Shares shares;
  };
  std::vector<Span> spans_;
  std::vector<Use> uses_;
  size_t written_ = 0;  // of spans_
  std::vector<std::string> labels_;
  std::map<std::pair<int, int>, std::string> names_;  // of (device, stream)
};

}  // namespace vnpu::timing
