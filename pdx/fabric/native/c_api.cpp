#define PDX_API __attribute__((visibility("default")))
#include "c_api.h"

#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <sstream>

#include "fabric.hpp"

struct pdx_fabric {
    pdx::Fabric fabric;
};

namespace {

thread_local std::string last_error;

// Runs `body`; an Error becomes its negated code and a message.
template <typename F>
int64_t guarded(F body) {
    int code = EIO;
    try {
        return body();
    } catch (const pdx::Error& error) {
        last_error = error.what();
        code = error.code > 0 ? error.code : EIO;
    } catch (const std::bad_alloc&) {
        last_error = "out of memory";
        code = ENOMEM;
    } catch (const std::exception& error) {
        last_error = error.what();
    }
    return -code;
}

template <typename F>
int64_t done(F body) {
    return guarded([&]() -> int64_t {
        body();
        return 0;
    });
}

void copy_text(const std::string& text, char* out, size_t num_bytes) {
    if (num_bytes) std::snprintf(out, num_bytes, "%s", text.c_str());
}

std::unique_ptr<pdx::Batch> make_batch(const pdx_fabric_batch& from) {
    auto batch = std::make_unique<pdx::Batch>();
    batch->src_pages.assign(from.src_pages, from.src_pages + from.num_pages);
    batch->dst_pages.assign(from.dst_pages, from.dst_pages + from.num_pages);
    batch->page_bytes = from.page_bytes;
    batch->num_layers = from.num_layers;
    batch->src_offset = from.src_offset;
    batch->dst_offset = from.dst_offset;
    batch->src_layer_stride = from.src_layer_stride;
    batch->dst_layer_stride = from.dst_layer_stride;
    batch->src_page_stride = from.src_page_stride;
    batch->dst_page_stride = from.dst_page_stride;
    batch->word = from.word;
    batch->first_value = from.first_value;
    if (!from.word) {
        batch->due_layers = from.num_layers;
        if (!from.num_pages) batch->cursor.layer = from.num_layers;
    }
    return batch;
}

template <typename T>
T* copy_out(const std::vector<T>& values) {
    if (values.empty()) return nullptr;
    T* copy = static_cast<T*>(std::malloc(values.size() * sizeof(T)));
    PDX_INVARIANT(copy);
    std::memcpy(copy, values.data(), values.size() * sizeof(T));
    return copy;
}

void fill(const pdx::Event& event, pdx_fabric_event& out) {
    out = {};
    out.kind = static_cast<uint32_t>(event.kind);
    out.code = event.code;
    out.link = event.link;
    out.transfer = event.transfer;
    out.slot = event.slot;
    out.generation = event.generation;
    out.atoms = event.atoms;
    out.failed_atoms = event.failed_atoms;
    out.first_post_ns = event.first_post_ns;
    out.last_progress_ns = event.last_progress_ns;
    out.cancelled = event.cancelled;
    out.num_arrivals = static_cast<uint32_t>(event.arrival_ns.size());
    out.arrival_ns = copy_out(event.arrival_ns);
    out.arrival_atoms = copy_out(event.arrival_atoms);
    copy_text(event.reason, out.reason, sizeof out.reason);
}

}  // namespace

uint32_t pdx_fabric_abi() { return PDX_FABRIC_ABI; }

const char* pdx_fabric_error() { return last_error.c_str(); }

int64_t pdx_fabric_load(const char* paths, char* chosen, size_t chosen_bytes) {
    return guarded([&]() -> int64_t {
        std::vector<std::string> list;
        std::istringstream lines(paths);
        for (std::string line; std::getline(lines, line);) list.push_back(line);
        const pdx::Libfabric& lib = pdx::load_libfabric(list);
        copy_text(lib.path, chosen, chosen_bytes);
        return lib.version;
    });
}

int64_t pdx_fabric_provider(int32_t provider, char* name, size_t name_bytes) {
    return done([&] { copy_text(pdx::probe_provider(static_cast<pdx::Provider>(provider)), name, name_bytes); });
}

int64_t pdx_fabric_open(const pdx_fabric_options* options, pdx_fabric** out) {
    return done([&] {
        const auto provider = static_cast<pdx::Provider>(options->provider);
        if (provider == pdx::Provider::kShm) pdx::sweep_shm();
        *out = new pdx_fabric{pdx::Fabric({.provider = provider,
                                           .host = options->host ? options->host : "",
                                           .ipv6 = options->ipv6 != 0,
                                           .cq_entries = options->cq_entries,
                                           .worker = {.cpu = options->cpu,
                                                      .spin_ns = options->spin_ns,
                                                      .beat_interval_ns = options->beat_interval_ns,
                                                      .beat_timeout_ns = options->beat_timeout_ns,
                                                      .connect_timeout_ns = options->connect_timeout_ns}})};
    });
}

void pdx_fabric_close(pdx_fabric* fabric) { delete fabric; }

int64_t pdx_fabric_fd(pdx_fabric* fabric) { return fabric->fabric.fd(); }

