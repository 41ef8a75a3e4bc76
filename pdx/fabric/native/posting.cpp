// The worker's writing side: progress words, due layers, writes.
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>

#include <cstring>

#include "worker.hpp"

namespace pdx {
namespace {

// Beats share a TCP connection with the data before them, so what is queued there must drain well within their timeout.
constexpr uint64_t kMaxBytesInFlight = 32 << 20;
// Posts of one link before the next link's turn.
constexpr uint32_t kPostsPerTurn = 32;
constexpr size_t kIovCapacity = 8;  // kMaxPieces of worker.cpp

}  // namespace

bool Worker::look_at_words() {
    bool news = false;
    for (size_t i = 0; i < armed_.size();) {
        Transfer& transfer = *armed_[i];
        bool still_armed = false, due = false;
        for (auto& batch : transfer.batches) {
            if (!batch->armed()) continue;
            due |= batch->look();
            if (batch->armed()) {
                still_armed = true;
            } else {
                transfer.last_progress_ns = now_ns();
            }
        }
        if (!still_armed) {
            armed_[i] = armed_.back();
            armed_.pop_back();
        } else {
            i++;
        }
        if (!due) continue;
        news = true;
        transfer.drop_finished();
        if (transfer.first_ready()) {
            enqueue(transfer);
        } else {
            settle(transfer);  // a batch without pages has nothing to post
        }
    }
    return news;
}

bool Worker::post_all() {
    bool posted = false;
    // A link that is done, or that goes down, leaves the list; so the list is walked by index, backwards.
    for (size_t i = posting_.size(); i-- > 0;) {
        if (i < posting_.size()) posted |= post_link(*posting_[i]);
    }
    return posted;
}

// At most kPostsPerTurn writes of the link's first transfer, which then goes to the end of the list. True if any went.
bool Worker::post_link(Link& link) {
    if (link.state != LinkState::kUp) return false;
    Transfer& transfer = *link.ready.front();
    bool any = false;
    uint32_t refused = 0;
    for (uint32_t i = 0; i < kPostsPerTurn; i++) {
        Batch* batch = transfer.first_ready();
        if (!batch) break;
        Lane* lane = next_lane(link, refused);
        if (!lane) return any;
        const ssize_t rc = post_write(link, *lane, transfer, *batch);
        if (rc == -FI_EAGAIN) {
            statistics_.eagain.add();
            if (!lane->blocked_since_ns) lane->blocked_since_ns = now_ns();
            refused |= 1u << (lane - link.lanes.data());
            continue;
        }
        if (rc) {
            link_down(link, static_cast<int>(-rc), "fi_writemsg: " + describe(static_cast<int>(-rc)));
            return true;
        }
        lane->blocked_since_ns = 0;
        any = true;
    }
    transfer.drop_finished();
    link.ready.pop_front();
    transfer.queued = false;
    if (link.ready.empty()) std::erase(posting_, &link);
    if (transfer.first_ready()) {
        enqueue(transfer);
    } else {
        settle(transfer);
    }
    return any;
}

// The next lane in turn that takes a write now, but those in the set `refused`; null: there is none.
Lane* Worker::next_lane(Link& link, uint32_t refused) {
    const auto max_in_flight = static_cast<uint32_t>(domains_.tx_entries()) - kReservedTxEntries;
    bool out_of_credit = false;
    for (size_t tries = 0; tries < link.lanes.size(); tries++) {
        Lane& lane = link.lanes[link.next_lane];
        link.next_lane = (link.next_lane + 1) % link.lanes.size();
        const bool full = lane.bytes_in_flight >= kMaxBytesInFlight ||
                          link.own[lane.own].writes_in_flight >= max_in_flight;
        if (full || refused >> (&lane - link.lanes.data()) & 1) continue;
        if (link.has_credit(lane)) return &lane;
        out_of_credit = true;
    }
    if (out_of_credit && link.read_beats(now_ns())) return next_lane(link, refused);
    return nullptr;
}

ssize_t Worker::post_write(Link& link, Lane& lane, Transfer& transfer, Batch& batch) {
    OwnEnd& end = link.own[lane.own];
    PeerEnd& peer = link.end_of(lane);
    char* const source = link.region->parts[batch.src_part].address;
    void* const descriptor = fi_mr_desc(end.part_mrs[batch.src_part]);
    const RemotePart target = peer.parts[batch.dst_part];
    Batch::Cursor next = batch.cursor;
    batch.next_write(shape_, next, pieces_);
    iovec local[kIovCapacity];
    fi_rma_iov remote[kIovCapacity];
    void* descriptors[kIovCapacity];
    Imm imm{transfer.slot, transfer.generation, 0};
    uint64_t num_bytes = 0;
    for (size_t i = 0; i < pieces_.size(); i++) {
        const Piece& piece = pieces_[i];
        local[i] = {source + piece.src_offset, piece.num_bytes};
        remote[i] = {target.base + piece.dst_offset, piece.num_bytes, target.key};
        descriptors[i] = descriptor;
        imm.atoms += piece.atoms;
        num_bytes += piece.num_bytes;
    }
    Op* op = ops_.take(link, &lane - link.lanes.data(), OpKind::kWrite);
    op->transfer = &transfer;
    op->atoms = imm.atoms;
    op->num_bytes = num_bytes;
    const fi_msg_rma message{local, descriptors, pieces_.size(), lane.address, remote, pieces_.size(), op,
                             imm.encode()};
    // Before the call, which over TCP is the sending itself.
    const int64_t first_post_ns = transfer.first_post_ns ? transfer.first_post_ns : now_ns();
    const ssize_t rc = fi_writemsg(end.endpoint.ep, &message, FI_COMPLETION | FI_REMOTE_CQ_DATA);
    if (rc) {
        ops_.give_back(op);
        return rc;
    }
    transfer.first_post_ns = first_post_ns;
    batch.cursor = next;
    transfer.posted_atoms += imm.atoms;
    transfer.in_flight++;
    peer.posted_imms++;
    lane.posted_imms++;
    end.writes_in_flight++;
    link.writes_in_flight++;
    lane.bytes_in_flight += num_bytes;
    writes_in_flight_++;
    statistics_.writes_posted.add();
    statistics_.bytes_posted.add(num_bytes);
    statistics_.atoms_posted.add(imm.atoms);
    end.domain.statistics().writes_posted.add();
    end.domain.statistics().bytes_posted.add(num_bytes);
    return 0;
}

// A probe or a beat.
ssize_t Worker::post_small(Link& link, Lane& lane, OpKind kind, const void* data, size_t num_bytes,
                           uint64_t page_offset) {
    OwnEnd& end = link.own[lane.own];
    if (end.small_in_flight == kReservedTxEntries) return -FI_EAGAIN;
    const PeerEnd& peer = link.end_of(lane);
    const size_t index = &lane - link.lanes.data();
    const ProviderRules& rules = domains_.rules();
    iovec local{const_cast<void*>(data), num_bytes};
    void* descriptor = nullptr;
    if (!rules.injects) {
        local.iov_base = std::memcpy(&link.page->sent[index], data, num_bytes);
        descriptor = fi_mr_desc(end.page_mr);
    }
    fi_rma_iov remote{peer.page_base + page_offset, num_bytes, peer.page_key};
    Op* op = ops_.take(link, index, kind);
    const bool tagged = kind == OpKind::kProbe || rules.tags_every_write;
    const uint64_t flags = FI_COMPLETION | (rules.injects ? FI_INJECT : 0) | (tagged ? FI_REMOTE_CQ_DATA : 0);
    const fi_msg_rma message{&local, &descriptor, 1, lane.address, &remote, 1, op, tagged ? link.peer.probe_tag : 0};
    const ssize_t rc = fi_writemsg(end.endpoint.ep, &message, flags);
    if (rc) {
        ops_.give_back(op);
    } else {
        end.small_in_flight++;
    }
    return rc;
}

}  // namespace pdx
