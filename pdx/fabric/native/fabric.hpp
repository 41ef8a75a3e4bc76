// The callers' side: names things, checks arguments, and hands work to the worker. Any thread may call.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "worker.hpp"

namespace pdx {

struct FabricOptions {
    Provider provider;
    std::vector<std::string> hosts;  // a domain on each: see DomainOptions
    size_t cq_entries;
    bool device_memory;
    WorkerOptions worker;
};

class Fabric {
  public:
    explicit Fabric(const FabricOptions& options);

    RegionId register_region(std::vector<Memory> parts);
    void unregister_region(RegionId id);

    std::shared_ptr<const Link> open_link(RegionId region, uint32_t window);
    std::shared_ptr<const Link> link(LinkId id);
    // `peer` lacks what only this side can find out.
    void connect(LinkId id, PeerAddress peer);
    void fence(LinkId id);

    TransferId open_transfer(LinkId link, uint32_t slot, uint32_t generation);
    void add_batch(TransferId transfer, std::unique_ptr<Batch> batch);
    void seal(TransferId transfer);
    void cancel(TransferId transfer);

    void expect(LinkId link, uint32_t slot, uint32_t generation, uint64_t atoms);
    void retarget(uint32_t slot, uint32_t generation, uint64_t atoms);
    uint64_t count(uint32_t slot, uint32_t generation);
    uint64_t release(uint32_t slot, uint32_t generation);

    std::vector<Event> take_events(size_t max);
    int fd() const { return events_.fd(); }
    const Statistics& statistics() const { return statistics_; }
    const DomainGroup& domains() const { return domains_; }
    Sleeper& sleeper() { return worker_.sleeper(); }

  private:
    struct LinkEntry {
        std::shared_ptr<Link> link;
        bool connected = false;
        std::vector<uint64_t> peer_part_bytes = {};
    };
    struct TransferEntry {
        LinkId link;
        bool closed = false;  // sealed or cancelled
    };

    // Destroyed from the bottom up: the worker closes the links, the domains follow, then libfabric can hold no op.
    Statistics statistics_;
    EventQueue events_;
    OpPool ops_;
    const bool device_memory_;
    DomainGroup domains_;
    SlotTable slots_{events_, statistics_};
    Worker worker_;

    std::mutex mutex_;
    std::map<RegionId, std::shared_ptr<Region>> regions_;
    std::map<LinkId, LinkEntry> links_;
    std::map<TransferId, TransferEntry> transfers_;
    int64_t next_id_ = 1;
    uint32_t first_tag_;

    LinkEntry& find_link(LinkId id);
    void check_memory(const Memory& memory) const;
    static void check_slot(uint32_t slot, uint32_t generation);
};

}  // namespace pdx
