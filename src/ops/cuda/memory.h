// Memory of the device; see part.h for what each function promises.
#pragma once

#include <cstdint>

namespace tandem::cuda {

void* allocate(std::int64_t bytes);
void release(void* memory);
void give_back(void* memory);
bool take_again(void* memory);
std::int64_t free_bytes();

}  // namespace tandem::cuda
