#include "domain.hpp"

#include <dirent.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_errno.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cinttypes>
#include <cstring>

#include "common.hpp"

namespace pdx {
namespace {

constexpr uint32_t kApiVersion = FI_VERSION(1, 17);
constexpr const char* kShmFolder = "/dev/shm/";
constexpr const char* kShmPrefix = "pdx-fabric-";
constexpr size_t kTxEntries = 256;

void check(int rc, const char* what) {
    if (rc) throw Error(-rc, std::string(what) + ": " + describe(-rc));
}

fi_info* make_hints(Provider provider, const char* name, const std::string& host) {
    fi_info* hints = libfabric().dupinfo(nullptr);
    if (!hints) throw Error(ENOMEM, "fi_allocinfo: out of memory");
    hints->fabric_attr->prov_name = strdup(name);
    hints->ep_attr->type = FI_EP_RDM;
    hints->caps = FI_MSG | FI_RMA;
    hints->mode = FI_CONTEXT | FI_CONTEXT2;
    hints->domain_attr->mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
    hints->domain_attr->cq_data_size = 4;
    hints->domain_attr->threading = FI_THREAD_SAFE;
    hints->domain_attr->data_progress = FI_PROGRESS_MANUAL;
    hints->domain_attr->control_progress = FI_PROGRESS_MANUAL;
    hints->domain_attr->resource_mgmt = FI_RM_ENABLED;
    if (provider == Provider::kTcp) {
        hints->addr_format = host.find(':') != std::string::npos ? FI_SOCKADDR_IN6 : FI_SOCKADDR_IN;
    } else if (FI_MAJOR(libfabric().version) >= 2) {
        // An endpoint has one peer: a quarter of the default queue is enough, and keeps 200 links in little memory.
        hints->tx_attr->size = hints->rx_attr->size = kTxEntries;
    }
    return hints;
}

// Keeps only an exact match of the name: asking for tcp also gives tcp;ofi_rxm.
fi_info* find_info(Provider provider, const std::string& host) {
    // The native TCP provider is "tcp" from libfabric 1.18 on and "net" in 1.17.
    const std::vector<const char*> names =
        provider == Provider::kTcp ? std::vector<const char*>{"tcp", "net"} : std::vector<const char*>{"shm"};
    for (const char* name : names) {
        fi_info* hints = make_hints(provider, name, host);
        fi_info* found = nullptr;
        const bool bind = !host.empty();
        int rc = libfabric().getinfo(kApiVersion, bind ? host.c_str() : nullptr, nullptr, bind ? FI_SOURCE : 0, hints,
                                     &found);
        libfabric().freeinfo(hints);
        if (rc) continue;
        fi_info* match = found;
        while (match && std::strcmp(match->fabric_attr->prov_name, name) != 0) match = match->next;
        fi_info* copy = match ? libfabric().dupinfo(match) : nullptr;
        libfabric().freeinfo(found);
        if (copy) return copy;
    }
    return nullptr;
}

}  // namespace

Domain::Domain(Provider provider, const std::string& host, size_t cq_entries)
    : provider_(provider), cq_entries_(cq_entries) {
    try {
        open(host);
    } catch (...) {
        close();
        throw;
    }
}

Domain::~Domain() { close(); }

void Domain::open(const std::string& host) {
    info_ = find_info(provider_, host);
    if (!info_) {
        throw Error(FI_ENODATA, std::string("libfabric offers no ") +
                                    (provider_ == Provider::kTcp ? "native tcp provider" : "shm provider") +
                                    (host.empty() ? "" : " on " + host));
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
    attr.size = cq_entries_;
    attr.format = FI_CQ_FORMAT_DATA;
    // shm has no descriptor, and that of 1.17's "net" is always readable once a link is up: both are polled.
    attr.wait_obj = provider_name_ == "tcp" ? FI_WAIT_FD : FI_WAIT_NONE;
    check(fi_cq_open(domain_, &attr, &cq_, nullptr), "fi_cq_open");
    if (attr.wait_obj == FI_WAIT_FD) check(fi_control(&cq_->fid, FI_GETWAIT, &cq_fd_), "fi_control(FI_GETWAIT)");
}

void Domain::close() {
    if (cq_) fi_close(&cq_->fid);
    if (domain_) fi_close(&domain_->fid);
    if (fabric_) fi_close(&fabric_->fid);
    if (info_) libfabric().freeinfo(info_);
    cq_ = nullptr, domain_ = nullptr, fabric_ = nullptr, info_ = nullptr;
}

Endpoint Domain::open_endpoint() {
    fi_info* info = libfabric().dupinfo(info_);
    if (!info) throw Error(ENOMEM, "fi_dupinfo: out of memory");
    if (provider_ == Provider::kShm) {
        // A name of ours, so that sweep_shm() knows what a dead process left.
        static std::atomic<uint64_t> serial{0};
        char name[96];
        std::snprintf(name, sizeof name, "fi_shm://%s%" PRIu64 "-%d-%" PRIu64, kShmPrefix, pid_namespace(), getpid(),
                      serial.fetch_add(1));
        free(info->src_addr);
        info->src_addr = strdup(name);
        info->src_addrlen = std::strlen(name) + 1;
    }
    // An endpoint belongs to the queue from when it is bound, but shm can only drive one that is enabled: a read in
    // between calls through a null pointer (libfabric 2.5).
    std::lock_guard lock(progress_mutex_);
    Endpoint endpoint;
    fi_av_attr av_attr{};
    av_attr.type = FI_AV_TABLE;
    av_attr.count = kMaxPeerEnds;
    const char* what = "fi_av_open";
    int rc = fi_av_open(domain_, &av_attr, &endpoint.av, nullptr);
    if (!rc) what = "fi_endpoint", rc = fi_endpoint(domain_, info, &endpoint.ep, nullptr);
    // The AV is bound first: closing an endpoint without one crashes libfabric 1.17.
    if (!rc) what = "fi_ep_bind", rc = fi_ep_bind(endpoint.ep, &endpoint.av->fid, 0);
    if (!rc) rc = fi_ep_bind(endpoint.ep, &cq_->fid, FI_RECV | FI_TRANSMIT);
    if (!rc) what = "fi_enable", rc = fi_enable(endpoint.ep);
    libfabric().freeinfo(info);
    if (rc) {
        if (endpoint.ep) fi_close(&endpoint.ep->fid);
        if (endpoint.av) fi_close(&endpoint.av->fid);
        throw Error(-rc, std::string(what) + ": " + describe(-rc));
    }
    return endpoint;
}

fid_mr* Domain::register_memory(void* address, size_t num_bytes, uint64_t wanted_key) {
    fid_mr* mr = nullptr;
    check(fi_mr_reg(domain_, address, num_bytes, FI_WRITE | FI_REMOTE_WRITE, 0, provider_keys_ ? 0 : wanted_key, 0,
                    &mr, nullptr),
          "fi_mr_reg");
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

bool Domain::may_wait() const {
    fid* fids[1] = {&cq_->fid};
    return fi_trywait(fabric_, fids, 1) == 0;
}

void Domain::reserve_queue(size_t entries) {
    if (reserved_entries_.fetch_add(entries) + entries <= cq_entries_) return;
    reserved_entries_ -= entries;
    throw Error(ENOSPC, "the completion queue of " + std::to_string(cq_entries_) +
                            " entries is promised to the links that are open");
}

std::string probe_provider(Provider provider) {
    fi_info* info = find_info(provider, provider == Provider::kTcp ? "127.0.0.1" : "");
    if (!info) return "";
    std::string name = info->fabric_attr->prov_name;
    libfabric().freeinfo(info);
    return name;
}

std::string shm_region_path(const std::vector<char>& name) {
    constexpr const char* kScheme = "fi_shm://";
    const std::string text(name.data(), strnlen(name.data(), name.size()));
    if (text.rfind(kScheme, 0) != 0) return "";
    return kShmFolder + text.substr(std::strlen(kScheme));
}

uint64_t pid_namespace() {
    struct stat st;
    return stat("/proc/self/ns/pid", &st) == 0 ? st.st_ino : 0;
}

void sweep_shm() {
    DIR* folder = opendir(kShmFolder);
    if (!folder) return;
    const std::string format = std::string(kShmPrefix) + "%" SCNu64 "-%d-";
    while (const dirent* entry = readdir(folder)) {
        uint64_t ns = 0;
        int pid = 0;
        if (std::sscanf(entry->d_name, format.c_str(), &ns, &pid) != 2 || ns != pid_namespace() || pid <= 0) continue;
        const std::string path = std::string(kShmFolder) + entry->d_name;
        struct stat st;
        if (kill(pid, 0) == 0 || errno != ESRCH || stat(path.c_str(), &st) != 0 || st.st_uid != geteuid()) continue;
        unlink(path.c_str());
    }
    closedir(folder);
}

}  // namespace pdx
