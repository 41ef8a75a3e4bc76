#include "crowding.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <cinttypes>
#include <cstdio>

namespace pdx {

Crowding::~Crowding() {
    if (fd_ >= 0) ::close(fd_);
}

bool Crowding::crowded(int64_t now_ns) {
    const bool first = !looked_ns_;
    if (!first && now_ns - looked_ns_ < kLookNs) return now_ns < crowded_until_ns_;
    if (first) fd_ = ::open("/proc/thread-self/schedstat", O_RDONLY | O_CLOEXEC);
    char text[96];
    const ssize_t len = fd_ < 0 ? -1 : ::pread(fd_, text, sizeof text - 1, 0);
    uint64_t waited_ns = 0;
    text[len > 0 ? len : 0] = 0;
    if (std::sscanf(text, "%*u %" SCNu64, &waited_ns) != 1) return true;
    const auto waited = static_cast<int64_t>(waited_ns - waited_ns_);
    if (!first && waited > (now_ns - looked_ns_) / kShare) crowded_until_ns_ = now_ns + kMemoryNs;
    waited_ns_ = waited_ns;
    looked_ns_ = now_ns;
    return now_ns < crowded_until_ns_;
}

}  // namespace pdx
