/* What libfabric alone moves here, and what memcpy moves: the limits that `pdx bench transfer` measures against.
 *
 *   raw PROVIDER POOL_BYTES SOURCE TARGET     a writer and, forked, a receiver that poll their completion queues
 *   raw memcpy POOL_BYTES SOURCE TARGET       one thread, from one pool into the other
 *
 * Each line on stdin is a cell: page_bytes pages_per_write batch_pages seconds number. The answer is a line of JSON.
 * SOURCE and TARGET are descriptors of the pools' files; pages are taken in a fixed random order; the writer drains each batch before it posts the next; the
 * clock stops when the receiver says that it has counted every write. Between cells both processes sleep. */
#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_rma.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { kWindow = 256, kBurst = 32, kMaxPages = 4, kContexts = 4096, kTimeoutS = 30, kWarmBytes = 64 };

typedef struct {
    uint64_t page_bytes, group, batch_pages, number;
    double seconds;
} Cell;

typedef struct {
    char name[512];
    size_t name_len;
    uint64_t key, base;
} Address;

/* To the receiver: begin a cell, or here is how much was written. */
typedef struct {
    uint64_t ends, writes, pages, page_bytes, number;
} Order;

static size_t pool_bytes;
static uint32_t *src_order, *dst_order;
static struct fi_info* info;
static struct fid_ep* ep;
static struct fid_cq* cq;
static struct fid_mr* mr;
static fi_addr_t peer;
static Address remote;
static char* pool;
static int channel;
static pid_t child;
static struct fi_context2 contexts[kContexts];

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* shm leaves a file behind unless its endpoint is closed; so the receiver is given time for that as well. */
static _Noreturn void leave(int code) {
    if (ep) fi_close(&ep->fid);
    if (child > 0) {
        close(channel);
        waitpid(child, NULL, 0);
    }
    exit(code);
}

static void fail(const char* what, long code) {
    fprintf(stderr, "raw: %s: %s\n", what, code < 0 ? fi_strerror((int)-code) : "");
    leave(1);
}

static void must(const char* what, long code) {
    if (code < 0) fail(what, code);
}

static void send_all(const void* data, size_t n) {
    if (send(channel, data, n, MSG_NOSIGNAL) != (ssize_t)n) leave(1);
}

/* False: nothing yet (only where `wait` is 0). The other end's death ends this process. */
static int receive_all(void* data, size_t n, int wait) {
    const ssize_t got = recv(channel, data, n, wait ? MSG_WAITALL : MSG_DONTWAIT);
    if (got == (ssize_t)n) return 1;
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return 0;
    leave(got == 0 ? 0 : 1);
}

static char* map_pool(const char* fd) {
    char* at = mmap(NULL, pool_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, atoi(fd), 0);
    if (at == MAP_FAILED) fail("mmap", -errno);
    return at;
}

static void shuffle(uint32_t* order, uint32_t n, uint64_t seed) {
    for (uint32_t i = 0; i < n; i++) order[i] = i;
    for (uint32_t i = n - 1; i > 0; i--) {
        seed ^= seed << 13, seed ^= seed >> 7, seed ^= seed << 17;
        const uint32_t j = (uint32_t)(seed % (i + 1)), kept = order[i];
        order[i] = order[j], order[j] = kept;
    }
}

static uint32_t set_order(uint64_t page_bytes) {
    const uint32_t n = (uint32_t)(pool_bytes / page_bytes);
    shuffle(src_order, n, 0x2545F4914F6CDD1Dull);
    shuffle(dst_order, n, 0x9E3779B97F4A7C15ull);
    return n;
}

/* As pattern.py fills and compares: every word. A pool that was only touched here and there lies otherwise in the caches,
 * and over shm pages of 4 KiB then moved 1.2 times as fast. */
static uint64_t first_word(uint32_t page, uint64_t number) { return (number << 32 | page) * 0x9E3779B97F4A7C15ull; }

