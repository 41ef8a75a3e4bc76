#include "port_sockets.hpp"

#include <dirent.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>

namespace pdx {
namespace {

constexpr char kDescriptors[] = "/proc/self/fd";

// The same port of the same address, or of any where the listener takes all.
bool is_on(const sockaddr_storage& local, const sockaddr_storage& listener) {
    if (local.ss_family != listener.ss_family) return false;
    if (local.ss_family == AF_INET) {
        const auto& a = reinterpret_cast<const sockaddr_in&>(local);
        const auto& b = reinterpret_cast<const sockaddr_in&>(listener);
        return a.sin_port == b.sin_port &&
               (b.sin_addr.s_addr == htonl(INADDR_ANY) || a.sin_addr.s_addr == b.sin_addr.s_addr);
    }
    if (local.ss_family != AF_INET6) return false;
    const auto& a = reinterpret_cast<const sockaddr_in6&>(local);
    const auto& b = reinterpret_cast<const sockaddr_in6&>(listener);
    return a.sin6_port == b.sin6_port && (IN6_IS_ADDR_UNSPECIFIED(&b.sin6_addr) ||
                                          std::memcmp(&a.sin6_addr, &b.sin6_addr, sizeof a.sin6_addr) == 0);
}

bool is_socket(const char* number) {
    char target[8];
    const ssize_t size = readlink((std::string(kDescriptors) + "/" + number).c_str(), target, sizeof target);
    return size >= 7 && std::memcmp(target, "socket:", 7) == 0;
}

int option(int fd, int name) {
    int value = -1;
    socklen_t size = sizeof value;
    return getsockopt(fd, SOL_SOCKET, name, &value, &size) == 0 ? value : -1;
}

using AddressOf = int (*)(int fd, sockaddr* address, socklen_t* size);

// Of a socket's own end (getsockname) or its peer's (getpeername); no family: it has none.
sockaddr_storage address(int fd, AddressOf address_of) {
    sockaddr_storage found{};
    socklen_t size = sizeof found;
    if (address_of(fd, reinterpret_cast<sockaddr*>(&found), &size)) found.ss_family = AF_UNSPEC;
    return found;
}

sockaddr_storage address(const std::vector<char>& name) {
    sockaddr_storage found{};
    std::memcpy(&found, name.data(), std::min(name.size(), sizeof found));
    return found;
}

// Calls `on_socket` with a copy of each descriptor of a TCP socket: the number may be another file's by now, a copy
// stays its.
template <typename OnSocket>
void for_each_stream(OnSocket on_socket) {
    const std::unique_ptr<DIR, int (*)(DIR*)> folder(opendir(kDescriptors), closedir);
    if (!folder) return;
    while (const dirent* entry = readdir(folder.get())) {
        if (!is_socket(entry->d_name)) continue;
        const int copy = fcntl(std::atoi(entry->d_name), F_DUPFD_CLOEXEC, 0);
        if (copy < 0) continue;
        if (option(copy, SO_TYPE) == SOCK_STREAM) on_socket(copy);
        close(copy);
    }
}

// Only an address of this host can be bound.
bool is_of_this_host(sockaddr_storage address) {
    if (address.ss_family == AF_INET) reinterpret_cast<sockaddr_in&>(address).sin_port = 0;
    if (address.ss_family == AF_INET6) reinterpret_cast<sockaddr_in6&>(address).sin6_port = 0;
    const int probe = socket(address.ss_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (probe < 0) return false;
    const bool bound = bind(probe, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0;
    close(probe);
    return bound;
}

}  // namespace

size_t shut_port(const std::vector<char>& name) {
    const sockaddr_storage listener = address(name);
    size_t accepted = 0;
    for_each_stream([&](int fd) {
        if (!is_on(address(fd, getsockname), listener)) return;
        accepted += option(fd, SO_ACCEPTCONN) == 0;
        shutdown(fd, SHUT_RDWR);
    });
    return accepted;
}

void stop_pacing_on_host(const std::vector<char>& own, const std::vector<char>& peer) {
    const sockaddr_storage listener = address(own), peer_listener = address(peer);
    if (!is_of_this_host(peer_listener)) return;
    for_each_stream([&](int fd) {
        const sockaddr_storage remote = address(fd, getpeername);
        const bool opened = is_on(remote, peer_listener);
        const bool accepted = is_on(address(fd, getsockname), listener) && is_of_this_host(remote);
        if (opened || accepted) setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, "reno", 4);
    });
}

}  // namespace pdx
