// A double of the CUDA driver's virtual memory calls: two devices whose memory is memfd files.
//
// It checks what the driver documents (sizes, order, lifetimes, access), really shares the memory
// between processes, counts what is taken, and fails a call on demand. It says nothing about a GPU.
// The tests build it as libcuda.so.1; unmodified cuda-bindings loads it.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

typedef int CUresult;
typedef unsigned long long CUptr; // CUdeviceptr, and the integer behind an allocation handle

enum {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    INVALID_DEVICE = 101,
    NOT_FOUND = 500,
    NOT_SUPPORTED = 801,
};
enum { MINIMUM = 2 << 20, RECOMMENDED = 4 << 20 };
enum { NUM_DEVICES = 2, DEVICE_BYTES = 1 << 30 };
enum { ON_DEVICE = 1, PINNED = 1, POSIX_FD = 1, DMA_BUF = 1, READ_WRITE = 3, PAGE = 4096 };
enum { MAX = 64 };

typedef struct {
    int kind, id;
} Location;

typedef struct { // CUmemAllocationProp
    int type, handle_types;
    Location location;
    void* win32;
    struct {
        unsigned char compression, gpu_direct;
        unsigned short usage;
        unsigned char reserved[4];
    } flags;
} Properties;

typedef struct { // CUmemAccessDesc
    Location location;
    int flags;
} Access;

typedef struct {
    size_t bytes;
    int fd, device, exportable;
    int handles, mappings; // gone when both are 0
} Allocation;

typedef struct {
    CUptr address;
    size_t bytes;
    Allocation* allocation; // of a mapping
} Range;

static int initialized;
static Allocation allocations[MAX];
static Range reservations[MAX], mappings[MAX];

// ---- what the tests ask for ----

static int calls, failing_call, failing_with, lacking;
static const char* failed_at = "";

static int fails(const char* name) {
    if (++calls == failing_call) failed_at = name;
    return calls == failing_call;
}

#define CALL(name)                         \
    if (fails(name)) return failing_with;  \
    if (!initialized) return NOT_INITIALIZED

// The nth call from now on returns `result`; none where n is 0.
void double_fail(int nth, int result) {
    calls = 0;
    failing_call = nth;
    failing_with = result;
}

// The devices lack an attribute.
void double_lack(int attribute) { lacking = attribute; }

int double_calls(void) { return calls; }
const char* double_failed_at(void) { return failed_at; }

// What is taken: allocations, handles to them, mappings, reservations.
void double_live(int counts[4]) {
    memset(counts, 0, 4 * sizeof *counts);
    for (int i = 0; i < MAX; i++) {
        counts[0] += allocations[i].bytes != 0;
        counts[1] += allocations[i].handles;
        counts[2] += mappings[i].bytes != 0;
        counts[3] += reservations[i].bytes != 0;
    }
}

// ---- inside ----

static Allocation* allocation_of(CUptr handle) {
    for (int i = 0; i < MAX; i++)
        if (handle == (CUptr)&allocations[i] && allocations[i].handles > 0) return &allocations[i];
    return NULL;
}

static Allocation* new_allocation(int fd, size_t bytes, int device, int exportable) {
    for (int i = 0; i < MAX; i++)
        if (!allocations[i].bytes) {
            allocations[i] = (Allocation){bytes, fd, device, exportable, 1, 0};
            return &allocations[i];
        }
    abort();
}

static void drop_unused(Allocation* allocation) {
    if (allocation->handles || allocation->mappings) return;
    close(allocation->fd);
    memset(allocation, 0, sizeof *allocation);
}

static Range* add(Range* table, Range range) {
    for (int i = 0; i < MAX; i++)
        if (!table[i].bytes) return table[i] = range, &table[i];
    abort();
}

static Range* exactly(Range* table, CUptr address, size_t bytes) {
    for (int i = 0; i < MAX; i++)
        if (table[i].bytes == bytes && table[i].address == address) return &table[i];
    return NULL;
}

static int within(const Range* range, CUptr address, size_t bytes) {
    return address >= range->address && address + bytes <= range->address + range->bytes;
}

static int overlaps_a_mapping(CUptr address, size_t bytes) {
    for (int i = 0; i < MAX; i++)
        if (mappings[i].bytes && address < mappings[i].address + mappings[i].bytes &&
            mappings[i].address < address + bytes)
            return 1;
    return 0;
}

static int no_access(CUptr address, size_t bytes) {
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
    return mmap((void*)address, bytes, PROT_NONE, flags, -1, 0) == MAP_FAILED;
}

