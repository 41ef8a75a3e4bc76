// The worker's care of links: connecting, beats, deadlines, ends.
#include <poll.h>
#include <rdma/fi_errno.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>

#include "port_sockets.hpp"
#include "worker.hpp"

namespace pdx {
namespace {

constexpr uint32_t kMaxBeatsInFlight = 4;
// Links are looked at this often for each of them, so that two hundred do not fill the loop.
constexpr int64_t kTendNsPerLink = 500;

std::string seconds(int64_t ns) {
    char text[32];
    std::snprintf(text, sizeof text, "%.1f s", static_cast<double>(ns) * 1e-9);
    return text;
}

// What the link waits for: the first lane of ours that carried no probe, else the first that brought none.
std::string missing_probe(const Link& link) {
    for (const Lane& lane : link.lanes) {
        if (!lane.probe_completed) return "our probe" + link.way(lane) + " did not get through";
    }
    for (const Lane& lane : link.lanes) {
        if (link.page->probes[&lane - link.lanes.data()]) continue;
        return "the peer's probe did not arrive where ours got through" + link.way(lane) + ",";
    }
    return "the peer's probe did not arrive";
}

}  // namespace

void Worker::connect(Link& link, PeerAddress peer) {
    link.set_peer(std::move(peer));
    link.state = LinkState::kConnecting;
    link.connect_deadline_ns = now_ns() + options_.connect_timeout_ns;
    num_connecting_++;
}

// True if a link changed its state.
bool Worker::tend_links(int64_t now) {
    if (now - last_tend_ns_ < static_cast<int64_t>(links_.size()) * kTendNsPerLink) return false;
    // If this very process was stopped, the silence is ours: the peers get the time back.
    const int64_t gap = now - last_tend_ns_;
    const int64_t forgiven = last_tend_ns_ && gap > 2 * options_.beat_interval_ns ? gap : 0;
    last_tend_ns_ = now;
    const bool beat_due = now >= next_beat_ns_;
    if (beat_due) next_beat_ns_ = now + options_.beat_interval_ns;
    bool changed = false;
    for (auto& [id, link] : links_) {
        if (link->state == LinkState::kConnecting) {
            link->connect_deadline_ns += forgiven;
            changed |= tend_connecting(*link, now);
        } else if (link->state == LinkState::kUp) {
            for (Lane& lane : link->lanes) lane.last_life_ns += forgiven;
            changed |= tend_up(*link, now, beat_due);
        }
    }
    if (!held_.empty()) tend_held();
    return changed;
}

bool Worker::tend_connecting(Link& link, int64_t now) {
    bool completed = true;
    for (size_t i = 0; i < link.lanes.size(); i++) {
        Lane& lane = link.lanes[i];
        completed &= lane.probe_completed;
        if (lane.probe_posted) continue;
        const uint64_t hello = link.peer.probe_tag;
        const size_t offset = offsetof(LinkPage, probes) + i * sizeof hello;
        const ssize_t rc = post_small(link, lane, OpKind::kProbe, &hello, sizeof hello, offset);
        lane.probe_posted = rc == 0;
        if (rc && rc != -FI_EAGAIN) {
            const int code = static_cast<int>(-rc);
            link_down(link, code, "our probe" + link.way(lane) + " cannot be posted: " + describe(code));
            return true;
        }
    }
    if (completed && link.probes_read >= link.lanes.size()) {
        link.state = LinkState::kUp;
        num_connecting_--;
        if (domains_.rules().paced) {
            for (const Lane& lane : link.lanes) stop_pacing_on_host(link.own[lane.own].name, link.end_of(lane).name);
        }
        statistics_.links_up.add();
        events_.push({.kind = EventKind::kLinkUp, .link = link.id});
        for (Lane& lane : link.lanes) {
            lane.last_life_ns = now;
            send_beat(link, lane);
        }
        return true;
    }
    if (now < link.connect_deadline_ns) return false;
    link_down(link, FI_ETIMEDOUT, missing_probe(link) + " within " + seconds(options_.connect_timeout_ns));
    return true;
}

bool Worker::tend_up(Link& link, int64_t now, bool beat_due) {
    link.read_beats(now);
    for (Lane& lane : link.lanes) {
        if (now - lane.last_life_ns >= options_.beat_timeout_ns) {
            link_down(link, FI_ETIMEDOUT, "no beat of the peer for " + seconds(options_.beat_timeout_ns));
            return true;
        }
        if (lane.blocked_since_ns && now - lane.blocked_since_ns >= 2 * options_.beat_timeout_ns) {
            link_down(link, FI_EAGAIN, "no write could be posted for " + seconds(2 * options_.beat_timeout_ns));
            return true;
        }
        if (beat_due || link.beat_owed(link.own[lane.own])) send_beat(link, lane);
    }
    return false;
}

// Skipped while earlier ones are stuck: a peer that takes none must not fill the transmit queue.
void Worker::send_beat(Link& link, Lane& lane) {
    if (link.state != LinkState::kUp || lane.beats_in_flight >= kMaxBeatsInFlight) return;
    OwnEnd& end = link.own[lane.own];
    const Beat beat = Beat::make(lane.tick + 1, end.reaped, lane.posted_imms);
    const size_t offset = offsetof(LinkPage, beats) + (&lane - link.lanes.data()) * sizeof beat;
    const ssize_t rc = post_small(link, lane, OpKind::kBeat, &beat, sizeof beat, offset);
    if (rc == -FI_EAGAIN) return;
    if (rc) {
        const int code = static_cast<int>(-rc);
        return link_down(link, code, "a beat cannot be posted: " + describe(code));
    }
    lane.tick++;
    end.reported_reaped = end.reaped;
    lane.beats_in_flight++;
    statistics_.beats_sent.add();
}

// Once for each link. From here on nothing more is posted on it; its transfers end when libfabric gives back what is in
// flight, or at the fence.
void Worker::link_down(Link& link, int code, const std::string& reason) {
    if (link.state == LinkState::kDown) return;
    if (link.state == LinkState::kConnecting) num_connecting_--;
    link.state = LinkState::kDown;
    statistics_.links_down.add();
    events_.push({.kind = EventKind::kLinkDown, .link = link.id, .code = code, .reason = reason});
    std::vector<Transfer*> ended;
    for (auto& [id, transfer] : transfers_) {
        if (transfer->link == link.id) ended.push_back(transfer.get());
    }
    for (Transfer* transfer : ended) fail(*transfer, code);
}

void Worker::announce_fenced(Link& link) {
    link.release_region();
    statistics_.links_fenced.add();
    events_.push({.kind = EventKind::kFenced, .link = link.id});
}

// An shm peer pulls from our memory, also when it was stopped and wakes up after our fence. So a link that was fenced
// with writes in flight is announced only when its peer's endpoint (its file) or its whole process is gone.
void Worker::tend_held() {
    std::erase_if(held_, [this](const std::shared_ptr<Link>& link) {
        pollfd process{link->peer.pidfd, POLLIN, 0};
        const bool process_gone = link->peer.pidfd >= 0 && poll(&process, 1, 0) == 1;
        if (!process_gone && access(link->peer.region_path.c_str(), F_OK) == 0) return false;
        announce_fenced(*link);
        return true;
    });
}

int64_t Worker::next_deadline() const {
    int64_t deadline = next_beat_ns_;
    for (const auto& [id, link] : links_) {
        if (link->state != LinkState::kUp) continue;
        for (const Lane& lane : link->lanes) {
            deadline = std::min(deadline, lane.last_life_ns + options_.beat_timeout_ns);
        }
    }
    return deadline;
}

}  // namespace pdx
