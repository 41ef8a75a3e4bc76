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

namespace pdx {

enum class Provider { kTcp = 0, kShm = 1 };

// Addresses of one peer that an endpoint may have to know.
constexpr size_t kMaxPeerEnds = 8;

struct Endpoint {
    fid_ep* ep = nullptr;
    fid_av* av = nullptr;  // one per endpoint: it dies with its link, and no peer's entry outlives it
};

class Domain {
  public:
    // `host` is a numeric address of this machine to bind (tcp only).
    Domain(Provider provider, const std::string& host, size_t cq_entries);
    ~Domain();
    Domain(const Domain&) = delete;
    Domain& operator=(const Domain&) = delete;

    Endpoint open_endpoint();
    fid_mr* register_memory(void* address, size_t num_bytes, uint64_t wanted_key);
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
    bool may_wait() const;
    // The queue must hold all that all links may have in it, or it would overflow. Throws Error(ENOSPC).
    void reserve_queue(size_t entries);
    void release_queue(size_t entries) { reserved_entries_ -= entries; }

    Provider provider() const { return provider_; }
    fid_cq* cq() const { return cq_; }
    int cq_fd() const { return cq_fd_; }  // -1: there is none, and the queue is polled
    size_t iov_limit() const { return iov_limit_; }
    size_t tx_entries() const { return tx_entries_; }
    size_t max_write_bytes() const { return max_write_bytes_; }
    const std::string& provider_name() const { return provider_name_; }
    DomainStatistics& statistics() { return statistics_; }

  private:
    Provider provider_;
    size_t cq_entries_;
    std::atomic<size_t> reserved_entries_{0};
    DomainStatistics statistics_;
    std::mutex progress_mutex_;
    std::string provider_name_;
    fi_info* info_ = nullptr;
    fid_fabric* fabric_ = nullptr;
    fid_domain* domain_ = nullptr;
    fid_cq* cq_ = nullptr;
    int cq_fd_ = -1;
    bool virtual_addresses_ = false;
    bool provider_keys_ = false;
    size_t iov_limit_ = 1;
    size_t tx_entries_ = 0;
    size_t max_write_bytes_ = 0;

    void open(const std::string& host);
    void close();
};

// The provider's name in the loaded library, empty if it offers none here.
std::string probe_provider(Provider provider);

// The file that holds an shm endpoint's region, from the endpoint's name; empty for other names.
std::string shm_region_path(const std::vector<char>& name);

// Removes regions that dead processes of this PID namespace and user left in /dev/shm. Only names of ours are touched.
void sweep_shm();

uint64_t pid_namespace();

}  // namespace pdx
