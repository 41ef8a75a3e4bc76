// One link: an endpoint of its own, the registrations that die with it, its peer, credit and liveness.
//
// Made on a caller's thread, handed to the worker, closed on the worker's thread: closing the endpoint there is the
// fence. `Opened` never changes after that hand-over; the rest belongs to the worker.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "domain.hpp"
#include "transfer.hpp"

namespace pdx {

// Room for beats and the probe: in the transmit queue, and again in the peer's completion queue.
constexpr uint32_t kReservedTxEntries = 16;

struct Region {
    RegionId id;
    char* address;
    uint64_t num_bytes;
    std::atomic<uint32_t> num_links{0};
};

// What a peer writes into our link page. A torn one (TCP delivers bytes, not words) fails its check and is read again.
struct Beat {
    uint64_t tick, reaped, check;

    static Beat make(uint64_t tick, uint64_t reaped);
    bool valid() const;
};

// The small registered memory of a link. The probe lands in `probe`, beats in `beat`.
struct alignas(4096) LinkPage {
    Beat beat;
    uint64_t probe;
};

// A peer, from its descriptor.
struct PeerAddress {
    fi_addr_t fi_addr = FI_ADDR_UNSPEC;
    uint64_t region_base, region_bytes, region_key;
    uint64_t page_base, page_key;
    uint32_t window;     // immediates that it lets us have unreaped
    uint32_t probe_tag;  // what its probe immediate must carry
    int pid;             // its process (shm)
    int pidfd = -1;
    std::string region_path;  // the file of its endpoint (shm)
};

enum class LinkState { kOpen, kConnecting, kUp, kDown };

struct Link {
    LinkId id;
    Domain& domain;
    std::shared_ptr<Region> region;
    Endpoint endpoint;
    fid_mr* region_mr = nullptr;
    fid_mr* page_mr = nullptr;
    std::unique_ptr<LinkPage> page;
    std::vector<char> name;  // the endpoint's address
    uint32_t window;         // immediates that our peer may have unreaped here
    uint32_t probe_tag;

    LinkState state = LinkState::kOpen;
    bool closed = false;
    PeerAddress peer{};
    bool probe_posted = false, probe_completed = false, peer_probed = false;
    int64_t connect_deadline_ns = 0;

    // Credit for our writes: posted immediates minus those the peer says it reaped.
    uint64_t posted_imms = 0, peer_reaped = 0;
    // Credit for our peer's.
    uint64_t reaped = 0, reported_reaped = 0;
    uint64_t tick = 0, peer_tick = 0;
    int64_t last_life_ns = 0;
    uint32_t beats_in_flight = 0;
    // Since when posting is refused with nothing completing; 0: it is not.
    int64_t blocked_since_ns = 0;

    uint32_t writes_in_flight = 0;
    uint64_t bytes_in_flight = 0;
    struct Op* first_op = nullptr;  // operations that libfabric still holds
    std::deque<Transfer*> ready;    // transfers with layers to post

    Link(LinkId link_id, Domain& owner, std::shared_ptr<Region> of_region, uint32_t own_window, uint32_t tag);
    ~Link();
    Link(const Link&) = delete;
    Link& operator=(const Link&) = delete;

    void close();           // endpoint first, then registrations; idempotent
    void release_region();  // nothing of this link can touch it any more
    size_t queue_entries() const;
    // Reads the peer's last beat. True if it is a new one.
    bool read_beat();
    bool may_write(uint32_t max_in_flight, uint64_t max_bytes);
    bool beat_owed() const { return reaped - reported_reaped >= (window < 4 ? 1 : window / 4); }
};

enum class OpKind : uint8_t { kWrite, kProbe, kBeat };

// The context of one operation. libfabric owns the first member until the operation completes or, at the latest, until
// the domain closes; so ops live in a pool that is freed after the domain, and a fence only cuts their ties.
struct Op {
    fi_context2 context;
    Link* link = nullptr;  // null: its link was fenced
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
    Op* take(Link& link, OpKind kind);
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
