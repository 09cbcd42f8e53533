// `tandem train --dry-run`: everything that can be known before a run starts, in seconds: flags,
// model folder, prompts and template, batch arithmetic, placement, memory by phase, ports, helpers,
// the folders that would be written and the checkpoint that would be loaded. No rank is started and
// no file of a run is made. Every fault is found that does not hide behind another.
#pragma once

#include <string>
#include <vector>

#include "config/config.h"
#include "config/parse.h"

namespace tandem {

// The same checks without the report: all that they find beyond the faults of the command line.
// `sound`: the command line has none. From then on the log shows errors alone.
std::vector<std::string> faults_before_start(Config config, bool sound);

// Prints the report and then the faults, those of the command line first. The exit code: 0 none, 2
// if the command line has faults, else 1.
int dry_run(Config config, const Parsed& parsed);

}  // namespace tandem
