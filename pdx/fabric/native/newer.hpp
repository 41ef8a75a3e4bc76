// What libfabric has gained since the 1.17 headers that this core is compiled against: used when the loaded library has
// it. The values are libfabric's ABI (rdma/fi_domain.h and fi_endpoint.h of 1.20, rdma/fi_ext.h of 1.20).
#pragma once

#include <rdma/fi_domain.h>

namespace pdx {

constexpr uint32_t kDmabufVersion = FI_VERSION(1, 20);
constexpr uint64_t kMrDmabuf = 1ull << 40;  // FI_MR_DMABUF

// struct fi_mr_dmabuf. fi_mr_attr points to it in the place of mr_iov.
struct MrDmabuf {
    int fd;
    uint64_t offset;
    size_t len;
    void* base_addr;
};

// A newer library reads members behind those of our header: zero them. `{}` zeroes a union's first member only.
union MrAttributes {
    char room[256];
    fi_mr_attr attr;
};

// Options of FI_OPT_ENDPOINT.
constexpr int kOptCudaApiPermitted = 10;           // bool
constexpr int kOptSharedMemoryPermitted = 11;      // bool
constexpr int kOptEfaEmulatedWrite = -(0xefa << 16) + 2;  // bool, read only

}  // namespace pdx
