// InfiniBand and RoCE through ofi_rxm, which keeps receives posted: each immediate takes one. Not run yet on a device.
//
// A domain is found by an IP address of the device's interface, and the connection manager takes the GID that belongs to
// it. pdx/host/roce.py finds the address of a RoCE device.
#include "provider.hpp"

namespace pdx {

const ProviderRules& verbs_rules() {
    static const ProviderRules rules{
        .names = {"verbs;ofi_rxm"},
        .by_address = true,
        .device_memory = true,
        .set_hints =
            [](fi_info& hints, const std::string& host) {
                hints.addr_format = host.find(':') != std::string::npos ? FI_SOCKADDR_IN6 : FI_SOCKADDR_IN;
            },
        .refuse =
            [](const fi_info& info) {
                // Keys are the provider's there: with the MR cache two links would get the same one.
                const bool own_keys = !(info.domain_attr->mr_mode & FI_MR_PROV_KEY);
                return std::string(own_keys ? "its keys are not the device's" : "");
            },
    };
    return rules;
}

}  // namespace pdx
