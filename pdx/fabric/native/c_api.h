/* The C ABI of libpdx_fabric.so, mirrored in pdx/fabric/native_library.py. Numbers below 0 are errors: the negated code,
 * with a message in pdx_fabric_error() of the same thread. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define PDX_FABRIC_ABI 7
#define PDX_FABRIC_MAX_DOMAINS 8
#define PDX_FABRIC_MAX_PARTS 64

typedef struct pdx_fabric pdx_fabric;

typedef struct {
    int32_t provider; /* 0 tcp, 1 shm, 2 verbs, 3 efa */
    int32_t cpu;      /* -1: not pinned */
    int32_t device_memory;
    int32_t reserved;
    const char* hosts; /* a domain on each, separated by newlines: numeric addresses, or names (efa); empty for shm */
    uint64_t cq_entries;
    int64_t spin_ns, beat_interval_ns, beat_timeout_ns, connect_timeout_ns;
} pdx_fabric_options;

/* Device memory: its address, and the DMA-BUF that has it at this offset; host memory: dmabuf_fd is -1. */
typedef struct {
    void* address;
    uint64_t num_bytes;
    uint64_t dmabuf_offset;
    int32_t dmabuf_fd, cuda_device;
} pdx_fabric_part;

/* One side of a link as the other needs it: what a descriptor carries. */
typedef struct {
    uint64_t part_bases[PDX_FABRIC_MAX_PARTS], part_keys[PDX_FABRIC_MAX_PARTS];
    uint64_t page_base, page_key;
    uint32_t name_len;
    uint32_t reserved;
    char name[512];
} pdx_fabric_end; /* in one domain */

typedef struct {
    uint64_t pid_namespace;
    uint32_t window, probe_tag;
    int32_t pid;
    uint32_t num_parts, num_ends;
    uint32_t reserved;
    uint64_t part_bytes[PDX_FABRIC_MAX_PARTS];
    pdx_fabric_end ends[PDX_FABRIC_MAX_DOMAINS];
} pdx_fabric_address;

typedef struct {
    uint64_t num_pages;
    uint64_t page_bytes;
    uint64_t src_offset, dst_offset;
    uint64_t src_layer_stride, dst_layer_stride;
    uint64_t src_page_stride, dst_page_stride;
    uint32_t num_layers;
    uint32_t reserved;
    const uint64_t* word; /* null: post now */
    uint64_t first_value;
} pdx_fabric_batch;

typedef struct {
    uint32_t kind; /* EventKind in events.hpp */
    int32_t code;
    int64_t link, transfer;
    uint32_t slot, generation;
    uint64_t atoms, failed_atoms;
    int64_t first_post_ns, last_progress_ns;
    uint32_t cancelled;
    uint32_t num_arrivals;
    int64_t* arrival_ns; /* both freed with pdx_fabric_free() by the reader */
    uint32_t* arrival_atoms;
    char reason[256];
} pdx_fabric_event;

#ifndef PDX_API
#define PDX_API
#endif

PDX_API uint32_t pdx_fabric_abi(void);
PDX_API const char* pdx_fabric_error(void);
/* Paths separated by newlines; the newest is kept. Writes the chosen path. Returns the version as fi_version() gives it. */
PDX_API int64_t pdx_fabric_load(const char* paths, char* chosen, size_t chosen_bytes);
/* The provider's name in that library; empty if it is not offered here. */
PDX_API int64_t pdx_fabric_provider(int32_t provider, char* name, size_t name_bytes);

PDX_API int64_t pdx_fabric_open(const pdx_fabric_options* options, pdx_fabric** out);
/* Waits for the calls of other threads; later ones are refused (EBADF). A second one does nothing. */
PDX_API void pdx_fabric_close(pdx_fabric* fabric);
/* Closes, and frees the handle: no call may follow or run. */
PDX_API void pdx_fabric_delete(pdx_fabric* fabric);
PDX_API int64_t pdx_fabric_fd(pdx_fabric* fabric);

PDX_API int64_t pdx_fabric_register(pdx_fabric* fabric, const pdx_fabric_part* parts, size_t num_parts);
PDX_API int64_t pdx_fabric_unregister(pdx_fabric* fabric, int64_t region);
PDX_API int64_t pdx_fabric_open_link(pdx_fabric* fabric, int64_t region, uint32_t window);
PDX_API int64_t pdx_fabric_own_address(pdx_fabric* fabric, int64_t link, pdx_fabric_address* out);
PDX_API int64_t pdx_fabric_connect(pdx_fabric* fabric, int64_t link, const pdx_fabric_address* peer);
PDX_API int64_t pdx_fabric_fence(pdx_fabric* fabric, int64_t link);

PDX_API int64_t pdx_fabric_open_transfer(pdx_fabric* fabric, int64_t link, uint32_t slot, uint32_t generation);
PDX_API int64_t pdx_fabric_add_batch(pdx_fabric* fabric, int64_t transfer, const pdx_fabric_batch* batch,
                                     const uint32_t* src_pages, const uint32_t* dst_pages);
PDX_API int64_t pdx_fabric_seal(pdx_fabric* fabric, int64_t transfer);
PDX_API int64_t pdx_fabric_cancel(pdx_fabric* fabric, int64_t transfer);

PDX_API int64_t pdx_fabric_expect(pdx_fabric* fabric, int64_t link, uint32_t slot, uint32_t generation, uint64_t atoms);
PDX_API int64_t pdx_fabric_retarget(pdx_fabric* fabric, uint32_t slot, uint32_t generation, uint64_t atoms);
PDX_API int64_t pdx_fabric_count(pdx_fabric* fabric, uint32_t slot, uint32_t generation);
PDX_API int64_t pdx_fabric_release(pdx_fabric* fabric, uint32_t slot, uint32_t generation);

PDX_API int64_t pdx_fabric_add_wakeup(pdx_fabric* fabric, int32_t fd);
PDX_API int64_t pdx_fabric_remove_wakeup(pdx_fabric* fabric, int32_t fd);

/* Returns how many events were written, at most max. */
PDX_API int64_t pdx_fabric_events(pdx_fabric* fabric, pdx_fabric_event* out, size_t max);
PDX_API void pdx_fabric_free(void* memory);
/* Writes at most max counters in the order of Statistics in events.hpp; returns how many there are. */
PDX_API int64_t pdx_fabric_statistics(pdx_fabric* fabric, uint64_t* out, size_t max);
/* The same for one domain, in the order of DomainStatistics. */
PDX_API int64_t pdx_fabric_domain_statistics(pdx_fabric* fabric, uint32_t domain, uint64_t* out, size_t max);

#ifdef __cplusplus
}
#endif
