// Sockets: works everywhere. The native provider is "tcp" from libfabric 1.18 on and "net" in 1.17.
#include <cstring>

#include "provider.hpp"

namespace pdx {

const ProviderRules& tcp_rules() {
    static const ProviderRules rules{
        .names = {"tcp", "net"},
        .by_address = true,
        .forgets_accepted = true,
        .paced = true,
        .set_hints =
            [](fi_info& hints, const std::string& host) {
                hints.addr_format = host.find(':') != std::string::npos ? FI_SOCKADDR_IN6 : FI_SOCKADDR_IN;
            },
        // That of 1.17's "net" is always readable once a link is up.
        .has_domain_fd = [](const fi_info& info) { return std::strcmp(info.fabric_attr->prov_name, "tcp") == 0; },
    };
    return rules;
}

}  // namespace pdx