static void fill(char* at, uint64_t page_bytes, uint64_t number) {
    uint64_t* word = (uint64_t*)at;
    for (uint32_t page = 0; page < pool_bytes / page_bytes; page++) {
        const uint64_t first = first_word(page, number);
        for (uint64_t i = 0; i < page_bytes / 8; i++) *word++ = first + i;
    }
}

static uint64_t count_bad(const char* at, uint64_t page_bytes, uint64_t pages, uint64_t number) {
    const uint64_t n = pool_bytes / page_bytes, checked = pages < n ? pages : n;
    uint64_t bad = 0;
    for (uint64_t k = 0; k < checked; k++) {
        const uint64_t first = first_word(src_order[k], number);
        const uint64_t* word = (const uint64_t*)(at + dst_order[k] * page_bytes);
        uint64_t wrong = 0;
        for (uint64_t i = 0; i < page_bytes / 8; i++) wrong |= word[i] ^ (first + i);
        bad += wrong != 0;
    }
    return bad;
}

static void open_endpoint(const char* provider) {
    struct fi_info* hints = fi_allocinfo();
    const int is_tcp = strcmp(provider, "shm") != 0;
    hints->fabric_attr->prov_name = strdup(provider);
    hints->ep_attr->type = FI_EP_RDM;
    hints->caps = FI_MSG | FI_RMA;
    hints->mode = FI_CONTEXT | FI_CONTEXT2;
    hints->domain_attr->mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY | FI_MR_ENDPOINT;
    hints->domain_attr->cq_data_size = 4;
    if (is_tcp) hints->addr_format = FI_SOCKADDR_IN;
    must("fi_getinfo",
         fi_getinfo(FI_VERSION(1, 17), is_tcp ? "127.0.0.1" : NULL, NULL, is_tcp ? FI_SOURCE : 0, hints, &info));
    struct fid_fabric* fabric;
    struct fid_domain* domain;
    struct fid_av* av;
    must("fi_fabric", fi_fabric(info->fabric_attr, &fabric, NULL));
    must("fi_domain", fi_domain(fabric, info, &domain, NULL));
    struct fi_av_attr av_attr = {.type = FI_AV_TABLE, .count = 4};
    must("fi_av_open", fi_av_open(domain, &av_attr, &av, NULL));
    struct fi_cq_attr cq_attr = {.size = 16384, .format = FI_CQ_FORMAT_DATA, .wait_obj = FI_WAIT_NONE};
    must("fi_cq_open", fi_cq_open(domain, &cq_attr, &cq, NULL));
    must("fi_endpoint", fi_endpoint(domain, info, &ep, NULL));
    must("fi_ep_bind", fi_ep_bind(ep, &av->fid, 0));
    must("fi_ep_bind", fi_ep_bind(ep, &cq->fid, FI_RECV | FI_TRANSMIT));
    must("fi_enable", fi_enable(ep));
    must("fi_mr_reg", fi_mr_reg(domain, pool, pool_bytes, FI_REMOTE_WRITE | FI_WRITE, 0, 7, 0, &mr, NULL));
    if (info->domain_attr->mr_mode & FI_MR_ENDPOINT) {
        must("fi_mr_bind", fi_mr_bind(mr, &ep->fid, 0));
        must("fi_mr_enable", fi_mr_enable(mr));
    }
    Address own = {.name_len = sizeof own.name, .key = fi_mr_key(mr)};
    own.base = info->domain_attr->mr_mode & FI_MR_VIRT_ADDR ? (uint64_t)(uintptr_t)pool : 0;
    must("fi_getname", fi_getname(&ep->fid, own.name, &own.name_len));
    send_all(&own, sizeof own);
    receive_all(&remote, sizeof remote, 1);
    if (fi_av_insert(av, remote.name, 1, &peer, 0, NULL) != 1) fail("fi_av_insert", 0);
}

