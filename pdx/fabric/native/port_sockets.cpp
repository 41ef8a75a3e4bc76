#include "port_sockets.hpp"

#include <arpa/inet.h>
#include <dirent.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>

namespace pdx {
namespace {

static_assert(offsetof(sockaddr_in, sin_port) == offsetof(sockaddr_in6, sin6_port));

constexpr char kDescriptors[] = "/proc/self/fd";

// Of either family; both have their ports in one place.
in_port_t port_of(const sockaddr_storage& address) { return reinterpret_cast<const sockaddr_in&>(address).sin_port; }

const in_addr& ipv4(const sockaddr_storage& address) { return reinterpret_cast<const sockaddr_in&>(address).sin_addr; }

const in6_addr& ipv6(const sockaddr_storage& address) {
    return reinterpret_cast<const sockaddr_in6&>(address).sin6_addr;
}

bool is_same_host(const sockaddr_storage& a, const sockaddr_storage& b) {
    if (a.ss_family != b.ss_family) return false;
    if (a.ss_family == AF_INET) return ipv4(a).s_addr == ipv4(b).s_addr;
    return a.ss_family == AF_INET6 && IN6_ARE_ADDR_EQUAL(&ipv6(a), &ipv6(b));
}

bool is_any(const sockaddr_storage& address) {
    if (address.ss_family == AF_INET) return ipv4(address).s_addr == htonl(INADDR_ANY);
    return address.ss_family == AF_INET6 && IN6_IS_ADDR_UNSPECIFIED(&ipv6(address));
}

// The same port of the same address, or of any where the listener takes all.
bool is_on(const sockaddr_storage& local, const sockaddr_storage& listener) {
    return local.ss_family == listener.ss_family && port_of(local) == port_of(listener) &&
           (is_any(listener) || is_same_host(local, listener));
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

// An interface's address, or one of the loopback interface's network (127.0.0.2).
bool is_at(const ifaddrs& interface, const sockaddr_storage& wanted) {
    if (!interface.ifa_addr || interface.ifa_addr->sa_family != wanted.ss_family) return false;
    const auto& own = reinterpret_cast<const sockaddr_storage&>(*interface.ifa_addr);
    if (is_same_host(own, wanted)) return true;
    if (wanted.ss_family != AF_INET || !(interface.ifa_flags & IFF_LOOPBACK) || !interface.ifa_netmask) return false;
    const auto& mask = reinterpret_cast<const sockaddr_storage&>(*interface.ifa_netmask);
    return !((ipv4(own).s_addr ^ ipv4(wanted).s_addr) & ipv4(mask).s_addr);
}

// That an address can be bound proves nothing: where net.ipv4.ip_nonlocal_bind is set, as on hosts that take over each
// other's addresses, all can.
bool is_of_this_host(const sockaddr_storage& wanted) {
    ifaddrs* interfaces = nullptr;
    if (getifaddrs(&interfaces)) return false;
    const ifaddrs* each = interfaces;
    while (each && !is_at(*each, wanted)) each = each->ifa_next;
    freeifaddrs(interfaces);
    return each != nullptr;
}

}  // namespace

std::string host_text(const std::vector<char>& name) {
    const sockaddr_storage from = address(name);
    char text[INET6_ADDRSTRLEN] = "";
    if (from.ss_family == AF_INET) inet_ntop(AF_INET, &ipv4(from), text, sizeof text);
    if (from.ss_family == AF_INET6) inet_ntop(AF_INET6, &ipv6(from), text, sizeof text);
    return text;
}

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
