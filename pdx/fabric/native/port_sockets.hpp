// This process's sockets of one listener: what a library has that does not hand out its descriptors.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace pdx {

// The address without its port, for people; empty for one that is neither a sockaddr_in nor a sockaddr_in6.
std::string host_text(const std::vector<char>& name);

// Shuts down every TCP socket that listens on this address (a sockaddr_in or _in6) or was accepted there; what has
// arrived can still be read. Any thread may call it while others open and close descriptors. Returns how many were
// accepted; 0 as well where no descriptor is left to look with.
size_t shut_port(const std::vector<char>& name);

// Takes the pacing from this process's connections between a listener of its own and one of a peer, if the peer's
// address is one of this host: TCP's congestion control becomes reno, which every Linux has and lets everybody choose.
// BBR, where it is the host's default, paces by a bandwidth that memory does not have. Nothing is done where it cannot be.
void stop_pacing_on_host(const std::vector<char>& own, const std::vector<char>& peer);

}  // namespace pdx
