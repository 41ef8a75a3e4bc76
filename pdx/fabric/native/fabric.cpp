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

using Wide = unsigned __int128;

// Where a batch reads, or writes.
struct Side {
    const char* whose;
    uint64_t& offset;
    uint32_t& part;
    const std::vector<uint32_t>& pages;
    uint64_t page_stride, layer_stride;
};

std::string text(Wide offset) {
    return offset > UINT64_MAX ? "beyond 2^64" : std::to_string(static_cast<uint64_t>(offset));
}

// Finds the part of the region that all of a batch lies in, and counts its offset from there.
void place(const Side& side, uint32_t num_layers, uint64_t page_bytes, const std::vector<uint64_t>& part_bytes) {
    const Wide last = *std::max_element(side.pages.begin(), side.pages.end());
    const Wide end = side.offset + Wide{side.layer_stride} * (num_layers - 1) + side.page_stride * last + page_bytes;
    if (part_bytes.size() == 1) {
        if (end <= part_bytes[0]) return;
        throw Error(ERANGE, "the batch reaches byte " + text(end) + " of " + side.whose + " region of " +
                                std::to_string(part_bytes[0]) + " bytes");
    }
    const Wide first = side.offset + side.page_stride * Wide{*std::min_element(side.pages.begin(), side.pages.end())};
    Wide start = 0;
    for (uint32_t i = 0; i < part_bytes.size(); i++) {
        if (first >= start && end <= start + part_bytes[i]) {
            side.offset -= static_cast<uint64_t>(start);
            side.part = i;
            return;
        }
        start += part_bytes[i];
    }
    std::string ends;
    for (Wide part_end = 0; const uint64_t num_bytes : part_bytes) ends.append(" ").append(text(part_end += num_bytes));
    throw Error(ERANGE, "the batch, from byte " + text(first) + " to byte " + text(end) + " of " + side.whose +
                            " region, does not lie in one of its parts, which end at bytes" + ends);
}

int open_pidfd(int pid) { return static_cast<int>(syscall(SYS_pidfd_open, pid, 0)); }

}  // namespace

Fabric::Fabric(const FabricOptions& options)
    : device_memory_(options.device_memory),
      domains_(options.provider, options.hosts, options.cq_entries, options.device_memory),
      worker_(domains_, ops_, slots_, events_, statistics_, options.worker),
      first_tag_(std::random_device{}()) {}

RegionId Fabric::register_region(std::vector<Memory> parts) {
    if (parts.empty() || parts.size() > kMaxParts) {
        throw Error(EINVAL, "a region of " + std::to_string(parts.size()) + " parts: it may have 1 to " +
                                std::to_string(kMaxParts));
    }
    std::vector<uint64_t> part_bytes;
    for (const Memory& part : parts) {
        check_memory(part);
        part_bytes.push_back(part.num_bytes);
    }
    std::lock_guard lock(mutex_);
    const RegionId id = next_id_++;
    regions_[id] = std::make_shared<Region>(id, std::move(parts), std::move(part_bytes));
    return id;
}

void Fabric::check_memory(const Memory& memory) const {
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
    entry.peer_part_bytes = peer.part_bytes;
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
        const Side ours{"our", batch->src_offset, batch->src_part, batch->src_pages, batch->src_page_stride,
                        batch->src_layer_stride};
        const Side theirs{"the peer's", batch->dst_offset, batch->dst_part, batch->dst_pages, batch->dst_page_stride,
                          batch->dst_layer_stride};
        place(ours, batch->num_layers, batch->page_bytes, link->second.link->region->part_bytes);
        place(theirs, batch->num_layers, batch->page_bytes, link->second.peer_part_bytes);
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
