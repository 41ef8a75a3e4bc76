#include "libfabric.hpp"

#include <dlfcn.h>

#include <cerrno>
#include <mutex>
#include <optional>

#include "common.hpp"

namespace pdx {
namespace {

std::mutex load_mutex;
std::optional<Libfabric> loaded;

// The psm providers install a SIGSEGV handler as soon as they are loaded, which takes crashes away from Python's
// faulthandler. The MR cache would give two registrations of one range the same key; our keys are per link.
void set_environment() {
    setenv("HFI_NO_BACKTRACE", "1", 0);
    setenv("IPATH_NO_BACKTRACE", "1", 0);
    setenv("FI_MR_CACHE_MAX_COUNT", "0", 0);
}

template <typename F>
void look_up(Libfabric& lib, const char* name, F& out) {
    out = reinterpret_cast<F>(dlsym(lib.handle, name));
    if (!out) throw Error(ENOENT, lib.path + " has no symbol " + name);
}

// The unversioned look-up gives each function's newest version, and getinfo, dupinfo and freeinfo agree on the same
// structure: structures are allocated by the library alone, and have only grown at their ends since 1.17.
Libfabric open_library(const std::string& path) {
    Libfabric lib;
    lib.path = path;
    lib.handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!lib.handle) throw Error(ENOENT, dlerror());
    uint32_t (*version)() = nullptr;
    look_up(lib, "fi_version", version);
    look_up(lib, "fi_getinfo", lib.getinfo);
    look_up(lib, "fi_freeinfo", lib.freeinfo);
    look_up(lib, "fi_dupinfo", lib.dupinfo);
    look_up(lib, "fi_fabric", lib.fabric);
    look_up(lib, "fi_strerror", lib.strerror);
    lib.version = version();
    return lib;
}

}  // namespace

const Libfabric& load_libfabric(const std::vector<std::string>& paths) {
    std::lock_guard lock(load_mutex);
    if (loaded) return *loaded;
    set_environment();
    std::string reasons;
    std::optional<Libfabric> best;
    for (const auto& path : paths) {
        try {
            Libfabric lib = open_library(path);
            if (best && best->version >= lib.version) {
                dlclose(lib.handle);
                continue;
            }
            if (best) dlclose(best->handle);
            best = lib;
        } catch (const Error& error) {
            reasons += std::string(reasons.empty() ? "" : "; ") + error.what();
        }
    }
    if (!best) throw Error(ENOENT, "libfabric cannot be loaded: " + (reasons.empty() ? "no path" : reasons));
    loaded = best;
    return *loaded;
}

const Libfabric& libfabric() {
    PDX_INVARIANT(loaded);
    return *loaded;
}

std::string describe(int code) {
    return std::string(libfabric().strerror(code)) + " (" + std::to_string(code) + ")";
}

}  // namespace pdx
