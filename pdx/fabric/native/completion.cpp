// The worker's reading side: the completion queues.
#include <rdma/fi_eq.h>
#include <rdma/fi_errno.h>

#include <cstring>

#include "worker.hpp"

namespace pdx {
namespace {

constexpr size_t kQueueEntries = 64;
// Full reads in one turn; a flood must not keep the worker from posting and beating.
constexpr int kReadsPerTurn = 16;

// The library may be newer than the headers and write a longer entry, if it is asked to; room costs nothing.
union ErrorEntry {
    fi_cq_err_entry entry;
    char room[512];
};

}  // namespace

bool Worker::read_queues() {
    bool any = false;
    for (size_t i = 0; i < domains_.size(); i++) any |= read_queue(i);
    return any;
}

bool Worker::read_queue(size_t domain) {
    bool any = false;
    bool emptied = false;
    fi_cq_data_entry entries[kQueueEntries];
    for (int i = 0; i < kReadsPerTurn && !emptied; i++) {
        const ssize_t n = domains_[domain].read_queue(entries, kQueueEntries);
        emptied = n == -FI_EAGAIN || (n > 0 && n < static_cast<ssize_t>(kQueueEntries));
        if (n == -FI_EAGAIN) break;
        any = true;
        if (n == -FI_EAVAIL) {
            on_error(domain);
            continue;
        }
        if (n < 0) {
            statistics_.queue_errors.add();
            break;
        }
        for (ssize_t k = 0; k < n; k++) {
            if (entries[k].flags & FI_REMOTE_CQ_DATA) {
                on_imm(static_cast<uint32_t>(entries[k].data));
            } else if (Op* op = ops_.find(entries[k].op_context)) {
                on_complete(op, 0, "");
            }
        }
        credit_imms(domain);
    }
    if (emptied && strays_[domain]) credit_strays(domain);
    return any;
}

void Worker::on_imm(uint32_t data) {
    const Imm imm = Imm::decode(data);
    if (imm.slot != 0) {
        imms_.push_back(imm);
        return;
    }
    const auto link = tags_.find(data & kProbeTagMask);
    if (link != tags_.end()) link->second->probes_read++;
}

// Counts what one read of a domain's queue brought, and gives each immediate's credit back to the link it came over.
void Worker::credit_imms(size_t domain) {
    if (imms_.empty()) return;
    const int64_t now = now_ns();
    slots_.credit(imms_, now, owners_);
    statistics_.imms_reaped.add(imms_.size());
    domains_[domain].statistics().imms_reaped.add(imms_.size());
    Link* link = nullptr;
    for (const LinkId owner : owners_) {
        if (!link || link->id != owner) {
            const auto found = links_.find(owner);
            link = found == links_.end() ? nullptr : found->second.get();
        }
        if (!link) {
            statistics_.unowned_imms.add();
            strays_[domain]++;
            continue;
        }
        link->own[domain].reaped++;
        link->note_life(domain, now);
    }
    imms_.clear();
}

// Immediates of a pair that nobody armed do not say over which link they came; their sender's beats do.
void Worker::credit_strays(size_t domain) {
    for (auto& [id, link] : links_) {
        if (link->state == LinkState::kUp) strays_[domain] -= link->take_strays(domain, strays_[domain]);
    }
}

void Worker::on_error(size_t domain) {
    ErrorEntry error;
    std::memset(&error, 0, sizeof error);
    const ssize_t rc = fi_cq_readerr(domains_[domain].cq(), &error.entry, 0);
    // What fails on the receiving side has no op of ours; the sender hears of it, and our count stays short.
    Op* op = rc < 0 ? nullptr : ops_.find(error.entry.op_context);
    if (!op) {
        statistics_.queue_errors.add();
        return;
    }
    const int code = error.entry.err ? error.entry.err : FI_EIO;
    on_complete(op, code, "a write failed: " + describe(code));
}

void Worker::on_complete(Op* op, int code, const std::string& reason) {
    const Op was = *op;
    ops_.give_back(op);
    Link* link = was.link;
    if (!link) {
        statistics_.late_completions.add();
        return;
    }
    Lane& lane = link->lanes[was.lane];
    OwnEnd& end = link->own[lane.own];
    lane.blocked_since_ns = 0;
    if (was.kind == OpKind::kWrite) {
        end.writes_in_flight--;
        link->writes_in_flight--;
        lane.bytes_in_flight -= was.num_bytes;
        writes_in_flight_--;
        (code ? statistics_.writes_failed : statistics_.writes_completed).add();
        was.transfer->in_flight--;
        if (code) {
            was.transfer->failed_atoms += was.atoms;
            fail(*was.transfer, code);
        } else {
            settle(*was.transfer);
        }
    } else {
        end.small_in_flight--;
        if (was.kind == OpKind::kBeat) lane.beats_in_flight--;
        if (was.kind == OpKind::kProbe) lane.probe_completed = code == 0;
    }
    if (!code) return;
    const bool was_probe = was.kind == OpKind::kProbe;
    link_down(*link, code, was_probe ? "our probe" + link->way(lane) + " failed: " + describe(code) : reason);
}

}  // namespace pdx
