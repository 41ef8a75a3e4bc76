// One link: an endpoint of its own in each domain, the registrations that die with it, its peer, credit and liveness.
//
// Made on a caller's thread, handed to the worker, closed on the worker's thread: closing the endpoints there is the
// fence. `own`'s endpoints and registrations never change after that hand-over; the rest belongs to the worker.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "domain_group.hpp"
#include "transfer.hpp"

namespace pdx {

// Room for beats and probes: in an endpoint's transmit queue, and again in the peer's completion queue.
constexpr uint32_t kReservedTxEntries = 16;

// Of one region.
constexpr size_t kMaxParts = 64;

// Offsets count from the start of the first part through all of them.
struct Region {
    RegionId id;
    std::vector<Memory> parts;
    std::vector<uint64_t> part_bytes;
    std::atomic<uint32_t> num_links{0};
};

// What a peer writes into our link page. A torn one (TCP delivers bytes, not words) fails its check and is read again.
struct Beat {
    uint64_t tick;
    uint64_t reaped;  // immediates of ours that the sender's domain of this lane has read
    uint64_t posted;  // immediates that the sender posted on this lane before this beat
    uint64_t check;

    static Beat make(uint64_t tick, uint64_t reaped, uint64_t posted);
    bool valid() const;
};

// The small registered memory of a link. What lane i brings lands in the i-th of each.
struct alignas(4096) LinkPage {
    Beat beats[kMaxDomains];
    uint64_t probes[kMaxDomains];
    // What we send, where the provider reads it after the call. A beat that is sent again while it waits only gets newer.
    Beat sent[kMaxDomains];
};

// Our end of a link in one of our domains.
struct OwnEnd {
    Domain& domain;
    Endpoint endpoint = {};
    std::vector<fid_mr*> part_mrs = {};
    fid_mr* page_mr = nullptr;
    std::vector<char> name = {};  // the endpoint's address
    uint32_t writes_in_flight = 0, small_in_flight = 0;
    // The peer's credit for this domain's queue: its immediates that we read, and what we last told of them.
    uint64_t reaped = 0, reported_reaped = 0;
    uint32_t num_lanes = 0;
};

struct RemotePart {
    uint64_t base, key;
};

// The peer's end in one of its domains, from its descriptor.
struct PeerEnd {
    std::vector<RemotePart> parts = {};
    uint64_t page_base = 0, page_key = 0;
    std::vector<char> name = {};
    // Our credit for that domain's queue: immediates that we posted minus those that it says it read.
    uint64_t posted_imms = 0, reaped = 0;
};

// A peer, from its descriptor.
struct PeerAddress {
    std::vector<uint64_t> part_bytes = {};
    uint32_t window = 0;     // immediates that it lets us have unread in each of its domains
    uint32_t probe_tag = 0;  // what its probe immediate must carry
    int pid = 0;             // its process (shm)
    int pidfd = -1;
    std::string region_path = {};  // the file of its endpoint (shm)
    std::vector<PeerEnd> ends = {};
    std::vector<fi_addr_t> lane_addresses = {};
};

// One way from a domain of ours to a domain of the peer's. With n domains here and m there, a link has max(n, m) lanes,
// and lane i joins our domain i % n with the peer's i % m: both sides number them alike, and each domain is used.
struct Lane {
    size_t own, peer;
    fi_addr_t address;
    bool probe_posted = false, probe_completed = false;
    uint64_t tick = 0, peer_tick = 0;
    uint64_t posted_imms = 0, peer_posted_imms = 0;
    int64_t last_life_ns = 0;
    uint32_t beats_in_flight = 0;
    uint64_t bytes_in_flight = 0;
    // Since when posting is refused with nothing completing; 0: it is not.
    int64_t blocked_since_ns = 0;
};

enum class LinkState { kOpen, kConnecting, kUp, kDown };

struct Link {
    LinkId id;
    std::shared_ptr<Region> region;
    std::unique_ptr<LinkPage> page;
    uint32_t window;  // immediates that our peer may have unread in each of our domains
    uint32_t probe_tag;
    std::vector<OwnEnd> own;

    LinkState state = LinkState::kOpen;
    bool closed = false;
    PeerAddress peer{};
    std::vector<Lane> lanes;
    size_t next_lane = 0;
    uint32_t probes_read = 0;
    int64_t connect_deadline_ns = 0;

    uint32_t writes_in_flight = 0;
    struct Op* first_op = nullptr;  // operations that libfabric still holds
    std::deque<Transfer*> ready;    // transfers with layers to post

    Link(LinkId link_id, const DomainGroup& domains, std::shared_ptr<Region> of_region, uint32_t own_window,
         uint32_t tag);
    ~Link();
    Link(const Link&) = delete;
    Link& operator=(const Link&) = delete;

    // The ways to a peer with so many ends; needs no peer yet.
    static std::vector<Lane> make_lanes(size_t num_own, size_t num_peer);
    void set_peer(PeerAddress address);
    void close();           // endpoints first, then registrations; idempotent
    void release_region();  // nothing of this link can touch it any more
    // Reads the peer's last beats. True if there is a new one.
    bool read_beats(int64_t now);
    // An immediate came over domain `i`: the peer lives.
    void note_life(size_t i, int64_t now);
    // Domain `i`'s queue was read empty after the peer's last beats were: what it had posted before them is out of the
    // queue, whatever it carried. Takes up to `limit` immediates of nobody as this link's; returns how many it took.
    uint64_t take_strays(size_t i, uint64_t limit);
    bool has_credit(const Lane& lane) const { return end_of(lane).posted_imms - end_of(lane).reaped < peer.window; }
    bool beat_owed(const OwnEnd& end) const {
        return end.reaped - end.reported_reaped >= (window < 2 ? 1 : window / 2);
    }
    PeerEnd& end_of(const Lane& lane) { return peer.ends[lane.peer]; }
    const PeerEnd& end_of(const Lane& lane) const { return peer.ends[lane.peer]; }
    // Where a lane goes, for people: " from A to B". Names that are no addresses (shm) say nothing to them: empty.
    std::string way(const Lane& lane) const;

  private:
    size_t queue_entries(const Domain& domain) const;
    bool read_beat(size_t i);
};

enum class OpKind : uint8_t { kWrite, kProbe, kBeat };

// The context of one operation. libfabric owns the first member until the operation completes or, at the latest, until
// the domain closes; so ops live in a pool that is freed after the domain, and a fence only cuts their ties.
struct Op {
    fi_context2 context;
    Link* link = nullptr;  // null: its link was fenced
    size_t lane = 0;
    Transfer* transfer = nullptr;
    uint32_t atoms = 0;
    uint64_t num_bytes = 0;
    OpKind kind = OpKind::kWrite;
    bool live = false;
    Op* previous = nullptr;
    Op* next = nullptr;
};

class OpPool {
  public:
    Op* take(Link& link, size_t lane, OpKind kind);
    void give_back(Op* op);
    // Cuts all of a link's operations from it; they return to the pool if libfabric ever completes them.
    void orphan(Link& link);
    // The op of a completion's context, or null if the context is none of ours.
    Op* find(void* context);

  private:
    static constexpr size_t kChunk = 256;
    std::vector<std::unique_ptr<Op[]>> chunks_;
    std::vector<Op*> free_;
};

}  // namespace pdx
