// The loaded libfabric: found and opened once per process, never closed. Its hot calls are static inline functions in
// its headers that go through tables in its objects, so only these few symbols are looked up by name.
#pragma once

#include <rdma/fabric.h>

#include <string>
#include <vector>

namespace pdx {

struct Libfabric {
    std::string path;
    uint32_t version = 0;  // as fi_version() gives it
    void* handle = nullptr;
    int (*getinfo)(uint32_t, const char*, const char*, uint64_t, const fi_info*, fi_info**) = nullptr;
    void (*freeinfo)(fi_info*) = nullptr;
    fi_info* (*dupinfo)(const fi_info*) = nullptr;
    int (*fabric)(fi_fabric_attr*, fid_fabric**, void*) = nullptr;
    const char* (*strerror)(int) = nullptr;
};

// Opens the newest of the libraries at `paths` and keeps it for the life of the process; later calls return the same.
// Throws Error(ENOENT) when none can be loaded, with each one's reason.
const Libfabric& load_libfabric(const std::vector<std::string>& paths);

// The library that load_libfabric() opened.
const Libfabric& libfabric();

std::string describe(int code);

}  // namespace pdx