// Virtual memory 102, POSIX descriptors 103, GPUDirect with virtual memory 110, DMA-BUFs 124.
static int has(int attribute) {
    return attribute != lacking &&
           (attribute == 102 || attribute == 103 || attribute == 110 || attribute == 124);
}

static int valid(const Properties* p) {
    return p && p->type == PINNED && p->location.kind == ON_DEVICE;
}

// ---- the driver: devices ----

CUresult cuInit(unsigned flags) {
    if (fails("cuInit")) return failing_with;
    initialized = 1;
    return flags ? INVALID_VALUE : SUCCESS;
}

CUresult cuDriverGetVersion(int* version) { return *version = 13000, SUCCESS; }

CUresult cuDeviceGetCount(int* count) {
    CALL("cuDeviceGetCount");
    return *count = NUM_DEVICES, SUCCESS;
}

CUresult cuDeviceGet(int* device, int ordinal) {
    CALL("cuDeviceGet");
    if (ordinal < 0 || ordinal >= NUM_DEVICES) return INVALID_DEVICE;
    return *device = ordinal, SUCCESS;
}

CUresult cuDeviceGetAttribute(int* value, int attribute, int device) {
    CALL("cuDeviceGetAttribute");
    *value = has(attribute);
    return device < NUM_DEVICES ? SUCCESS : INVALID_DEVICE;
}

// ---- the driver: memory ----

CUresult cuMemGetAllocationGranularity(size_t* bytes, const Properties* p, int option) {
    CALL("cuMemGetAllocationGranularity");
    if (!valid(p) || p->location.id >= NUM_DEVICES) return INVALID_VALUE;
    return *bytes = option ? RECOMMENDED : MINIMUM, SUCCESS;
}

CUresult cuMemCreate(CUptr* handle, size_t bytes, const Properties* p, CUptr flags) {
    CALL("cuMemCreate");
    if (!valid(p) || flags || !bytes || bytes % MINIMUM) return INVALID_VALUE;
    if (p->location.id < 0 || p->location.id >= NUM_DEVICES) return INVALID_DEVICE;
    // Network cards shall reach the memory wherever they can, and nobody ask for it elsewhere.
    if (p->flags.gpu_direct != has(110)) return NOT_SUPPORTED;
    size_t used = bytes;
    for (int i = 0; i < MAX; i++)
        if (allocations[i].device == p->location.id) used += allocations[i].bytes;
    if (used > DEVICE_BYTES) return OUT_OF_MEMORY;
    int fd = memfd_create("cuda-double", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, bytes)) abort();
    *handle = (CUptr)new_allocation(fd, bytes, p->location.id, p->handle_types & POSIX_FD);
    return SUCCESS;
}

CUresult cuMemRelease(CUptr handle) {
    CALL("cuMemRelease");
    Allocation* allocation = allocation_of(handle);
    if (!allocation) return INVALID_VALUE;
    allocation->handles--;
    drop_unused(allocation);
    return SUCCESS;
}

CUresult cuMemExportToShareableHandle(void* out, CUptr handle, int kind, CUptr flags) {
    CALL("cuMemExportToShareableHandle");
    Allocation* allocation = allocation_of(handle);
    if (!allocation || !allocation->exportable || flags) return INVALID_VALUE;
    if (kind != POSIX_FD) return NOT_SUPPORTED;
    int fd = dup(allocation->fd);
    // A file remembers the device, as the driver's does.
    if (fd < 0 || lseek(fd, allocation->device, SEEK_SET) < 0) abort();
    return *(int*)out = fd, SUCCESS;
}

CUresult cuMemImportFromShareableHandle(CUptr* handle, void* os_handle, int kind) {
    CALL("cuMemImportFromShareableHandle");
    if (kind != POSIX_FD) return NOT_SUPPORTED;
    struct stat file;
    int fd = dup((int)(intptr_t)os_handle);
    if (fd < 0 || fstat(fd, &file) || !file.st_size) return INVALID_VALUE;
    *handle = (CUptr)new_allocation(fd, file.st_size, (int)lseek(fd, 0, SEEK_CUR), 1);
    return SUCCESS;
}

CUresult cuMemAddressReserve(CUptr* out, size_t bytes, size_t alignment, CUptr at, CUptr flags) {
    CALL("cuMemAddressReserve");
    if (!bytes || bytes % MINIMUM || alignment || at || flags) return INVALID_VALUE;
    char* base = mmap(NULL, bytes + MINIMUM, PROT_NONE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) return OUT_OF_MEMORY;
    CUptr address = ((CUptr)base + MINIMUM - 1) / MINIMUM * MINIMUM;
    if (address > (CUptr)base) munmap(base, address - (CUptr)base);
    if (address < (CUptr)base + MINIMUM)
        munmap((void*)(address + bytes), (CUptr)base + MINIMUM - address);
    add(reservations, (Range){address, bytes, NULL});
    return *out = address, SUCCESS;
}