int64_t pdx_fabric_register(pdx_fabric* fabric, void* address, uint64_t num_bytes) {
    return guarded([&] { return fabric->fabric.register_region(address, num_bytes); });
}

int64_t pdx_fabric_unregister(pdx_fabric* fabric, int64_t region) {
    return done([&] { fabric->fabric.unregister_region(region); });
}

int64_t pdx_fabric_open_link(pdx_fabric* fabric, int64_t region, uint32_t window) {
    return guarded([&] { return fabric->fabric.open_link(region, window)->id; });
}

int64_t pdx_fabric_own_address(pdx_fabric* fabric, int64_t link, pdx_fabric_address* out) {
    return done([&] {
        const auto own = fabric->fabric.link(link);
        const pdx::Domain& domain = fabric->fabric.domain();
        *out = {};
        out->region_base = domain.remote_base(own->region->address);
        out->region_bytes = own->region->num_bytes;
        out->region_key = fi_mr_key(own->region_mr);
        out->page_base = domain.remote_base(own->page.get());
        out->page_key = fi_mr_key(own->page_mr);
        out->pid_namespace = pdx::pid_namespace();
        out->window = own->window;
        out->probe_tag = own->probe_tag;
        out->pid = getpid();
        out->name_len = static_cast<uint32_t>(own->name.size());
        std::memcpy(out->name, own->name.data(), own->name.size());
    });
}

int64_t pdx_fabric_connect(pdx_fabric* fabric, int64_t link, const pdx_fabric_address* peer) {
    return done([&] {
        std::vector<char> name(sizeof peer->name, 0);  // zero terminated, whatever the peer sent
        std::memcpy(name.data(), peer->name, std::min<size_t>(peer->name_len, name.size() - 1));
        pdx::PeerAddress address{};
        address.region_base = peer->region_base;
        address.region_bytes = peer->region_bytes;
        address.region_key = peer->region_key;
        address.page_base = peer->page_base;
        address.page_key = peer->page_key;
        address.window = peer->window;
        address.probe_tag = peer->probe_tag;
        address.pid = peer->pid;
        fabric->fabric.connect(link, name, std::move(address));
    });
}

int64_t pdx_fabric_fence(pdx_fabric* fabric, int64_t link) {
    return done([&] { fabric->fabric.fence(link); });
}

int64_t pdx_fabric_open_transfer(pdx_fabric* fabric, int64_t link, uint32_t slot, uint32_t generation) {
    return guarded([&] { return fabric->fabric.open_transfer(link, slot, generation); });
}

int64_t pdx_fabric_add_batch(pdx_fabric* fabric, int64_t transfer, const pdx_fabric_batch* batch) {
    return done([&] { fabric->fabric.add_batch(transfer, make_batch(*batch)); });
}

int64_t pdx_fabric_seal(pdx_fabric* fabric, int64_t transfer) {
    return done([&] { fabric->fabric.seal(transfer); });
}

int64_t pdx_fabric_cancel(pdx_fabric* fabric, int64_t transfer) {
    return done([&] { fabric->fabric.cancel(transfer); });
}

int64_t pdx_fabric_expect(pdx_fabric* fabric, int64_t link, uint32_t slot, uint32_t generation, uint64_t atoms) {
    return done([&] { fabric->fabric.expect(link, slot, generation, atoms); });
}

int64_t pdx_fabric_retarget(pdx_fabric* fabric, uint32_t slot, uint32_t generation, uint64_t atoms) {
    return done([&] { fabric->fabric.retarget(slot, generation, atoms); });
}

int64_t pdx_fabric_count(pdx_fabric* fabric, uint32_t slot, uint32_t generation) {
    return guarded([&] { return static_cast<int64_t>(fabric->fabric.count(slot, generation)); });
}

int64_t pdx_fabric_release(pdx_fabric* fabric, uint32_t slot, uint32_t generation) {
    return guarded([&] { return static_cast<int64_t>(fabric->fabric.release(slot, generation)); });
}

int64_t pdx_fabric_add_wakeup(pdx_fabric* fabric, int32_t fd) {
    return done([&] { fabric->fabric.sleeper().add_wakeup(fd); });
}

int64_t pdx_fabric_remove_wakeup(pdx_fabric* fabric, int32_t fd) {
    return done([&] { fabric->fabric.sleeper().remove_wakeup(fd); });
}

int64_t pdx_fabric_events(pdx_fabric* fabric, pdx_fabric_event* out, size_t max) {
    return guarded([&] {
        const std::vector<pdx::Event> events = fabric->fabric.take_events(max);
        for (size_t i = 0; i < events.size(); i++) fill(events[i], out[i]);
        return static_cast<int64_t>(events.size());
    });
}

void pdx_fabric_free(void* memory) { std::free(memory); }

int64_t pdx_fabric_statistics(pdx_fabric* fabric, uint64_t* out, size_t max) {
    const auto* counters = reinterpret_cast<const std::atomic<uint64_t>*>(&fabric->fabric.statistics());
    for (size_t i = 0; i < std::min(max, pdx::kNumStatistics); i++) out[i] = counters[i].load();
    return static_cast<int64_t>(pdx::kNumStatistics);
}
