#include "fabric.hpp"

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <random>

#include "newer.hpp"
#include "providers/shm.hpp"

namespace pdx {
namespace {

// The end of the furthest atom, or the largest number if that does not fit 64 bits.
uint64_t furthest(uint64_t offset, uint64_t layer_stride, uint32_t num_layers, uint64_t page_stride,
                  const std::vector<uint32_t>& pages, uint64_t page_bytes) {
    const uint32_t last = *std::max_element(pages.begin(), pages.end());
    const auto end = static_cast<unsigned __int128>(offset) +
                     static_cast<unsigned __int128>(layer_stride) * (num_layers - 1) +
                     static_cast<unsigned __int128>(page_stride) * last + page_bytes;
    return end > UINT64_MAX ? UINT64_MAX : static_cast<uint64_t>(end);
}

void check_end(uint64_t end, uint64_t num_bytes, const char* whose) {
    if (end <= num_bytes) return;
    throw Error(ERANGE, "the batch reaches byte " + std::to_string(end) + " of " + whose + " region of " +
                            std::to_string(num_bytes) + " bytes");
}

int open_pidfd(int pid) { return static_cast<int>(syscall(SYS_pidfd_open, pid, 0)); }

}  // namespace

Fabric::Fabric(const FabricOptions& options)
    : device_memory_(options.device_memory),
      domains_(options.provider, options.hosts, options.cq_entries, options.device_memory),
      worker_(domains_, ops_, slots_, events_, statistics_, options.worker),
      first_tag_(std::random_device{}()) {}

RegionId Fabric::register_region(const Memory& memory) {
    if (!memory.address || !memory.num_bytes) throw Error(EINVAL, "a region needs an address and at least one byte");
    if (memory.num_bytes - 1 > UINTPTR_MAX - reinterpret_cast<uintptr_t>(memory.address)) {
        throw Error(EINVAL, "a region of " + std::to_string(memory.num_bytes) + " bytes reaches beyond the last address");
    }
    if (memory.on_device() && !device_memory_) {
        throw Error(EOPNOTSUPP, "the fabric was not opened for device memory (FabricOptions.device_memory)");
    }
    if (memory.on_device() && libfabric().version < kDmabufVersion) {
        throw Error(EOPNOTSUPP, "libfabric registers DMA-BUFs from 1.20 on, and " + libfabric().path + " is older");
    }
    std::lock_guard lock(mutex_);
    const RegionId id = next_id_++;
    regions_[id] = std::make_shared<Region>(id, memory);
    return id;
}

void Fabric::unregister_region(RegionId id) {
    std::lock_guard lock(mutex_);
    const auto region = regions_.find(id);
    if (region == regions_.end()) throw Error(ENOENT, "region " + std::to_string(id) + " is not registered");
    if (const uint32_t used = region->second->num_links.load()) {
        throw Error(EBUSY, "region " + std::to_string(id) + " is still used by " + std::to_string(used) +
                               " links that are not fenced");
    }
    regions_.erase(region);
}

std::shared_ptr<const Link> Fabric::open_link(RegionId region_id, uint32_t window) {
    std::unique_lock lock(mutex_);
    const auto region = regions_.find(region_id);
    if (region == regions_.end()) throw Error(ENOENT, "region " + std::to_string(region_id) + " is not registered");
    const std::shared_ptr<Region> of_region = region->second;
    const LinkId id = next_id_++;
    lock.unlock();
    // Identifiers rise by one, so two tags are equal only a million links apart.
    const auto tag = static_cast<uint32_t>(first_tag_ + id) & kProbeTagMask;
    auto opened = std::make_shared<Link>(id, domains_, of_region, window, tag);
    lock.lock();
    links_[id].link = opened;
    worker_.submit({.kind = Command::Kind::kAddLink, .link = id, .new_link = opened});
    return opened;
}

Fabric::LinkEntry& Fabric::find_link(LinkId id) {
    const auto found = links_.find(id);
    if (found == links_.end()) throw Error(ENOENT, "link " + std::to_string(id) + " is not open");
    return found->second;
}

std::shared_ptr<const Link> Fabric::link(LinkId id) {
    std::lock_guard lock(mutex_);
    return find_link(id).link;
}

void Fabric::connect(LinkId id, PeerAddress peer) {
    std::lock_guard lock(mutex_);
    LinkEntry& entry = find_link(id);
    if (entry.connected) throw Error(EISCONN, "link " + std::to_string(id) + " is connected already");
    if (domains_.rules().target_pulls) {
        // shm. Within one process the provider shares the region by pointer, and frees it under the peer's feet.
        if (peer.pid == getpid()) throw Error(EINVAL, "shm joins two processes, and this peer is in our own");
        peer.pidfd = open_pidfd(peer.pid);
        if (peer.pidfd < 0 && errno == ESRCH) throw Error(ESRCH, "the peer's process is gone");
        peer.region_path = shm_region_path(peer.ends[0].name);
    }
    for (const Lane& lane : Link::make_lanes(domains_.size(), peer.ends.size())) {
        peer.lane_addresses.push_back(
            domains_[lane.own].insert_peer(entry.link->own[lane.own].endpoint, peer.ends[lane.peer].name.data()));
    }
    entry.connected = true;
    entry.peer_bytes = peer.region_bytes;
    worker_.submit({.kind = Command::Kind::kConnect, .link = id, .peer = std::move(peer)});
}

// Slots stop counting at once; the endpoint is closed by the worker.
void Fabric::fence(LinkId id) {
    std::lock_guard lock(mutex_);
    if (!links_.erase(id)) {
        if (id > 0 && id < next_id_) return;
        throw Error(ENOENT, "link " + std::to_string(id) + " was never opened");
    }
    slots_.disarm_link(id);
    worker_.submit({.kind = Command::Kind::kFence, .link = id});
}

void Fabric::check_slot(uint32_t slot, uint32_t generation) {
    if (slot == 0 || slot >= kNumSlots || generation >= kNumGenerations) {
        throw Error(EINVAL, "slot " + std::to_string(slot) + " generation " + std::to_string(generation) +
                                " is out of range: slots are 1 to 4095, generations 0 to 4095");
    }
}

TransferId Fabric::open_transfer(LinkId link, uint32_t slot, uint32_t generation) {
    check_slot(slot, generation);
    std::lock_guard lock(mutex_);
    if (!find_link(link).connected) throw Error(ENOTCONN, "link " + std::to_string(link) + " is not connected");
    const TransferId id = next_id_++;
    transfers_[id].link = link;
    // Nothing to do before the first batch: waking a thread costs as much as all the rest of this.
    worker_.queue({.kind = Command::Kind::kOpenTransfer, .link = link, .transfer = id, .slot = slot,
                   .generation = generation});
    return id;
}

void Fabric::add_batch(TransferId id, std::unique_ptr<Batch> batch) {
    std::lock_guard lock(mutex_);
    const auto transfer = transfers_.find(id);
    if (transfer == transfers_.end() || transfer->second.closed) {
        throw Error(ENOENT, "transfer " + std::to_string(id) + " takes no more batches");
    }
    const auto link = links_.find(transfer->second.link);
    if (link == links_.end()) return;  // fenced: the transfer's end is on its way
    if (batch->num_layers && !batch->src_pages.empty()) {
        check_end(furthest(batch->src_offset, batch->src_layer_stride, batch->num_layers, batch->src_page_stride,
                           batch->src_pages, batch->page_bytes),
                  link->second.link->region->memory.num_bytes, "our");
        check_end(furthest(batch->dst_offset, batch->dst_layer_stride, batch->num_layers, batch->dst_page_stride,
                           batch->dst_pages, batch->page_bytes),
                  link->second.peer_bytes, "the peer's");
    }
    if (batch->page_bytes > domains_.max_write_bytes()) {
        throw Error(EMSGSIZE, "a page of " + std::to_string(batch->page_bytes) + " bytes is above the provider's " +
                                  std::to_string(domains_.max_write_bytes()));
    }
    worker_.submit({.kind = Command::Kind::kAddBatch, .transfer = id, .batch = std::move(batch)});
}

void Fabric::seal(TransferId id) {
    std::lock_guard lock(mutex_);
    const auto transfer = transfers_.find(id);
    if (transfer == transfers_.end()) return;
    transfer->second.closed = true;
    worker_.submit({.kind = Command::Kind::kSeal, .transfer = id});
}

void Fabric::cancel(TransferId id) {
    std::lock_guard lock(mutex_);
    const auto transfer = transfers_.find(id);
    if (transfer == transfers_.end()) return;
    transfer->second.closed = true;
    worker_.submit({.kind = Command::Kind::kCancel, .transfer = id});
}

void Fabric::expect(LinkId link, uint32_t slot, uint32_t generation, uint64_t atoms) {
    check_slot(slot, generation);
    std::lock_guard lock(mutex_);
    find_link(link);
    slots_.expect(link, slot, generation, atoms);
    // A sleeping worker may be polling an shm queue only every 20 ms.
    if (domains_.polled()) worker_.sleeper().kick();
}

void Fabric::retarget(uint32_t slot, uint32_t generation, uint64_t atoms) {
    check_slot(slot, generation);
    slots_.retarget(slot, generation, atoms);
}

uint64_t Fabric::count(uint32_t slot, uint32_t generation) {
    check_slot(slot, generation);
    return slots_.count(slot, generation);
}

uint64_t Fabric::release(uint32_t slot, uint32_t generation) {
    check_slot(slot, generation);
    return slots_.release(slot, generation);
}

std::vector<Event> Fabric::take_events(size_t max) {
    std::vector<Event> events = events_.take(max);
    std::lock_guard lock(mutex_);
    for (const Event& event : events) {
        if (event.kind == EventKind::kTransferDone) transfers_.erase(event.transfer);
    }
    return events;
}

}  // namespace pdx
