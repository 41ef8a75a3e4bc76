// The files that shm endpoints have in /dev/shm. Their names are ours, so that we know whose a left-over is.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace pdx {

// The file that holds an shm endpoint's region, from the endpoint's name; empty for other names.
std::string shm_region_path(const std::vector<char>& name);

// Removes regions that dead processes of this PID namespace and user left in /dev/shm. Only names of ours are touched.
void sweep_shm();

uint64_t pid_namespace();

}  // namespace pdx
