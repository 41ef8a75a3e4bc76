// How a CPU rank publishes its progress word (see pdx/kv/progress.py). Called on the rank's compute thread, right
// after the append of a layer; a fabric worker in another process reads the word with acquire order.

#include <cstdint>

extern "C" {

// Stores `value` so that whoever reads it with acquire order also sees every KV byte written before.
__attribute__((visibility("default"))) void pdx_publish(uint64_t* word, uint64_t value) {
    __atomic_store_n(word, value, __ATOMIC_RELEASE);
}

}  // extern "C"