/* Completions with `flag` since the last call. Also what makes libfabric progress. */
static uint64_t reap(uint64_t flag) {
    struct fi_cq_data_entry entries[64];
    const ssize_t n = fi_cq_read(cq, entries, 64);
    if (n == -FI_EAGAIN) return 0;
    if (n < 0) fail("fi_cq_read", n);
    uint64_t count = 0;
    for (ssize_t i = 0; i < n; i++) count += (entries[i].flags & flag) != 0;
    return count;
}

static void receive_forever(void) {
    uint64_t counted = 0;
    for (;;) {
        Order begin, end;
        struct pollfd sleeping = {.fd = channel, .events = POLLIN};
        poll(&sleeping, 1, -1);
        if (!receive_all(&begin, sizeof begin, 0)) continue;
        set_order(begin.page_bytes);
        counted = 0;
        send_all(&begin, sizeof begin);
        uint32_t turns = 0;
        memset(&end, 0, sizeof end);
        while (!end.ends || counted < end.writes) {
            counted += reap(FI_REMOTE_CQ_DATA);
            if (!end.ends && ++turns % 64 == 0) receive_all(&end, sizeof end, 0);
        }
        send_all(&counted, sizeof counted);
        const uint64_t bad = end.page_bytes ? count_bad(pool, end.page_bytes, end.pages, end.number) : 0;
        send_all(&bad, sizeof bad);
    }
}

static ssize_t post(uint64_t first_page, uint64_t pages, uint64_t page_bytes, uint64_t all_pages, uint64_t write, int more) {
    struct iovec local[kMaxPages];
    struct fi_rma_iov target[kMaxPages];
    void* descriptors[kMaxPages];
    for (uint64_t i = 0; i < pages; i++) {
        const uint64_t at = (first_page + i) % all_pages;
        local[i] = (struct iovec){pool + src_order[at] * page_bytes, page_bytes};
        target[i] = (struct fi_rma_iov){remote.base + dst_order[at] * page_bytes, page_bytes, remote.key};
        descriptors[i] = fi_mr_desc(mr);
    }
    const struct fi_msg_rma message = {local,  descriptors, pages, peer, target, pages, &contexts[write % kContexts],
                                       write & 0xFFFFFFFF};
    return fi_writemsg(ep, &message, FI_COMPLETION | FI_REMOTE_CQ_DATA | (more ? FI_MORE : 0));
}

static void await(void* answer, size_t n, double until) {
    while (!receive_all(answer, n, 0)) {
        reap(FI_WRITE);
        if (now() > until) fail("the receiver does not answer", 0);
    }
}

/* Writes of a batch: the last may hold fewer pages, so that all systems write the same. */
static void write_batch(const Cell* cell, uint64_t all_pages, uint64_t* pages, uint64_t* writes, double until) {
    const uint64_t end = *pages + cell->batch_pages;
    uint64_t in_flight = 0;
    while (*pages < end || in_flight) {
        for (int i = 0; i < kBurst && *pages < end && in_flight < kWindow; i++) {
            const uint64_t left = end - *pages, n = left < cell->group ? left : cell->group;
            const int more = i + 1 < kBurst && in_flight + 1 < kWindow && left > n;
            const ssize_t rc = post(*pages, n, cell->page_bytes, all_pages, *writes, more);
            if (rc == -FI_EAGAIN) break;
            must("fi_writemsg", rc);
            *pages += n, *writes += 1, in_flight++;
        }
        in_flight -= reap(FI_WRITE);
        if (now() > until) fail("timeout in a cell", 0);
    }
}

static void fabric_cell(const Cell* cell) {
    const uint32_t all_pages = set_order(cell->page_bytes);
    fill(pool, cell->page_bytes, cell->number);
    Order order = {.page_bytes = cell->page_bytes, .number = cell->number};
    send_all(&order, sizeof order);
    const double until = now() + kTimeoutS;
    await(&order, sizeof order, until);
    uint64_t pages = 0, writes = 0, counted, bad;
    const double begun = now();
    for (int batches = 0; batches < 2 || now() - begun < cell->seconds; batches++)
        write_batch(cell, all_pages, &pages, &writes, until);
    order.ends = 1, order.writes = writes, order.pages = pages;
    send_all(&order, sizeof order);
    await(&counted, sizeof counted, until);
    const double seconds = now() - begun;
    await(&bad, sizeof bad, now() + kTimeoutS);
    printf("{\"pages\":%lu,\"seconds\":%.9f,\"bad\":%lu}\n", pages, seconds, bad);
}

