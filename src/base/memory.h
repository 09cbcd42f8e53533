// The memory of processes and of the machine, as the kernel counts it. Resident memory counts pages
// shared with others and pages of mapped files too.
#pragma once

#include <sys/types.h>

#include <cstdint>

namespace tandem {

struct ProcessMemory {
  std::int64_t resident_bytes = 0;
  std::int64_t peak_bytes = 0;  // the most that was resident, ever or since reset_peak_memory()
};

// 0 everywhere if the process is gone. pid 0: this one.
ProcessMemory process_memory(pid_t pid = 0);

// Starts the peak of this process anew; where the kernel does not allow that it stays the peak
// ever.
void reset_peak_memory();

// From here on free pages stay with the heap until return_free_memory(), instead of going back to
// the system and being cleared anew each time that the top of the heap shrinks and grows. For a
// process whose work frees and takes the same large blocks over and over.
void keep_free_memory();

// Gives the heap's free pages back to the system. After work whose blocks were many and large: what
// is left free between those that stay would not fit the next round's and pile up.
void return_free_memory();

// What new processes could take now without swapping: MemAvailable, or what the control group
// leaves of it. 0: not known.
std::int64_t available_memory_bytes();

}  // namespace tandem
