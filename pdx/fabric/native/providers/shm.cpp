// Two processes of one host. The target copies, so it pulls from the writer's memory.
#include "shm.hpp"

#include <dirent.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <cstring>

#include "../common.hpp"
#include "../libfabric.hpp"
#include "provider.hpp"

namespace pdx {
namespace {

constexpr const char* kFolder = "/dev/shm/";
constexpr const char* kPrefix = "pdx-fabric-";
constexpr size_t kEntries = 256;
// What an endpoint's region may come to take.
constexpr uint64_t kEndpointBytes = 16 << 20;

// A region gets its memory as it is used, and a use that finds none kills the process (SIGBUS). A container's /dev/shm
// may hold no more than 64 MiB.
void check_room() {
    struct statvfs folder;
    if (statvfs(kFolder, &folder) != 0) return;
    const uint64_t left = uint64_t{folder.f_bavail} * folder.f_frsize;
    if (left >= kEndpointBytes) return;
    throw Error(ENOSPC, "/dev/shm has " + std::to_string(left >> 20) + " MiB left, and a link over shm may need " +
                            std::to_string(kEndpointBytes >> 20));
}

// A name of ours, so that sweep_shm() knows what a dead process left.
void name_endpoint(fi_info& info) {
    static std::atomic<uint64_t> serial{0};
    char name[96];
    std::snprintf(name, sizeof name, "fi_shm://%s%" PRIu64 "-%d-%" PRIu64, kPrefix, pid_namespace(), getpid(),
                  serial.fetch_add(1));
    free(info.src_addr);
    info.src_addr = strdup(name);
    info.src_addrlen = std::strlen(name) + 1;
}

}  // namespace

const ProviderRules& shm_rules() {
    static const ProviderRules rules{
        .names = {"shm"},
        .max_domains = 1,
        .target_pulls = true,
        // Without an immediate libfabric 1.17 lets the writer's own process copy (seen with strace), and no closed
        // endpoint at the target stops that: a beat then hit freed memory.
        .tags_every_write = true,
        // Up to 4 KiB goes through the queue itself. GB/s: one page of 4 KiB a write 3.6, four 2.1; of 16 KiB 3.1 and 3.3.
        .dip_from_bytes = 4 << 10,
        .dip_to_bytes = 64 << 10,
        .set_hints =
            [](fi_info& hints, const std::string&) {
                // An endpoint has one peer: a quarter of the default queue is enough, and keeps 200 links in little
                // memory. 1.17 refuses the wish.
                if (FI_MAJOR(libfabric().version) >= 2) hints.tx_attr->size = hints.rx_attr->size = kEntries;
            },
        .prepare_endpoint =
            [](fi_info& info) {
                check_room();
                name_endpoint(info);
            },
    };
    return rules;
}

std::string shm_region_path(const std::vector<char>& name) {
    constexpr const char* kScheme = "fi_shm://";
    const std::string text(name.data(), strnlen(name.data(), name.size()));
    if (text.rfind(kScheme, 0) != 0) return "";
    return kFolder + text.substr(std::strlen(kScheme));
}

uint64_t pid_namespace() {
    struct stat st;
    return stat("/proc/self/ns/pid", &st) == 0 ? st.st_ino : 0;
}

void sweep_shm() {
    DIR* folder = opendir(kFolder);
    if (!folder) return;
    const std::string format = std::string(kPrefix) + "%" SCNu64 "-%d-";
    while (const dirent* entry = readdir(folder)) {
        uint64_t ns = 0;
        int pid = 0;
        if (std::sscanf(entry->d_name, format.c_str(), &ns, &pid) != 2 || ns != pid_namespace() || pid <= 0) continue;
        const std::string path = std::string(kFolder) + entry->d_name;
        struct stat st;
        if (kill(pid, 0) == 0 || errno != ESRCH || stat(path.c_str(), &st) != 0 || st.st_uid != geteuid()) continue;
        unlink(path.c_str());
    }
    closedir(folder);
}

}  // namespace pdx
