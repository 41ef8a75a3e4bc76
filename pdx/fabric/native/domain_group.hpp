// The domains of one fabric, each on an address of its own, and the limits that hold for all of them.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "domain.hpp"

namespace pdx {

// Domains in one group, and lanes of one link.
constexpr size_t kMaxDomains = kMaxPeerEnds;

class DomainGroup {
  public:
    // One domain for each of `hosts`: see DomainOptions. shm has one, and its host is empty.
    DomainGroup(Provider provider, const std::vector<std::string>& hosts, size_t cq_entries, bool device_memory);

    size_t size() const { return domains_.size(); }
    Domain& operator[](size_t i) const { return *domains_[i]; }
    const ProviderRules& rules() const { return domains_[0]->rules(); }
    size_t iov_limit() const { return iov_limit_; }
    size_t tx_entries() const { return tx_entries_; }
    size_t max_write_bytes() const { return max_write_bytes_; }
    // A queue of the group has no descriptor to sleep on.
    bool polled() const { return polled_; }
    std::vector<int> cq_fds() const;
    // True if the worker may sleep on all descriptors now.
    bool may_wait() const;

  private:
    std::vector<std::unique_ptr<Domain>> domains_;
    size_t iov_limit_, tx_entries_, max_write_bytes_;
    bool polled_ = false;
};

}  // namespace pdx