CUresult cuMemAddressFree(CUptr address, size_t bytes) {
    CALL("cuMemAddressFree");
    Range* reservation = exactly(reservations, address, bytes);
    if (!reservation || overlaps_a_mapping(address, bytes)) return INVALID_VALUE;
    munmap((void*)address, bytes);
    memset(reservation, 0, sizeof *reservation);
    return SUCCESS;
}

CUresult cuMemMap(CUptr address, size_t bytes, size_t offset, CUptr handle, CUptr flags) {
    CALL("cuMemMap");
    Allocation* allocation = allocation_of(handle);
    if (!allocation || offset || flags) return INVALID_VALUE;
    if (!bytes || bytes % MINIMUM || address % MINIMUM || bytes > allocation->bytes)
        return INVALID_VALUE;
    int reserved = 0;
    for (int i = 0; i < MAX; i++) reserved |= within(&reservations[i], address, bytes);
    if (!reserved || overlaps_a_mapping(address, bytes)) return INVALID_VALUE;
    int flags_of_file = MAP_SHARED | MAP_FIXED;
    if (mmap((void*)address, bytes, PROT_NONE, flags_of_file, allocation->fd, 0) == MAP_FAILED)
        return OUT_OF_MEMORY;
    allocation->mappings++;
    add(mappings, (Range){address, bytes, allocation});
    return SUCCESS;
}

CUresult cuMemSetAccess(CUptr address, size_t bytes, const Access* access, size_t count) {
    CALL("cuMemSetAccess");
    Range* mapping = exactly(mappings, address, bytes);
    if (!mapping || count != 1 || access->location.kind != ON_DEVICE) return INVALID_VALUE;
    if (access->location.id != mapping->allocation->device) return INVALID_DEVICE;
    if (access->flags != READ_WRITE) return INVALID_VALUE;
    return mprotect((void*)address, bytes, PROT_READ | PROT_WRITE) ? INVALID_VALUE : SUCCESS;
}

// A DMA-BUF is one GPU's memory, all of it mapped. What comes back is the file behind it, which says
// nothing of a place within: so the range begins where a mapping does.
CUresult cuMemGetHandleForAddressRange(void* out, CUptr address, size_t bytes, int kind,
                                       CUptr flags) {
    CALL("cuMemGetHandleForAddressRange");
    if (kind != DMA_BUF || flags || !bytes || bytes % PAGE || address % PAGE) return INVALID_VALUE;
    for (int i = 0; i < MAX; i++) {
        if (!mappings[i].bytes || mappings[i].address != address) continue;
        if (!within(&mappings[i], address, bytes)) return INVALID_VALUE;
        if (!has(124)) return NOT_SUPPORTED;
        int fd = dup(mappings[i].allocation->fd);
        if (fd < 0) abort();
        return *(int*)out = fd, SUCCESS;
    }
    return INVALID_VALUE;
}

CUresult cuMemUnmap(CUptr address, size_t bytes) {
    CALL("cuMemUnmap");
    Range* mapping = exactly(mappings, address, bytes);
    if (!mapping || no_access(address, bytes)) return INVALID_VALUE;
    Allocation* allocation = mapping->allocation;
    memset(mapping, 0, sizeof *mapping);
    allocation->mappings--;
    drop_unused(allocation);
    return SUCCESS;
}

// ---- the driver: what the tests look at the memory with ----

CUresult cuDevicePrimaryCtxRetain(void** context, int device) {
    CALL("cuDevicePrimaryCtxRetain");
    return *context = &allocations + device, SUCCESS;
}

CUresult cuCtxSetCurrent(void* context) { return context ? SUCCESS : INVALID_VALUE; }
CUresult cuMemcpyHtoD_v2(CUptr to, const void* from, size_t bytes) {
    return memcpy((void*)to, from, bytes), SUCCESS;
}
CUresult cuMemcpyDtoH_v2(void* to, CUptr from, size_t bytes) {
    return memcpy(to, (void*)from, bytes), SUCCESS;
}

// ---- how cuda-bindings finds them ----

CUresult cuGetProcAddress_v2(const char* name, void** function, int version, CUptr flags,
                             int* status) {
    (void)version, (void)flags;
    char newer[128];
    snprintf(newer, sizeof newer, "%s_v2", name);
    void* self = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    *function = dlsym(self, newer);
    if (!*function) *function = dlsym(self, name);
    dlclose(self);
    if (status) *status = *function ? 0 : 1;
    return *function ? SUCCESS : NOT_FOUND;
}
