// Memory of the device; see part.h for what each function promises.
#pragma once

#include <cstdint>

namespace tandem::cuda {

void* allocate(std::int64_t bytes, bool shared);
void release(void* memory);
void give_back(void* memory);
bool take_again(void* memory);
int export_memory(void* memory, std::int64_t* bytes);
void* import_memory(int descriptor, std::int64_t bytes);
std::int64_t free_bytes();

}  // namespace tandem::cuda
