// AWS's Elastic Fabric Adapter. Unordered datagrams; a domain is found by its name, such as rdmap79s0-rdm. Not run yet
// on a device.
#include <cstring>

#include "../newer.hpp"
#include "provider.hpp"

namespace pdx {

const ProviderRules& efa_rules() {
    static const ProviderRules rules{
        .names = {"efa"},
        // "efa-direct" is quicker, but its target must know the writer's address before the first write, and our probes
        // come as soon as one side knows the other. Its limits are in its fi_info: one piece a write.
        .fabrics = {"efa", "efa-direct"},
        .by_name = true,
        // An endpoint for each peer runs out of queue pairs at some dozens (768 on one device).
        .shared_endpoint = true,
        .injects = false,
        .device_memory = true,
        // With CUDA's API allowed the provider sets an attribute on the memory that cuMem's does not have, and writes
        // fail. Without shared memory, peers on one host go through the device too: one behaviour, one fence.
        .options = {{kOptCudaApiPermitted, "FI_OPT_CUDA_API_PERMITTED", false, true},
                    {kOptSharedMemoryPermitted, "FI_OPT_SHARED_MEMORY_PERMITTED", false}},
        // An emulated write is a message that the target's library copies: no key guards it.
        .required = {{kOptEfaEmulatedWrite, "emulated writes", false}},
        .set_hints =
            [](fi_info& hints, const std::string& host) {
                if (!host.empty()) hints.domain_attr->name = strdup(host.c_str());
            },
        .refuse =
            [](const fi_info& info) {
                const bool own_keys = !(info.domain_attr->mr_mode & FI_MR_PROV_KEY);
                return std::string(own_keys ? "its keys are not the device's" : "");
            },
    };
    return rules;
}

}  // namespace pdx
