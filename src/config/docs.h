// docs/flags.md, made from the tables (`tandem flags --markdown`); a test compares the file.
#pragma once

#include <string>

namespace tandem {

std::string flags_markdown();

}  // namespace tandem
