#include "link.hpp"

#include <unistd.h>

#include <cstring>
#include <random>

namespace pdx {
namespace {

uint64_t random_key() {
    static thread_local std::random_device device;
    return uint64_t{device()} << 32 | device();
}

}  // namespace

Beat Beat::make(uint64_t tick, uint64_t reaped) {
    return {tick, reaped, ~tick * 0x9E3779B97F4A7C15ull ^ reaped * 0xC2B2AE3D27D4EB4Full};
}

bool Beat::valid() const { return tick != 0 && check == make(tick, reaped).check; }

Link::Link(LinkId link_id, Domain& owner, std::shared_ptr<Region> of_region, uint32_t own_window, uint32_t tag)
    : id(link_id), domain(owner), region(std::move(of_region)), page(new LinkPage{}), window(own_window),
      probe_tag(tag) {
    domain.reserve_queue(queue_entries());
    region->num_links++;
    try {
        endpoint = domain.open_endpoint();
        region_mr = domain.register_memory(region->address, region->num_bytes, random_key());
        page_mr = domain.register_memory(page.get(), sizeof(LinkPage), random_key());
        name = domain.endpoint_name(endpoint);
    } catch (...) {
        close();
        release_region();
        throw;
    }
}

Link::~Link() {
    close();
    release_region();
    if (peer.pidfd >= 0) ::close(peer.pidfd);
}

void Link::close() {
    if (closed) return;
    closed = true;
    if (endpoint.ep) fi_close(&endpoint.ep->fid);
    if (region_mr) fi_close(&region_mr->fid);
    if (page_mr) fi_close(&page_mr->fid);
    if (endpoint.av) fi_close(&endpoint.av->fid);
    endpoint = {};
    region_mr = page_mr = nullptr;
    domain.release_queue(queue_entries());
}

void Link::release_region() {
    if (region) region->num_links--;
    region.reset();
}

// What the link can have in the completion queue at once: our peer's immediates and our own operations.
size_t Link::queue_entries() const { return window + domain.tx_entries() + 2 * kReservedTxEntries; }

bool Link::read_beat() {
    Beat beat;
    std::memcpy(&beat, &page->beat, sizeof beat);
    if (!beat.valid() || beat.tick <= peer_tick) return false;
    peer_tick = beat.tick;
    // A peer that claims more than was posted would lift the limit on what may be in flight.
    if (beat.reaped > peer_reaped && beat.reaped <= posted_imms) peer_reaped = beat.reaped;
    return true;
}

bool Link::may_write(uint32_t max_in_flight, uint64_t max_bytes) {
    if (writes_in_flight >= max_in_flight || (writes_in_flight && bytes_in_flight >= max_bytes)) return false;
    return posted_imms - peer_reaped < peer.window;
}

Op* OpPool::take(Link& link, OpKind kind) {
    if (free_.empty()) {
        chunks_.emplace_back(new Op[kChunk]);
        for (size_t i = 0; i < kChunk; i++) free_.push_back(&chunks_.back()[i]);
    }
    Op* op = free_.back();
    free_.pop_back();
    *op = Op{};
    op->link = &link;
    op->kind = kind;
    op->live = true;
    op->next = link.first_op;
    if (op->next) op->next->previous = op;
    link.first_op = op;
    return op;
}

void OpPool::give_back(Op* op) {
    if (op->link) {
        if (op->next) op->next->previous = op->previous;
        (op->previous ? op->previous->next : op->link->first_op) = op->next;
    }
    op->live = false;
    op->link = nullptr;
    op->transfer = nullptr;
    op->previous = op->next = nullptr;
    free_.push_back(op);
}

void OpPool::orphan(Link& link) {
    for (Op* op = link.first_op; op;) {
        Op* next = op->next;
        op->link = nullptr;
        op->transfer = nullptr;
        op->previous = op->next = nullptr;
        op = next;
    }
    link.first_op = nullptr;
}

Op* OpPool::find(void* context) {
    Op* op = static_cast<Op*>(context);
    for (const auto& chunk : chunks_) {
        if (op < chunk.get() || op >= chunk.get() + kChunk) continue;
        const auto offset = reinterpret_cast<uintptr_t>(op) - reinterpret_cast<uintptr_t>(chunk.get());
        return offset % sizeof(Op) == 0 && op->live ? op : nullptr;
    }
    return nullptr;
}

}  // namespace pdx
