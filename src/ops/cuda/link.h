// Messages between the GPUs of several processes; see part.h for what each function promises.
#pragma once

#include <cstdint>

#include "ops/cuda/part.h"

namespace tandem::cuda {

void new_link_id(char* id);
void* open_link(const char* id, int rank, int size, double timeout_seconds, bool in_stream);
void close_link(void* link);
std::int64_t link_exchange(void* link, const LinkPart* sends, std::int64_t num_sends,
                           const LinkPart* receives, std::int64_t num_receives,
                           double timeout_seconds);
std::int64_t link_broadcast(void* link, const LinkPart* parts, std::int64_t num_parts, int root,
                            double timeout_seconds);
void link_wait(void* link, std::int64_t number, double timeout_seconds);
void link_all_gather(void* link, const void* mine, void* all, std::int64_t bytes);
void link_settle(void* link, double timeout_seconds);

}  // namespace tandem::cuda
