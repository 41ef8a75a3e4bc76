// One libfabric domain with its one completion queue, and the making of endpoints and registrations on it.
//
// Endpoints and registrations are made on the callers' threads (the domain is asked to be thread safe), so that the
// worker does not do that work; the worker reads the queue and closes endpoints.
#pragma once

#include <rdma/fabric.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_eq.h>

#include <atomic>
#include <mutex>
#include <string>
#include <vector>

#include "events.hpp"
#include "libfabric.hpp"
#include "providers/provider.hpp"

namespace pdx {

// Addresses of one peer that an endpoint may have to know.
constexpr size_t kMaxPeerEnds = 8;

struct Endpoint {
    fid_ep* ep = nullptr;
    fid_av* av = nullptr;  // one per endpoint: it dies with its link, and no peer's entry outlives it
    bool shared = false;   // the domain's, not the link's
};

// Memory to register: host memory, or a device's, which is named by a DMA-BUF.
struct Memory {
    char* address;
    uint64_t num_bytes;
    int dmabuf_fd = -1;
    uint64_t dmabuf_offset = 0;
    int cuda_device = 0;

    bool on_device() const { return dmabuf_fd >= 0; }
};

struct DomainOptions {
    Provider provider;
    std::string host;  // a numeric address of this machine (tcp, verbs) or the domain's name (efa)
    size_t cq_entries;
    bool device_memory;
};

class Domain {
  public:
    explicit Domain(const DomainOptions& options);
    ~Domain();
    Domain(const Domain&) = delete;
    Domain& operator=(const Domain&) = delete;

    // The link's own, or the one that all links share where the provider has it so.
    Endpoint open_endpoint();
    // A fence: closes the endpoint first, its addresses after its registrations. Nothing if it is shared.
    void close_endpoint(Endpoint& endpoint);
    void close_addresses(Endpoint& endpoint) const;
    fid_mr* register_memory(const Memory& memory, uint64_t wanted_key);
    std::vector<char> endpoint_name(const Endpoint& endpoint) const;
    fi_addr_t insert_peer(const Endpoint& endpoint, const void* name);
    // The base that a peer adds offsets to.
    uint64_t remote_base(const void* address) const {
        return virtual_addresses_ ? reinterpret_cast<uint64_t>(address) : 0;
    }
    // fi_cq_read, which also drives every endpoint. Never while open_endpoint() is between binding and enabling one.
    ssize_t read_queue(void* entries, size_t count) {
        std::lock_guard lock(progress_mutex_);
        return fi_cq_read(cq_, entries, count);
    }
    // True if the worker may sleep on cq_fd() now; false: read the queue first.
    bool may_wait();
    // The queue must hold all that all links may have in it, or it would overflow. Throws Error(ENOSPC).
    void reserve_queue(size_t entries);
    void release_queue(size_t entries) { reserved_entries_ -= entries; }

    Provider provider() const { return options_.provider; }
    const ProviderRules& rules() const { return rules_; }
    fid_cq* cq() const { return cq_; }
    int cq_fd() const { return cq_fd_; }  // -1: there is none, and the queue is polled
    size_t iov_limit() const { return iov_limit_; }
    size_t tx_entries() const { return tx_entries_; }
    size_t max_write_bytes() const { return max_write_bytes_; }
    const std::string& provider_name() const { return provider_name_; }
    DomainStatistics& statistics() { return statistics_; }

  private:
    const DomainOptions options_;
    const ProviderRules& rules_;
    std::atomic<size_t> reserved_entries_{0};
    DomainStatistics statistics_;
    std::mutex progress_mutex_;
    std::string provider_name_;
    fi_info* info_ = nullptr;
    fid_fabric* fabric_ = nullptr;
    fid_domain* domain_ = nullptr;
    fid_cq* cq_ = nullptr;
    // Nothing is bound to this one; it has the descriptor. tcp's descriptor of any queue tells of all sockets of the domain,
    // and the queue that has one is signalled for each completion besides: at 4 KiB that was a twentieth of the rate.
    fid_cq* sleeping_cq_ = nullptr;
    Endpoint shared_;
    int cq_fd_ = -1;
    bool virtual_addresses_ = false;
    bool provider_keys_ = false;
    size_t iov_limit_ = 1;
    size_t tx_entries_ = 0;
    size_t max_write_bytes_ = 0;

    void open();
    void close();
    Endpoint make_endpoint();
    void hang_up(const Endpoint& endpoint);
    void enable(Endpoint& endpoint, fi_info& info);
};

// The provider's name in the loaded library, empty if it offers none here.
std::string probe_provider(Provider provider);

}  // namespace pdx
