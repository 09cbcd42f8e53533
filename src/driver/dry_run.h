// `tandem train --dry-run`: everything that can be known before a run starts, in seconds: flags,
// model folder, prompts and template, batch arithmetic, placement, memory by phase, ports, helpers,
// the folders that would be written and the checkpoint that would be loaded. No rank is started and
// no file of a run is made. Every fault is found that does not hide behind another.
#pragma once

#include "config/config.h"
#include "config/parse.h"

namespace tandem {

// Prints the report and then the faults, those of the command line first. The exit code: 0 none, 2
// if the command line has faults, else 1.
int dry_run(Config config, const Parsed& parsed);

}  // namespace tandem
