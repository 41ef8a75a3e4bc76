#include "domain_group.hpp"

#include <algorithm>
#include <cerrno>
#include <cstdint>

#include "common.hpp"

namespace pdx {

DomainGroup::DomainGroup(Provider provider, const std::vector<std::string>& hosts, size_t cq_entries,
                         bool device_memory)
    : iov_limit_(SIZE_MAX), tx_entries_(SIZE_MAX), max_write_bytes_(SIZE_MAX) {
    const size_t limit = std::min(rules_of(provider).max_domains, kMaxDomains);
    if (hosts.empty() || hosts.size() > limit) {
        throw Error(EINVAL, "a group of " + std::to_string(hosts.size()) + " domains is not between 1 and " +
                                std::to_string(limit));
    }
    for (const std::string& host : hosts) {
        domains_.push_back(std::make_unique<Domain>(DomainOptions{provider, host, cq_entries, device_memory}));
        const Domain& opened = *domains_.back();
        iov_limit_ = std::min(iov_limit_, opened.iov_limit());
        tx_entries_ = std::min(tx_entries_, opened.tx_entries());
        max_write_bytes_ = std::min(max_write_bytes_, opened.max_write_bytes());
        polled_ |= opened.cq_fd() < 0;
    }
}

std::vector<int> DomainGroup::cq_fds() const {
    std::vector<int> fds;
    for (const auto& domain : domains_) {
        if (domain->cq_fd() >= 0) fds.push_back(domain->cq_fd());
    }
    return fds;
}

bool DomainGroup::may_wait() const {
    return std::all_of(domains_.begin(), domains_.end(),
                       [](const auto& domain) { return domain->cq_fd() < 0 || domain->may_wait(); });
}

}  // namespace pdx
