// Small things that every file of the core needs: errors, the clock, identifiers. No state.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <stdexcept>
#include <string>

namespace pdx {

using LinkId = int64_t;
using TransferId = int64_t;
using RegionId = int64_t;

// What a caller of the C ABI gets as a message and a positive errno-like code.
struct Error : std::runtime_error {
    int code;
    Error(int error_code, const std::string& message) : std::runtime_error(message), code(error_code) {}
};

inline int64_t now_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return int64_t{t.tv_sec} * 1'000'000'000 + t.tv_nsec;
}

// An invariant of ours. Always on: a broken one must not go on writing into other people's memory.
#define PDX_INVARIANT(condition)                                                                    \
    do {                                                                                            \
        if (!(condition)) {                                                                         \
            std::fprintf(stderr, "pdx fabric: broken invariant %s (%s:%d)\n", #condition, __FILE__, \
                         __LINE__);                                                                 \
            std::abort();                                                                           \
        }                                                                                           \
    } while (0)

}  // namespace pdx
