#include "provider.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "../common.hpp"
#include "../libfabric.hpp"

namespace pdx {
namespace {

constexpr uint64_t kKnownModes = FI_CONTEXT | FI_CONTEXT2;
constexpr int kKnownMrModes = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY | FI_MR_HMEM;
constexpr size_t kImmBytes = 4;

size_t rank(const ProviderRules& rules, const fi_info& info) {
    if (rules.fabrics.empty()) return 0;
    size_t i = 0;
    while (i < rules.fabrics.size() && std::strcmp(rules.fabrics[i], info.fabric_attr->name)) i++;
    return i;
}

}  // namespace

const ProviderRules& rules_of(Provider provider) {
    switch (provider) {
        case Provider::kTcp: return tcp_rules();
        case Provider::kShm: return shm_rules();
        case Provider::kVerbs: return verbs_rules();
        case Provider::kEfa: return efa_rules();
    }
    throw Error(EINVAL, "provider " + std::to_string(static_cast<int>(provider)) + " is unknown");
}

const char* name_of(Provider provider) {
    constexpr const char* kNames[kNumProviders] = {"tcp", "shm", "verbs", "efa"};
    return kNames[static_cast<int>(provider)];
}

fi_info* make_hints(const ProviderRules& rules, const char* name, const std::string& host, bool device_memory) {
    fi_info* hints = libfabric().dupinfo(nullptr);
    if (!hints) throw Error(ENOMEM, "fi_allocinfo: out of memory");
    hints->fabric_attr->prov_name = strdup(name);
    hints->ep_attr->type = FI_EP_RDM;
    hints->caps = FI_MSG | FI_RMA | (device_memory ? FI_HMEM : 0);
    hints->mode = kKnownModes;
    hints->domain_attr->mr_mode = kKnownMrModes & (device_memory ? ~0 : ~FI_MR_HMEM);
    hints->domain_attr->cq_data_size = kImmBytes;
    hints->domain_attr->threading = FI_THREAD_SAFE;
    hints->domain_attr->data_progress = FI_PROGRESS_MANUAL;
    hints->domain_attr->control_progress = FI_PROGRESS_MANUAL;
    hints->domain_attr->resource_mgmt = FI_RM_ENABLED;
    // No order is asked for and none relied on, so that a provider may use relaxed ordering on the PCIe bus.
    hints->tx_attr->msg_order = hints->rx_attr->msg_order = FI_ORDER_NONE;
    rules.set_hints(*hints, host);
    return hints;
}

std::string refusal(const ProviderRules& rules, const fi_info& info) {
    if (info.ep_attr->type != FI_EP_RDM) return "its endpoints are not reliable datagrams";
    if (!(info.caps & FI_RMA)) return "it has no remote writes";
    if (info.mode & ~kKnownModes) return "it asks for a mode that pdx does not serve";
    if (info.domain_attr->mr_mode & ~kKnownMrModes) return "it asks for a kind of registration that pdx does not do";
    if (info.domain_attr->cq_data_size < kImmBytes) {
        return "a write carries " + std::to_string(info.domain_attr->cq_data_size) + " bytes of immediate, not 4";
    }
    return rules.refuse(info);
}

const fi_info* choose(const ProviderRules& rules, const char* name, const fi_info* offers, std::string& reasons) {
    const fi_info* best = nullptr;
    // Only an exact match of the name: asking for tcp also gives tcp;ofi_rxm.
    for (const fi_info* offer = offers; offer; offer = offer->next) {
        if (std::strcmp(offer->fabric_attr->prov_name, name) != 0) continue;
        const std::string reason = refusal(rules, *offer);
        if (!reason.empty()) {
            reasons += (reasons.empty() ? "" : "; ") + reason;
        } else if (!best || rank(rules, *offer) < rank(rules, *best)) {
            best = offer;
        }
    }
    return best;
}

}  // namespace pdx
