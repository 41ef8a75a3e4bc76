// How a CPU rank publishes its progress word (see pdx/kv/progress.py). Called on the rank's compute thread, right
// after the append of a layer; a fabric worker in another process reads the word with acquire order.

#include <cstdint>
#include <unistd.h>

extern "C" {

// Stores `value` so that whoever reads it with acquire order also sees every KV byte written before. Then wakes a
// worker that sleeps on `eventfd` (-1: nobody does). The eventfd must be non-blocking: a full counter means that a wake
// is pending already, so a failed write is no error.
__attribute__((visibility("default"))) void pdx_publish(uint64_t* word, uint64_t value, int eventfd) {
    __atomic_store_n(word, value, __ATOMIC_RELEASE);
    if (eventfd >= 0) {
        const uint64_t one = 1;
        ssize_t written = ::write(eventfd, &one, sizeof one);
        (void)written;
    }
}

}  // extern "C"
