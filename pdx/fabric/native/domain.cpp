#include "domain.hpp"

#include <rdma/fi_cm.h>
#include <rdma/fi_errno.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>

#include "common.hpp"
#include "newer.hpp"
#include "port_sockets.hpp"

namespace pdx {
namespace {

constexpr uint32_t kApiVersion = FI_VERSION(1, 17);
constexpr size_t kTxEntries = 256;
// A stranger may hold many connections of an endpoint; we do not wait for ever.
constexpr int kMaxHangUps = 64;

void check(int rc, const char* what) {
    if (rc) throw Error(-rc, std::string(what) + ": " + describe(-rc));
}

// The offer to use, a copy; null with the reasons of those that cannot be.
fi_info* find_info(const ProviderRules& rules, const std::string& host, bool device_memory, std::string& reasons) {
    const bool bind = rules.by_address && !host.empty();
    for (const char* name : rules.names) {
        fi_info* hints = make_hints(rules, name, host, device_memory);
        fi_info* offers = nullptr;
        const int rc = libfabric().getinfo(kApiVersion, bind ? host.c_str() : nullptr, nullptr, bind ? FI_SOURCE : 0,
                                           hints, &offers);
        libfabric().freeinfo(hints);
        if (rc) continue;
        const fi_info* chosen = choose(rules, name, offers, reasons);
        fi_info* copy = chosen ? libfabric().dupinfo(chosen) : nullptr;
        libfabric().freeinfo(offers);
        if (copy) return copy;
    }
    return nullptr;
}

}  // namespace

Domain::Domain(const DomainOptions& options) : options_(options), rules_(rules_of(options.provider)) {
    try {
        open();
    } catch (...) {
        close();
        throw;
    }
}

Domain::~Domain() { close(); }

void Domain::open() {
    const std::string name = name_of(options_.provider);
    if (options_.device_memory && !rules_.device_memory) {
        throw Error(EOPNOTSUPP, name + " moves host memory only: device memory needs verbs or efa");
    }
    std::string reasons;
    info_ = find_info(rules_, options_.host, options_.device_memory, reasons);
    if (!info_) {
        throw Error(FI_ENODATA, "libfabric offers no usable " + name + " provider" +
                                    (options_.host.empty() ? "" : " on " + options_.host) +
                                    (reasons.empty() ? "" : ": " + reasons));
    }
    provider_name_ = info_->fabric_attr->prov_name;
    virtual_addresses_ = info_->domain_attr->mr_mode & FI_MR_VIRT_ADDR;
    provider_keys_ = info_->domain_attr->mr_mode & FI_MR_PROV_KEY;
    iov_limit_ = std::min(info_->tx_attr->iov_limit, info_->tx_attr->rma_iov_limit);
    tx_entries_ = std::min(info_->tx_attr->size, kTxEntries);
    max_write_bytes_ = info_->ep_attr->max_msg_size;
    check(libfabric().fabric(info_->fabric_attr, &fabric_, nullptr), "fi_fabric");
    check(fi_domain(fabric_, info_, &domain_, nullptr), "fi_domain");
    fi_cq_attr attr{};
    attr.size = options_.cq_entries;
    attr.format = FI_CQ_FORMAT_DATA;
    attr.wait_obj = FI_WAIT_NONE;
    check(fi_cq_open(domain_, &attr, &cq_, nullptr), "fi_cq_open");
    if (rules_.has_domain_fd(*info_)) {
        attr.size = 1;
        attr.wait_obj = FI_WAIT_FD;
        check(fi_cq_open(domain_, &attr, &sleeping_cq_, nullptr), "fi_cq_open");
        check(fi_control(&sleeping_cq_->fid, FI_GETWAIT, &cq_fd_), "fi_control(FI_GETWAIT)");
    }
    if (rules_.shared_endpoint) {
        shared_ = make_endpoint();
        shared_.shared = true;
    }
}

void Domain::close() {
    if (shared_.ep) fi_close(&shared_.ep->fid);
    if (shared_.av) fi_close(&shared_.av->fid);
    if (sleeping_cq_) fi_close(&sleeping_cq_->fid);
    if (cq_) fi_close(&cq_->fid);
    if (domain_) fi_close(&domain_->fid);
    if (fabric_) fi_close(&fabric_->fid);
    if (info_) libfabric().freeinfo(info_);
    shared_ = {};
    sleeping_cq_ = nullptr, cq_ = nullptr, domain_ = nullptr, fabric_ = nullptr, info_ = nullptr;
}

Endpoint Domain::open_endpoint() { return rules_.shared_endpoint ? shared_ : make_endpoint(); }

Endpoint Domain::make_endpoint() {
    fi_info* info = libfabric().dupinfo(info_);
    if (!info) throw Error(ENOMEM, "fi_dupinfo: out of memory");
    Endpoint endpoint;
    try {
        if (rules_.prepare_endpoint) rules_.prepare_endpoint(*info);
        enable(endpoint, *info);
    } catch (...) {
        libfabric().freeinfo(info);
        if (endpoint.ep) fi_close(&endpoint.ep->fid);
        if (endpoint.av) fi_close(&endpoint.av->fid);
        throw;
    }
    libfabric().freeinfo(info);
    return endpoint;
}

void Domain::enable(Endpoint& endpoint, fi_info& info) {
    // An endpoint belongs to the queue from when it is bound, but shm can only drive one that is enabled: a read in
    // between calls through a null pointer (libfabric 2.5).
    std::lock_guard lock(progress_mutex_);
    fi_av_attr attr{};
    attr.type = FI_AV_TABLE;
    attr.count = kMaxPeerEnds;
    check(fi_av_open(domain_, &attr, &endpoint.av, nullptr), "fi_av_open");
    check(fi_endpoint(domain_, &info, &endpoint.ep, nullptr), "fi_endpoint");
    // The AV is bound first: closing an endpoint without one crashes libfabric 1.17.
    check(fi_ep_bind(endpoint.ep, &endpoint.av->fid, 0), "fi_ep_bind");
    check(fi_ep_bind(endpoint.ep, &cq_->fid, FI_RECV | FI_TRANSMIT), "fi_ep_bind");
    for (const EndpointOption& option : rules_.options) {
        if (option.device_memory && !options_.device_memory) continue;
        check(fi_setopt(&endpoint.ep->fid, FI_OPT_ENDPOINT, option.name, &option.value, sizeof option.value),
              option.what);
    }
    check(fi_enable(endpoint.ep), "fi_enable");
    for (const EndpointOption& option : rules_.required) {
        bool value = !option.value;
        size_t size = sizeof value;
        check(fi_getopt(&endpoint.ep->fid, FI_OPT_ENDPOINT, option.name, &value, &size), option.what);
        if (value != option.value) throw Error(EOPNOTSUPP, std::string("the endpoint has ") + option.what);
    }
}

void Domain::close_endpoint(Endpoint& endpoint) {
    if (endpoint.ep && !endpoint.shared) {
        if (rules_.forgets_accepted) hang_up(endpoint);
        fi_close(&endpoint.ep->fid);
    }
    endpoint.ep = nullptr;
}

// No connection may be left whose request is not read: libfabric would read it later, into the endpoint that is freed.
// What is shut down can be read, and one drive of the domain reads and closes 64 of them or more.
void Domain::hang_up(const Endpoint& endpoint) {
    std::vector<char> name(sizeof(sockaddr_storage));
    size_t len = name.size();
    if (fi_getname(&endpoint.ep->fid, name.data(), &len)) return;
    for (int i = 0; i < kMaxHangUps && shut_port(name) > 0; i++) read_queue(nullptr, 0);
}

void Domain::close_addresses(Endpoint& endpoint) const {
    if (endpoint.av && !endpoint.shared) fi_close(&endpoint.av->fid);
    endpoint.av = nullptr;
}

fid_mr* Domain::register_memory(const Memory& memory, uint64_t wanted_key) {
    iovec range{memory.address, memory.num_bytes};
    MrDmabuf dmabuf{memory.dmabuf_fd, memory.dmabuf_offset, memory.num_bytes, memory.address};
    MrAttributes wanted{};
    fi_mr_attr& attr = wanted.attr;
    attr.mr_iov = &range;
    attr.iov_count = 1;
    attr.access = FI_WRITE | FI_REMOTE_WRITE;
    attr.requested_key = provider_keys_ ? 0 : wanted_key;
    if (memory.on_device()) {
        attr.mr_iov = reinterpret_cast<const iovec*>(&dmabuf);
        attr.iface = FI_HMEM_CUDA;
        attr.device.cuda = memory.cuda_device;
    }
    fid_mr* mr = nullptr;
    check(fi_mr_regattr(domain_, &attr, memory.on_device() ? kMrDmabuf : 0, &mr), "fi_mr_regattr");
    return mr;
}

std::vector<char> Domain::endpoint_name(const Endpoint& endpoint) const {
    std::vector<char> name(512);
    size_t len = name.size();
    check(fi_getname(&endpoint.ep->fid, name.data(), &len), "fi_getname");
    name.resize(len);
    return name;
}

// shm's insert holds the address vector's lock and takes the queue's, a read of the queue the other way round
// (libfabric 2.5): both would wait for ever.
fi_addr_t Domain::insert_peer(const Endpoint& endpoint, const void* name) {
    std::lock_guard lock(progress_mutex_);
    fi_addr_t peer = FI_ADDR_UNSPEC;
    const int count = fi_av_insert(endpoint.av, name, 1, &peer, 0, nullptr);
    if (count != 1) {
        throw Error(count < 0 ? -count : FI_EADDRNOTAVAIL, "fi_av_insert refuses the peer's address");
    }
    return peer;
}

// A completion may also come with a post, as that of a beat does after the turn's last read; no descriptor tells of it.
// Reading no entries drives the domain once more and says whether there are any.
bool Domain::may_wait() {
    fid* fids[1] = {&sleeping_cq_->fid};
    return fi_trywait(fabric_, fids, 1) == 0 && read_queue(nullptr, 0) == -FI_EAGAIN;
}

void Domain::reserve_queue(size_t entries) {
    if (reserved_entries_.fetch_add(entries) + entries <= options_.cq_entries) return;
    reserved_entries_ -= entries;
    throw Error(ENOSPC, "the completion queue of " + std::to_string(options_.cq_entries) +
                            " entries is promised to the links that are open");
}

std::string probe_provider(Provider provider) {
    const ProviderRules& rules = rules_of(provider);
    std::string reasons;
    fi_info* info = find_info(rules, provider == Provider::kTcp ? "127.0.0.1" : "", false, reasons);
    if (!info) return "";
    std::string name = info->fabric_attr->prov_name;
    libfabric().freeinfo(info);
    return name;
}

}  // namespace pdx
