#include "link.hpp"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <random>

#include "port_sockets.hpp"

namespace pdx {
namespace {

uint64_t random_key() {
    static thread_local std::random_device device;
    return uint64_t{device()} << 32 | device();
}

}  // namespace

Beat Beat::make(uint64_t tick, uint64_t reaped, uint64_t posted) {
    return {tick, reaped, posted,
            ~tick * 0x9E3779B97F4A7C15ull ^ reaped * 0xC2B2AE3D27D4EB4Full ^ posted * 0x165667B19E3779F9ull};
}

bool Beat::valid() const { return tick != 0 && check == make(tick, reaped, posted).check; }

Link::Link(LinkId link_id, const DomainGroup& domains, std::shared_ptr<Region> of_region, uint32_t own_window,
           uint32_t tag)
    : id(link_id), region(std::move(of_region)), page(new LinkPage{}), window(own_window), probe_tag(tag) {
    region->num_links++;
    try {
        for (size_t i = 0; i < domains.size(); i++) {
            domains[i].reserve_queue(queue_entries(domains[i]));
            OwnEnd& end = own.emplace_back(OwnEnd{.domain = domains[i]});
            end.endpoint = domains[i].open_endpoint();
            for (const Memory& part : region->parts) {
                end.part_mrs.push_back(domains[i].register_memory(part, random_key()));
            }
            end.page_mr = domains[i].register_memory({reinterpret_cast<char*>(page.get()), sizeof(LinkPage)}, random_key());
            end.name = domains[i].endpoint_name(end.endpoint);
        }
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

std::vector<Lane> Link::make_lanes(size_t num_own, size_t num_peer) {
    std::vector<Lane> lanes;
    for (size_t i = 0; i < std::max(num_own, num_peer); i++) {
        lanes.push_back({.own = i % num_own, .peer = i % num_peer, .address = FI_ADDR_UNSPEC});
    }
    return lanes;
}

void Link::set_peer(PeerAddress address) {
    peer = std::move(address);
    lanes = make_lanes(own.size(), peer.ends.size());
    for (size_t i = 0; i < lanes.size(); i++) {
        lanes[i].address = peer.lane_addresses[i];
        own[lanes[i].own].num_lanes++;
    }
}

void Link::close() {
    if (closed) return;
    closed = true;
    for (OwnEnd& end : own) end.domain.close_endpoint(end.endpoint);
    for (OwnEnd& end : own) {
        for (fid_mr* mr : end.part_mrs) fi_close(&mr->fid);
        if (end.page_mr) fi_close(&end.page_mr->fid);
        end.domain.close_addresses(end.endpoint);
        end.part_mrs.clear();
        end.page_mr = nullptr;
        end.domain.release_queue(queue_entries(end.domain));
    }
}

void Link::release_region() {
    if (region) region->num_links--;
    region.reset();
}

// What the link can have in a domain's queue at once: our peer's immediates and our own operations.
size_t Link::queue_entries(const Domain& domain) const {
    return window + domain.tx_entries() + 2 * kReservedTxEntries;
}

bool Link::read_beat(size_t i) {
    Beat beat;
    std::memcpy(&beat, &page->beats[i], sizeof beat);
    Lane& lane = lanes[i];
    if (!beat.valid() || beat.tick <= lane.peer_tick) return false;
    lane.peer_tick = beat.tick;
    lane.peer_posted_imms = beat.posted;
    // A peer that claims more than was posted would lift the limit on what may be in flight.
    PeerEnd& end = end_of(lane);
    if (beat.reaped > end.reaped && beat.reaped <= end.posted_imms) end.reaped = beat.reaped;
    return true;
}

bool Link::read_beats(int64_t now) {
    bool any = false;
    for (size_t i = 0; i < lanes.size(); i++) {
        if (!read_beat(i)) continue;
        lanes[i].last_life_ns = now;
        any = true;
    }
    return any;
}

void Link::note_life(size_t i, int64_t now) {
    // Of several lanes into one domain, nobody knows which one brought it.
    if (own[i].num_lanes != 1) return;
    for (Lane& lane : lanes) {
        if (lane.own == i) lane.last_life_ns = now;
    }
}

uint64_t Link::take_strays(size_t i, uint64_t limit) {
    uint64_t posted = 0;
    for (const Lane& lane : lanes) {
        if (lane.own == i) posted += lane.peer_posted_imms;
    }
    if (posted <= own[i].reaped) return 0;
    const uint64_t taken = std::min(posted - own[i].reaped, limit);
    own[i].reaped += taken;
    return taken;
}

Op* OpPool::take(Link& link, size_t lane, OpKind kind) {
    if (free_.empty()) {
        chunks_.emplace_back(new Op[kChunk]);
        for (size_t i = 0; i < kChunk; i++) free_.push_back(&chunks_.back()[i]);
    }
    Op* op = free_.back();
    free_.pop_back();
    *op = Op{};
    op->link = &link;
    op->lane = lane;
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

std::string Link::way(const Lane& lane) const {
    const std::string ours = host_text(own[lane.own].name), theirs = host_text(end_of(lane).name);
    return ours.empty() || theirs.empty() ? "" : " from " + ours + " to " + theirs;
}

}  // namespace pdx