static void memcpy_cell(char* to, const Cell* cell) {
    const uint32_t all_pages = set_order(cell->page_bytes);
    fill(pool, cell->page_bytes, cell->number);
    uint64_t pages = 0;
    const double begun = now();
    for (int batches = 0; batches < 2 || now() - begun < cell->seconds; batches++) {
        for (uint64_t end = pages + cell->batch_pages; pages < end; pages++) {
            const uint64_t at = pages % all_pages, n = cell->page_bytes;
            memcpy(to + dst_order[at] * n, pool + src_order[at] * n, n);
        }
    }
    const double seconds = now() - begun;
    const uint64_t bad = count_bad(to, cell->page_bytes, pages, cell->number);
    printf("{\"pages\":%lu,\"seconds\":%.9f,\"bad\":%lu}\n", pages, seconds, bad);
}

/* The first write makes the connection, before the clock of the first cell starts. Not earlier: others use the memory. */
static void connect_to_receiver(void) {
    Order order = {0};
    order.page_bytes = pool_bytes;
    send_all(&order, sizeof order);
    const double until = now() + kTimeoutS;
    await(&order, sizeof order, until);
    src_order[0] = dst_order[0] = 0;
    uint64_t pages = 0, writes = 0, counted, bad;
    const Cell cell = {.page_bytes = kWarmBytes, .group = 1, .batch_pages = 1};
    write_batch(&cell, 1, &pages, &writes, until);
    order.ends = 1, order.writes = writes, order.page_bytes = 0;
    send_all(&order, sizeof order);
    await(&counted, sizeof counted, until);
    await(&bad, sizeof bad, until);
}

int main(int argc, char** argv) {
    if (argc != 5) return 2;
    /* When the bench dies, stdin ends, which lets us leave in order. Nothing else may end us before: neither the
       signal to a stopped group whose parent is gone, nor the one for an answer that nobody reads. */
    signal(SIGHUP, SIG_IGN);
    signal(SIGPIPE, SIG_IGN);
    pool_bytes = strtoull(argv[2], NULL, 10);
    const size_t order_bytes = (pool_bytes / 512 + 1) * sizeof(uint32_t);
    src_order = malloc(order_bytes), dst_order = malloc(order_bytes);
    const int is_memcpy = strcmp(argv[1], "memcpy") == 0;
    char* to = NULL;
    if (is_memcpy) {
        pool = map_pool(argv[3]), to = map_pool(argv[4]);
    } else {
        int pair[2];
        if (socketpair(AF_UNIX, SOCK_STREAM, 0, pair)) fail("socketpair", -errno);
        child = fork();
        channel = pair[child == 0];
        close(pair[child != 0]);
        if (child == 0) prctl(PR_SET_PDEATHSIG, SIGKILL);
        pool = map_pool(argv[child == 0 ? 4 : 3]);
        open_endpoint(argv[1]);
        if (child == 0) receive_forever();
    }
    int connected = is_memcpy;
    Cell cell;
    while (scanf("%lu %lu %lu %lf %lu", &cell.page_bytes, &cell.group, &cell.batch_pages, &cell.seconds, &cell.number) == 5) {
        if (cell.page_bytes < 512 || cell.group < 1 || cell.group > kMaxPages) fail("cell", 0);
        if (!connected) connect_to_receiver();
        connected = 1;
        is_memcpy ? memcpy_cell(to, &cell) : fabric_cell(&cell);
        fflush(stdout);
    }
    leave(0);
}
