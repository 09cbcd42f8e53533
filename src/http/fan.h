// One call to several addresses at once, all answers awaited.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "http/client.h"

namespace tandem::http {

// The bodies of the answers, index by index. meanwhile (may be empty) is called on this thread a
// few times a second while answers are out. Error naming every address that failed or gave no
// answer before the deadline; as soon as one has failed the others get two seconds more, since they
// may be waiting for it.
std::vector<std::string> call_all(Fetcher& fetcher, const std::vector<Call>& calls,
                                  Deadline deadline, const std::function<void()>& meanwhile = {});

}  // namespace tandem::http
