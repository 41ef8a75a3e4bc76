// This process's sockets on one port: what a library has that does not hand out its descriptors.
#pragma once

#include <cstddef>
#include <vector>

namespace pdx {

// Shuts down every TCP socket that listens on this address (a sockaddr_in or _in6) or was accepted there; what has
// arrived can still be read. Any thread may call it while others open and close descriptors. Returns how many were
// accepted; 0 as well where no descriptor is left to look with.
size_t shut_port(const std::vector<char>& name);

}  // namespace pdx
