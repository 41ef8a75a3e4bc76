// What one libfabric provider needs, allows and promises. Each has one file here; the rest of the core asks these rules
// and never which provider it is. Constant data and pure functions on fi_info.
#pragma once

#include <rdma/fabric.h>
#include <rdma/fi_endpoint.h>

#include <string>
#include <vector>

namespace pdx {

// The values are part of the C ABI.
enum class Provider { kTcp = 0, kShm, kVerbs, kEfa };
constexpr int kNumProviders = 4;

// A bool option of an endpoint.
struct EndpointOption {
    int name;
    const char* what;  // for messages
    bool value;
    bool device_memory = false;  // only where device memory is registered
};

struct ProviderRules {
    // libfabric's names for it, best first.
    std::vector<const char*> names;
    // Fabrics of the provider, best first; empty: any.
    std::vector<const char*> fabrics = {};
    size_t max_domains = 8;
    // Where a domain is found: by an address of this host, or by the domain's name (else it is empty).
    bool by_address = false, by_name = false;
    // All links of a domain use one endpoint, so a key alone tells them apart.
    bool shared_endpoint = false;
    // The target pulls from our memory: closing our side stops no read that a stopped peer has still to do.
    bool target_pulls = false;
    // A write without an immediate may go past the target's queue, and so past its fence.
    bool tags_every_write = false;
    // Takes small data at once (FI_INJECT), so that it may change when the call returns.
    bool injects = true;
    // An endpoint's close leaves connections that were accepted and whose request was not read (libfabric 1.17 to 2.5).
    bool forgets_accepted = false;
    // Its connections are TCP's, with the host's congestion control.
    bool paced = false;
    // Can register device memory from a DMA-BUF.
    bool device_memory = false;
    // Writes between these sizes (both excluded) are slower than those of either size; see WriteShape.
    uint64_t dip_from_bytes = 0, dip_to_bytes = 0;
    // Set before an endpoint is enabled; and read after it, where another value is refused.
    std::vector<EndpointOption> options = {}, required = {};

    void (*set_hints)(fi_info& hints, const std::string& host);
    // Why an offer cannot be used; empty: it can.
    std::string (*refuse)(const fi_info& info) = [](const fi_info&) { return std::string(); };
    // Whether any queue of a domain has a descriptor that tells of all that the domain has to do.
    bool (*has_domain_fd)(const fi_info& info) = [](const fi_info&) { return false; };
    // What an endpoint of its own needs in its fi_info.
    void (*prepare_endpoint)(fi_info& info) = nullptr;
};

const ProviderRules& tcp_rules();
const ProviderRules& shm_rules();
const ProviderRules& verbs_rules();
const ProviderRules& efa_rules();
const ProviderRules& rules_of(Provider provider);
const char* name_of(Provider provider);

// An fi_info to ask with: what every provider is asked, then what this one is. Freed with freeinfo().
fi_info* make_hints(const ProviderRules& rules, const char* name, const std::string& host, bool device_memory);
// What no provider may lack, then what this one may not.
std::string refusal(const ProviderRules& rules, const fi_info& info);
// The usable offer with the best fabric, or null with each refusal in `reasons`.
const fi_info* choose(const ProviderRules& rules, const char* name, const fi_info* offers, std::string& reasons);

}  // namespace pdx
