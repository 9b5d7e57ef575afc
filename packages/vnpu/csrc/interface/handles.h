#pragma once

#include "device/event.h"
#include "device/stream.h"

// C handles of streams and events. A handle is never freed, only marked dead and reused, so that a
// stale handle is detected instead of dereferenced.
namespace vnpu::abi {

void* make_handle(StreamPtr stream);
void* make_handle(EventPtr event);
void drop_stream_handle(void* handle);
void drop_event_handle(void* handle);

}  // namespace vnpu::abi
